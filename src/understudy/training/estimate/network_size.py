"""NetworkSize: numbers of parameters of a network. Importing it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NetworkSize:
    """Numbers of parameters, exactly. FSDP gathers a block at a time, and all that is outside of blocks at once."""

    parameters: int
    trained: int
    parameter_bytes: int
    largest_block: int
    largest_trained_block: int
    outside_blocks: int
    trained_outside_blocks: int
    mixed_dtypes: bool = False
