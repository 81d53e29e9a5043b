"""The process that reads an HDF5 file. A damaged file can crash or hang the HDF5 library; then only this process ends,
and not the user's.

    python child.py FILE        one request a line on standard input, as JSON:
                                  {"do": "names", "path": "/data"}
                                  {"do": "tree", "path": "/data/demo_0"}
                                  {"do": "read", "path": "/data/demo_0/actions"}
                                an answer on standard output: a line of JSON, and the bytes of an array behind it

It imports nothing of this package, so that it starts fast. It refuses references to other files (links, external and
virtual datasets) and everything but plain arrays of numbers or text.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

BASE_S = 3.0  # of CPU time per answer; more for large arrays
BYTES_PER_S = 20e6
MOST_BYTES = 1 << 32  # of one array
MOST_ADDRESSES = 1 << 34
MOST_RATIO = 1100  # deflate packs zeros 1,032 to 1
MOST_ENTRIES = 10_000
MOST_DEPTH = 12
KINDS = "biuf"


class Refused(Exception):
    """The file contains something that is not allowed."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > MOST_ADDRESSES:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, hard))
    file: Any = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, BASE_S)  # SIGPROF is not caught, so it ends the process
        request = json.loads(line)
        data: Any = b""
        try:
            if file is None:
                file = h5py.File(sys.argv[1], "r")
            answer, data = _DO[request["do"]](file, request["path"])
            line = json.dumps(answer).encode()
        except Refused as error:
            line, data = json.dumps({"error": str(error)}).encode(), b""
        except Exception as error:  # noqa: BLE001 (h5py raises many types; the parent reports them)
            line, data = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode(), b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def names(file: Any, path: str) -> tuple[dict[str, Any], bytes]:
    """The names in a group and its attributes."""
    group = _at(file, path)
    if not isinstance(group, h5py.Group):
        raise Refused(f"{path}: expected a group, got a dataset")
    return {"names": list(group), "attrs": _attrs(group)}, b""


def tree(file: Any, path: str) -> tuple[dict[str, Any], bytes]:
    """All groups and datasets below a path, with their attributes."""
    found: dict[str, Any] = {}
    waiting = [(path.rstrip("/"), 0)]
    while waiting:
        where, depth = waiting.pop()
        node = _at(file, where or "/")
        if len(found) >= MOST_ENTRIES or depth > MOST_DEPTH:
            raise Refused(f"{path}: holds more than {MOST_ENTRIES} entries, or is deeper than {MOST_DEPTH} groups")
        if isinstance(node, h5py.Group):
            found[where] = {"attrs": _attrs(node)}
            waiting += [(f"{where}/{name}", depth + 1) for name in reversed(list(node))]
        else:
            found[where] = {"attrs": _attrs(node), "shape": _shape(node, where), "dtype": _dtype(node, where)}
    return {"tree": found}, b""


def read(file: Any, path: str) -> tuple[dict[str, Any], Any]:
    """A dataset: its bytes, or a list of texts in the answer itself."""
    node = _at(file, path)
    if isinstance(node, h5py.Group):
        raise Refused(f"{path}: expected a dataset, got a group")
    shape, dtype = _shape(node, path), _dtype(node, path)
    if dtype == "str":
        if len(shape) != 1 or shape[0] * 16 > MOST_RATIO * max(node.id.get_storage_size(), 1):
            raise Refused(f"{path}: expected a list of texts")
        values = [value.decode() if isinstance(value, bytes) else str(value) for value in node[()]]
        return {"texts": values}, b""
    if dtype == "ragged":
        return _read_ragged(node, path, shape)
    if dtype is None:
        raise Refused(f"{path}: expected numbers or text, got {node.dtype}")
    size = int(np.prod(shape, dtype=object)) * node.dtype.itemsize
    if size > MOST_BYTES or size > MOST_RATIO * node.id.get_storage_size():
        raise Refused(f"{path}: claims {size} bytes, and the file stores {node.id.get_storage_size()} for them")
    signal.setitimer(signal.ITIMER_PROF, BASE_S + size / BYTES_PER_S)
    if node.dtype.kind == "b" and (node[()].view(np.uint8) > 1).any():
        raise Refused(f"{path}: holds a truth value that is neither 0 nor 1")
    array = np.ascontiguousarray(node[()]).astype(node.dtype.newbyteorder("<"), copy=False)
    return {"shape": shape, "dtype": dtype}, array.reshape(-1).view(np.uint8).data if array.size else b""


def _read_ragged(node: Any, path: str, shape: list[int]) -> tuple[dict[str, Any], Any]:
    """Concatenated rows of bytes, with their lengths."""
    if len(shape) != 1 or shape[0] * 16 > MOST_RATIO * max(node.id.get_storage_size(), 1):
        raise Refused(f"{path}: expected rows of bytes")
    rows = [np.asarray(row, np.uint8) for row in node[()]]
    data = np.concatenate([np.empty(0, np.uint8), *rows])
    return {"shape": [len(data)], "dtype": "uint8", "lengths": [len(row) for row in rows]}, data.data


_DO = {"names": names, "tree": tree, "read": read}


def _at(file: Any, path: str) -> Any:
    """The object at a path, every part of which is a plain link."""
    node, parts = file, [part for part in path.split("/") if part]
    for part in parts:
        if not isinstance(node, h5py.Group):
            raise Refused(f"{path}: is not there")
        kind = node.get(part, getclass=True, getlink=True)
        if kind is not h5py.HardLink:
            raise Refused(f"{path}: is not there" if kind is None else f"{path}: is a link to elsewhere, not followed")
        node = node[part]
    if not isinstance(node, h5py.Group | h5py.Dataset):
        raise Refused(f"{path}: expected a group or a dataset, got {type(node).__name__}")
    if isinstance(node, h5py.Dataset) and (node.external or node.is_virtual):
        raise Refused(f"{path}: its values are in another file, which is not opened; copy them into this one")
    return node


def _shape(node: Any, path: str) -> list[int]:
    if node.shape is None:
        raise Refused(f"{path}: is empty")
    return [int(size) for size in node.shape]


def _dtype(node: Any, path: str) -> str | None:
    """Numpy's name of the dtype; "str" for text, "ragged" for rows of bytes; None if it cannot be read."""
    if h5py.check_string_dtype(node.dtype) is not None:
        return "str"
    if h5py.check_vlen_dtype(node.dtype) == np.uint8:
        return "ragged"
    plain = node.dtype.kind in KINDS and node.dtype.itemsize <= 8
    return str(node.dtype.name) if plain else None


def _attrs(node: Any) -> dict[str, Any]:
    """Attributes that JSON can hold: text, numbers and short lists of them."""
    found = {}
    for name in node.attrs:
        value = node.attrs[name]
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in KINDS and value.size <= 100_000:
            value = value.tolist()
        if isinstance(value, str | int | float | bool | list):
            found[name] = value
    return found


if __name__ == "__main__":
    main()
