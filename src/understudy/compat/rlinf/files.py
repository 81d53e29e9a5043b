"""The files of RLinf's buffer: `metadata.json`, `trajectory_index.json` and one `.pt` or `.pkl` per trajectory.

A file can only create tensors, numbers, text and containers: nothing in it is run. What is written here RLinf loads.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from understudy.compat.rlinf.tensors import torch
from understudy.core import StoreError, StoreFormatError
from understudy.durable import files
from understudy.durable.errors import store_errors

METADATA_FILE = "metadata.json"
INDEX_FILE = "trajectory_index.json"
FORMATS = ("pt", "pkl")


@dataclass(frozen=True, kw_only=True)
class SavedBuffer:
    """A directory of RLinf: what its two JSON files say."""

    path: Path
    trajectory_format: str
    metadata: Mapping[str, Any]
    ids: Sequence[int]
    index: Mapping[int, Mapping[str, Any]]

    def file(self, trajectory_id: int) -> Path:
        weights = self.index[trajectory_id].get("model_weights_id", "")
        return self.path / file_name(trajectory_id, weights, self.trajectory_format)

    def read_bytes(self, trajectory_id: int) -> bytes:
        file = self.file(trajectory_id)
        if not file.is_file():
            raise MissingFileError(
                f"{file}: listed in {INDEX_FILE}, and not there; copy it, or remove it from the index"
            )
        with store_errors(file, "read"):
            return file.read_bytes()

    def load(self, trajectory_id: int) -> dict[str, Any]:
        """The fields of a trajectory, as they were saved."""
        file, data = self.file(trajectory_id), self.read_bytes(trajectory_id)
        found = load_pt(data, file) if self.trajectory_format == "pt" else load_pkl(data, file)
        if not isinstance(found, dict):
            raise StoreFormatError(
                f"{file}: expected a dict of fields, got {type(found).__name__}; is it a trajectory?"
            )
        return found


class MissingFileError(StoreFormatError, FileNotFoundError):
    """A file of a checkpoint is not there; RLinf raises FileNotFoundError for it."""


def is_saved_buffer(path: Path) -> bool:
    return (path / METADATA_FILE).is_file() and (path / INDEX_FILE).is_file()


def read_saved_buffer(path: Path) -> SavedBuffer:
    try:
        with store_errors(path, "read"):
            metadata = json.loads((path / METADATA_FILE).read_text())
            index = json.loads((path / INDEX_FILE).read_text())
        trajectory_format = metadata.get("trajectory_format", "pt")
        if trajectory_format not in FORMATS:
            raise StoreFormatError(f"{path}: trajectory_format: expected pt or pkl, got {trajectory_format!r}")
        return SavedBuffer(
            path=path,
            trajectory_format=trajectory_format,
            metadata=metadata,
            ids=[int(number) for number in index.get("trajectory_id_list", [])],
            index={int(number): entry for number, entry in index.get("trajectory_index", {}).items()},
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise StoreFormatError(f"{path}: its JSON files are not those of a buffer of RLinf ({error})") from None


def file_name(trajectory_id: int, model_weights_id: str, trajectory_format: str) -> str:
    name = f"trajectory_{trajectory_id}_{model_weights_id}.{trajectory_format}"
    if os.sep in name or name in (".", ".."):
        raise StoreError(f"model_weights_id: expected text without {os.sep!r}, got {model_weights_id!r}; change it")
    return name


def write_saved_buffer(
    path: Path,
    trajectory_format: str,
    metadata: Mapping[str, Any],
    index: Mapping[int, Mapping[str, Any]],
    trajectories: Iterator[tuple[int, dict[str, Any]]],
) -> None:
    """Write the directory anew; a crash leaves the old one or the new one, unless it stops between two renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        for number, fields in trajectories:
            name = file_name(number, str(index[number]["model_weights_id"]), trajectory_format)
            with store_errors(partial / name, "write"):
                files.write_durably(partial / name, dump_pt(fields) if trajectory_format == "pt" else dump_pkl(fields))
        listed = {"trajectory_index": {str(n): entry for n, entry in index.items()}, "trajectory_id_list": [*index]}
        for name, value in ((INDEX_FILE, listed), (METADATA_FILE, metadata)):
            with store_errors(partial / name, "write"):
                files.write_durably(partial / name, json.dumps(value).encode())
        _replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(new: Path, path: Path) -> None:
    """Put a directory in the place of another, of which only the files of such a directory are removed."""
    with store_errors(path, "rename"):
        if not path.exists():
            new.rename(path)
            return
        (path / METADATA_FILE).unlink(missing_ok=True)  # from here on it is no buffer, until the last rename
        for pattern in ("trajectory_*.pt", "trajectory_*.pkl", INDEX_FILE):
            for old in path.glob(pattern):
                old.unlink()
        for file in sorted(new.iterdir(), key=lambda file: file.name == METADATA_FILE):
            file.rename(path / file.name)
        new.rmdir()
        files.sync_directory(path)


# ---- one trajectory


def dump_pt(fields: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch().save(fields, buffer)
    return buffer.getvalue()


def dump_pkl(fields: dict[str, Any]) -> bytes:
    return pickle.dumps(fields)


def load_pt(data: bytes, path: Path) -> Any:
    try:
        return torch().load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise StoreFormatError(
            f"{path}: cannot be read as tensors, numbers, text and containers ({str(error).splitlines()[0]}); "
            f"save it again with these alone"
        ) from None


def load_pkl(data: bytes, path: Path) -> Any:
    try:
        return _TensorUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, IndexError, TypeError) as error:
        raise StoreFormatError(
            f"{path}: cannot be read as tensors, numbers, text and containers ({error}); save it again with these alone"
        ) from None


class _TensorUnpickler(pickle.Unpickler):
    """Reads pickled tensors: the names that a pickle may use are these few, and none of them runs anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch().load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return partial(getattr(torch()._utils, name))  # a new object: a pickle may set attributes on what it gets
        if module == "torch" and hasattr(torch(), name) and isinstance(getattr(torch(), name), torch().dtype):
            return getattr(torch(), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
