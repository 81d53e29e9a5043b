"""Distributed training of any torch module: ranks, DDP, FSDP, row exchange and sharded checkpoints."""
