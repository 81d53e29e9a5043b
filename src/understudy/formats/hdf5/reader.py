"""Hdf5Reader: reads an HDF5 file in a child process, which may crash on a damaged file.

| process | takes from | blocks on | woken by |
|---|---|---|---|
| the caller | answers of the child | the pipe | the child's answer, or its end |
| child.py | requests | the pipe | a request; it ends with the caller, or after some seconds of work on one answer |
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core.closeable import Closeable
from understudy.formats.format import FormatError

CHILD = Path(__file__).with_name("child.py")
SIGNATURE = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset without its values."""

    path: str
    shape: tuple[int, ...]
    dtype: str | None  # as numpy has it, "str", "ragged" for rows of bytes; None if it cannot be read
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group and everything below it, by relative path."""

    path: str
    attrs: Mapping[str, Any]
    datasets: Mapping[str, Dataset]
    groups: Mapping[str, Mapping[str, Any]]  # the attributes of each


class Hdf5Reader(Closeable):
    """Sends one request at a time. Not thread-safe."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                start = file.read(len(SIGNATURE))
        except OSError as error:
            raise FormatError(f"{path}: cannot be read ({error.strerror}); check the path") from None
        if start != SIGNATURE:
            raise FormatError(f"{path}: is not an HDF5 file; check the path")
        self._child: subprocess.Popen[bytes] | None = None

    def names(self, path: str) -> tuple[list[str], dict[str, Any]]:
        """The names in a group, and its attributes."""
        answer, _ = self._request("names", path)
        return answer["names"], answer["attrs"]

    def tree(self, path: str) -> Group:
        answer, _ = self._request("tree", path)
        start = len(path.rstrip("/")) + 1
        found = {name[start:]: node for name, node in answer["tree"].items()}
        datasets = {
            name: Dataset(path=f"{path}/{name}", shape=tuple(node["shape"]), dtype=node["dtype"], attrs=node["attrs"])
            for name, node in found.items()
            if "shape" in node
        }
        groups = {name: node["attrs"] for name, node in found.items() if "shape" not in node}
        if "" not in groups:
            raise FormatError(f"{self.path}: {path}: expected a group, got a dataset")
        return Group(path=path, attrs=groups[""], datasets=datasets, groups=groups)

    def read(self, path: str) -> Any:
        """A dataset as a new array, or as a list of texts or of rows of bytes."""
        answer, array = self._request("read", path)
        if array is None:
            return answer["texts"]
        return np.split(array, np.cumsum(answer["lengths"])[:-1]) if "lengths" in answer else array

    def _request(self, what: str, path: str) -> tuple[Any, np.ndarray[Any, Any] | None]:
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps({"do": what, "path": path}).encode() + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
            answer = json.loads(line)
        except (BrokenPipeError, ValueError):
            raise self._died(path) from None
        if "error" in answer:
            raise FormatError(f"{self.path}: {answer['error']}")
        if "dtype" not in answer:
            return answer, None
        dtype, shape = answer["dtype"], answer["shape"]
        array = np.empty(shape, dtype)
        data = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
        num_read = 0
        while num_read < len(data):
            count = child.stdout.readinto(data[num_read:])  # type: ignore[attr-defined]
            if not count:
                raise self._died(path)
            num_read += count
        return answer, array

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, str(CHILD), str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._child

    def _died(self, path: str) -> FormatError:
        child = self._child
        self.close()
        how = "ended" if child is None else f"ended with {child.returncode}"
        return FormatError(
            f"{self.path}: {path}: the process that reads it {how}: the HDF5 library crashed on the file, or "
            f"hung; the file is damaged (h5dump may say where)"
        )

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
