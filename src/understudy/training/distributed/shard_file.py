"""Shard file: the tensors that one rank holds, in one safetensors file that torch's distributed checkpoint reads.

Torch's own writer first makes a copy of the whole file in memory. Here the file is written in pieces from the tensors
themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from understudy.durable import files
from understudy.training.distributed.errors import RanksError

# What torch's reader looks for in the header; a test compares it with a file of torch's writer.
_WHERE, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_METADATA = {"DCP_VERSION": "1.0", "format": "pt"}
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED_BYTES = 8
_BLOCK_BYTES = 2**22


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A part of a tensor, in host memory, and where it begins in the whole one."""

    name: str
    tensor: Tensor  # contiguous
    offsets: tuple[int, ...]


def file_name(rank: int) -> str:
    """The name of the file of a rank, as torch calls it."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_shard(path: Path, pieces: Sequence[Piece]) -> str:
    """Write the file and sync it; returns its checksum. The directory that it is in gets its name later."""
    ordered = sorted(pieces, key=lambda piece: (-piece.tensor.element_size(), piece.name))  # so that all are aligned
    content = [memoryview(_header(ordered)), *(_bytes_of(piece.tensor) for piece in ordered)]
    digest = xxhash.xxh3_128()
    for view in content:
        for start in range(0, len(view), _BLOCK_BYTES):
            digest.update(view[start : start + _BLOCK_BYTES])  # in blocks, so that other threads get their turn
    files.write_synced(path, content)
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # numpy's stubs do not say that it is a buffer
    return memoryview(array)


def _header(pieces: Sequence[Piece]) -> bytes:
    """As https://huggingface.co/docs/safetensors describes it."""
    where = {piece.name: {_OFFSETS: list(piece.offsets)} for piece in pieces}
    entries: dict[str, object] = {"__metadata__": {**_METADATA, _WHERE: json.dumps(where)}}
    end = 0
    for piece in pieces:
        if piece.tensor.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise RanksError(f"{piece.name}: a checkpoint cannot hold {piece.tensor.dtype}; it holds {known}")
        begin, end = end, end + piece.tensor.nbytes
        dtype, shape = _DTYPES[piece.tensor.dtype], list(piece.tensor.shape)
        entries[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text
