"""Parameters: one version of a policy's weights as a message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from understudy.core import StoreError, WireError
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.tree import Tree
from understudy.replay.format.layout import SAFETENSORS_DTYPES
from understudy.service.wire.message import (
    Assembly,
    Buffer,
    Header,
    arrays_of,
    as_array,
    from_json,
    pack,
    parse_json,
    receive_body,
    to_bfloat16,
    to_json,
)

NO_PARAMETERS = 0  # versions count from 1
MAX_DEPTH = 64  # of a tree of parameters
_METADATA_KEY = "said"  # in the message's own metadata; stores hold such messages, so the key stays


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """One published version. Stamp `version` on each step that the policy chooses (`Step.policy_version`)."""

    version: int
    tree: Tree  # of arrays
    metadata: Mapping[str, str] = field(default_factory=dict)  # what the learner passed to `publish`


class UnusableVersionError(WireError):
    """A version arrived whole, and is none that this program can use."""

    def __init__(self, text: str, *, version: int, store_id: str):
        super().__init__(text)
        self.version = version
        self.store_id = store_id


def encode_parameters(tree: Tree, metadata: Mapping[str, str], *, bfloat16: bool) -> list[Buffer]:
    """A version as the buffers of a message; with `bfloat16`, float32 and float64 take two bytes per number."""
    arrays = {}
    for path, leaf in trees.leaves(tree):
        arrays[path] = array = np.asarray(leaf)
        if array.dtype.name not in SAFETENSORS_DTYPES:
            raise StoreError(
                f"{path}: expected an array of numbers, got {describe(array)}; convert it, or leave it out"
            )
    _refuse_empty(tree, "parameters")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise StoreError(f"metadata/{key}: expected text, got {describe(value)}; convert it with str or json.dumps")
    if "" in arrays:
        raise StoreError("parameters: expected a dict of arrays, got one array; give it a name")
    halved = frozenset(p for p, a in arrays.items() if bfloat16 and a.dtype in (np.float32, np.float64))
    arrays |= {path: to_bfloat16(arrays[path]) for path in halved}
    return pack({_METADATA_KEY: json.dumps(dict(metadata))}, arrays, bfloat16=halved)


def _refuse_empty(tree: Tree, path: str) -> None:
    """Refuse a dict without arrays: it would not be sent, and the receiver would get another tree."""
    if isinstance(tree, Mapping):
        if not tree:
            raise StoreError(f"{path}: expected at least one array, got none; leave the empty dict out")
        for name, child in tree.items():
            _refuse_empty(child, f"{path}/{name}")


def encode_version(version: int, store_id: str) -> bytes:
    """What a server sends after the pieces of a version, once that version is on its disk."""
    return to_json({"version": version, "store": store_id})


def receive_parameters(messages: Iterator[bytes], *, max_bytes: int) -> tuple[Parameters, str]:
    """The next version of a subscription's stream, and the id of the store that it comes from."""
    header, body = receive_body(messages, max_bytes=max_bytes)
    numbered = from_json(next(messages))
    version, store_id = numbered.get("version"), numbered.get("store")
    if type(version) is not int or not isinstance(store_id, str):
        raise WireError(f"expected the version of parameters and its store, got {str(numbered)[:100]}")
    try:
        given = _parse_metadata(header)
        _check_names(header)
        tree = trees.unflatten(arrays_of(header, body))
    except WireError as error:
        raise UnusableVersionError(f"version {version}: {error}", version=version, store_id=store_id) from None
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    return Parameters(version=version, tree=tree, metadata=metadata), store_id


# ---- what a server checks before it takes or sends a version


def check_parameters(header: Header, *, new: bool = True) -> None:
    """Refuse a header that no subscriber could use. Metadata that is not text is refused only in a new version."""
    _check_names(header)
    for key, value in _parse_metadata(header).items():
        if new and not isinstance(value, str):
            raise WireError(f"metadata/{key[:80]}: expected text, got {describe(value)}; convert it before you publish")


def check_flags(assembly: Assembly) -> None:
    """Refuse a complete message with a flag that is neither 0 nor 1."""
    for tensor in assembly.header.tensors:
        if tensor.dtype == SAFETENSORS_DTYPES["bool"]:
            as_array(assembly.bytes_of(tensor), tensor)


def _parse_metadata(header: Header) -> dict[str, Any]:
    text = header.metadata.get(_METADATA_KEY, "{}")
    try:
        given = parse_json(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise WireError(f"metadata: expected a JSON object of texts, got {text[:40]!r}; publish a dict of texts")
    return given


def _check_names(header: Header) -> None:
    """Refuse names that are not the paths of one tree: each leaf is an array, and each other node a dict."""
    names = {tensor.name for tensor in header.tensors}
    if not names:
        raise WireError("parameters: expected at least one array, got none; publish a dict of arrays")
    for name in names:
        parts = name.split(trees.SEPARATOR)
        if not name or len(parts) > MAX_DEPTH:
            raise WireError(f"parameters: expected a name of 1 to {MAX_DEPTH} parts, got {name[:40]!r}; rename it")
        for number in range(1, len(parts)):
            if (parent := trees.SEPARATOR.join(parts[:number])) in names:
                raise WireError(
                    f"{parent[:80]}: expected an array or a dict of arrays, got both ({name[:80]}); rename one"
                )
