"""Parameters: one version of a policy's weights as a message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from understudy.core import StoreError, WireError
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.tree import Tree
from understudy.replay.format.layout import SAFETENSORS_DTYPES
from understudy.service.wire.message import Buffer, pack, receive, to_bfloat16
from understudy.service.wire.protocol import from_json, to_json

NO_PARAMETERS = 0  # versions count from 1
_METADATA_KEY = "said"  # in the message's own metadata; stores hold such messages, so the key stays


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """One published version. Stamp `version` on each step that the policy chooses (`Step.policy_version`)."""

    version: int
    tree: Tree  # of arrays
    metadata: Mapping[str, str] = field(default_factory=dict)  # what the learner passed to `publish`


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
    metadata, arrays = receive(messages, max_bytes=max_bytes)
    numbered = from_json(next(messages))
    version, store_id = numbered.get("version"), numbered.get("store")
    if type(version) is not int or not isinstance(store_id, str):
        raise WireError(f"expected the version of parameters and its store, got {str(numbered)[:100]}")
    given = json.loads(metadata.get(_METADATA_KEY, "{}"))
    return Parameters(version=version, tree=trees.unflatten(arrays), metadata=given), store_id
