"""Batches: requests for batches as JSON, and batches as messages. Everything received is checked.

A view's condition is SQL from another machine. It may read an episode's attributes and call a few functions of text
and numbers, and nothing else; see `view_from_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeAlias

import numpy as np

from understudy.core import SequenceBatch, Source, StoreError, TransitionBatch, WireError
from understudy.core import tree as trees
from understudy.core.resize import Resize, ResizeOption, as_resize
from understudy.core.spec import ArraySpec
from understudy.core.step import StepSpec
from understudy.replay.format.conditions import check_condition
from understudy.replay.format.records import ATTRIBUTE_COLUMNS
from understudy.replay.read.batch_shapes import Sequences, Transitions
from understudy.replay.read.view import Clause, View
from understudy.replay.sample.batch_source import BatchShape
from understudy.replay.sample.selectors import Fifo, Selector, Uniform, UniformEpisodes
from understudy.service.wire.chunks import pack_ragged, unpack_ragged
from understudy.service.wire.message import Assembly, Buffer, as_array, pack

Array = np.ndarray[Any, Any]
Batch: TypeAlias = TransitionBatch | SequenceBatch

MAX_BATCH_BYTES = 2**30
MAX_MESSAGE_BYTES = MAX_BATCH_BYTES + 2**20  # with the overhead of a message
MAX_CLAUSES, MAX_CONDITION_LENGTH = 16, 2000

_SHAPES: dict[str, type[Transitions] | type[Sequences]] = {"transitions": Transitions, "sequences": Sequences}
_SELECTORS: dict[str, type[Any]] = {"uniform": Uniform, "uniform_episodes": UniformEpisodes, "fifo": Fifo}
_ATTRIBUTE_SCHEMA = f"create table episodes ({', '.join(ATTRIBUTE_COLUMNS)})"


# ---- requests


def view_to_json(view: View) -> dict[str, Any]:
    clauses = [{"where": c.where, "sources": sorted(int(source) for source in c.sources)} for c in view.clauses]
    return {"name": view.name, "clauses": clauses}


def view_from_json(value: Any) -> View:
    """A view that a client sent; refused if its conditions do more than read attributes of episodes."""
    try:
        clauses = tuple(
            Clause(where=str(c["where"]), sources=frozenset(Source(number) for number in c["sources"]))
            for c in value["clauses"]
        )
        name = str(value["name"])[:200]
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"view: not a view ({type(error).__name__}: {str(error)[:100]})") from None
    if len(clauses) > MAX_CLAUSES or any(len(clause.where) > MAX_CONDITION_LENGTH for clause in clauses):
        raise StoreError(
            f"view {name!r}: at most {MAX_CLAUSES} clauses of {MAX_CONDITION_LENGTH} characters; use a smaller view"
        )
    for clause in clauses:
        _check_condition(name, clause.where)
    return View(name=name, clauses=clauses)


def _check_condition(name: str, where: str) -> None:
    """Refuse a condition that does more than read attributes: another machine need not know ids and deletions."""
    try:
        check_condition(where, _ATTRIBUTE_SCHEMA, of_view=True)
    except StoreError as error:
        allowed = f"a condition may use {', '.join(ATTRIBUTE_COLUMNS)} and simple functions"
        raise StoreError(f"view {name!r}: {str(error)[:500]}; {allowed}") from None


def shape_to_json(shape: BatchShape[Any]) -> dict[str, Any]:
    for kind, cls in _SHAPES.items():
        if type(shape) is cls:
            return {"kind": kind, **asdict(shape)}
    raise StoreError(
        f"shape: expected Transitions or Sequences, got {type(shape).__name__}; sample on the store's machine"
    )


def shape_from_json(value: Any) -> Transitions | Sequences:
    try:
        options = dict(value)
        shape = _SHAPES[options.pop("kind")](**options)
        sizes = [v for v in asdict(shape).values() if type(v) is int]
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"shape: not a shape ({type(error).__name__}: {str(error)[:100]})") from None
    if any(size > 100_000 for size in sizes):
        raise StoreError(f"shape: {max(sizes)} is more than a server samples at once; request shorter ones")
    return shape


def selector_to_json(selector: Selector) -> dict[str, Any]:
    for kind, cls in _SELECTORS.items():
        if type(selector) is cls:
            return {"kind": kind, **selector.options}  # type: ignore[attr-defined]
    raise StoreError(
        f"selector: expected one of {', '.join(_SELECTORS)} over the network, got {type(selector).__name__}; "
        f"run the learner on the store's machine"
    )


def selector_from_json(value: Any) -> Selector:
    try:
        options = dict(value)
        found: Selector = _SELECTORS[options.pop("kind")](**options)
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"selector: not a selector ({type(error).__name__}: {str(error)[:100]})") from None
    return found


def resize_to_json(option: ResizeOption | None) -> dict[str, Any] | None:
    if option is None:
        return None
    if isinstance(option, Mapping):
        return {"fields": {name: as_resize(value).to_json() for name, value in option.items()}}
    return {"all": as_resize(option).to_json()}


def resize_from_json(value: Any) -> ResizeOption | None:
    """The size that a client asks for; whether the store's cameras have it to give is found by the sampler."""
    try:
        if value is None:
            return None
        if "all" in value:
            return Resize.from_json(value["all"])
        return {str(name): Resize.from_json(each) for name, each in value["fields"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise WireError(f"resize: not a size ({type(error).__name__}: {str(error)[:100]})") from None


# ---- a batch as a message


def encode_batch(batch: Batch, metadata: Mapping[str, str]) -> list[Buffer]:
    arrays: dict[str, Array] = {}
    for path, leaf in _leaves(batch):
        arrays |= pack_ragged(path, leaf.ravel().tolist()) if leaf.dtype == object else {path: leaf}
    return pack(metadata, arrays)


def fill_batch(batch: Batch, at: slice, assembly: Assembly, spec: StepSpec) -> None:
    """Copy a received message into `batch[at]`; large fields are copied straight from the pieces."""
    targets = dict(_leaves(batch))
    direct: list[Array] = []  # flat bytes of each tensor of the message, in its order
    buffered: dict[str, Array] = {}  # those that cannot be copied into the batch directly
    for tensor in assembly.header.tensors:
        target = targets.get(tensor.name)
        rows = None if target is None or target.dtype == object else target[at]
        if rows is not None and rows.flags.c_contiguous:
            flat = rows.reshape(-1).view(np.uint8)
        else:
            flat = buffered[tensor.name] = np.empty(tensor.num_bytes, np.uint8)
        if flat.size != tensor.num_bytes:
            raise WireError(f"{tensor.name}: expected {flat.size} bytes, got {tensor.num_bytes}; is the server newer?")
        direct.append(flat)
    assembly.scatter(direct)
    found = {t.name: as_array(buffered[t.name], t) for t in assembly.header.tensors if t.name in buffered}
    for path, target in targets.items():
        if target.dtype == object:
            values = unpack_ragged(path, _leaf(spec, path), found)
            rows = target[at]
            for number, index in enumerate(np.ndindex(rows.shape)):
                rows[index] = values[number]
        elif path in found:
            target[at] = found.pop(path)


def _leaves(batch: Batch) -> list[tuple[str, Array]]:
    return [pair for item in fields(batch) for pair in trees.leaves(getattr(batch, item.name), item.name)]


def _leaf(spec: StepSpec, path: str) -> ArraySpec:
    return spec.columns[path.removeprefix("next_")]


def num_bytes_of(batch: Batch) -> int:
    """The memory of a batch; a ragged value counts as a pointer."""
    return sum(leaf.nbytes for _, leaf in _leaves(batch))
