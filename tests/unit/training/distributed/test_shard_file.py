"""Shard files are those that torch's distributed checkpoint writes and reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.shard_file import _DTYPES, Piece, file_name, write_shard


def pieces() -> list[Piece]:
    values = {f"of/{dtype}": torch.arange(3).to(dtype) for dtype in _DTYPES}
    values |= {"a number": torch.tensor(7.0), "wide": torch.arange(12.0).reshape(3, 4), "flags": torch.ones(5).bool()}
    return [Piece(name=name, tensor=value, offsets=(0,) * value.dim()) for name, value in values.items()]


def metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, Any] = dict(file.metadata())
    return {**found, "DCP_SHARDING_INFO": json.loads(found["DCP_SHARDING_INFO"])}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_it_is_the_file_that_torch_writes(tmp_path: Path) -> None:
    tensors = {piece.name: piece.tensor for piece in pieces()}
    save(
        dict(tensors),
        storage_writer=HuggingFaceStorageWriter(str(tmp_path / "torch"), save_distributed=True),
        no_dist=True,
    )
    (tmp_path / "ours").mkdir()
    ours, theirs = tmp_path / "ours" / file_name(0), tmp_path / "torch" / file_name(0)
    checksum = write_shard(ours, pieces())
    assert checksum == xxhash.xxh3_128_hexdigest(ours.read_bytes())
    assert metadata(ours) == metadata(theirs)
    mine, other = load_file(ours), load_file(theirs)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) and mine[name].dtype == other[name].dtype for name in mine)
    into = {name: torch.zeros_like(value) for name, value in tensors.items()}
    load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    assert all(torch.equal(into[name], value) for name, value in tensors.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_of_a_tensor_come_together(tmp_path: Path) -> None:
    whole = torch.arange(20.0).reshape(5, 4)
    for rank, (begin, end) in enumerate([(0, 2), (2, 5)]):
        piece = Piece(name="whole", tensor=whole[begin:end].clone(), offsets=(begin, 0))
        write_shard(tmp_path / file_name(rank), [piece])
    into = {"whole": torch.zeros(5, 4)}
    load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(into["whole"], whole)


def test_a_dtype_that_it_cannot_hold(tmp_path: Path) -> None:
    piece = Piece(name="x", tensor=torch.zeros(2, dtype=torch.complex64), offsets=(0,))
    with pytest.raises(RanksError, match=r"x: a checkpoint cannot hold torch.complex64; it holds float64, float32"):
        write_shard(tmp_path / "file", [piece])
