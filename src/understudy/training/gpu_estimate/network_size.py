"""NetworkSize: numbers of parameters of a network. Importing it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NetworkSize:
    """Numbers of parameters, exactly, on one rank or on each of several."""

    parameters: int
    trained: int
    parameter_bytes: int
    largest_block: int
    shard_bytes: int  # of the first of the ranks that FSDP shards it over; without FSDP, of all parameters
    shard_trained: int
    gathered: int  # of all that FSDP gathers, with the rows that make all shards alike
    mixed_dtypes: bool = False
