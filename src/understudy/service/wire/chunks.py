"""Chunks as messages, and back. Every value of a received chunk is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.core import Source, SpecError, StepSpec, UnderstudyError, WireError
from understudy.core.spec import ArraySpec, describe
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.format.records import info_from_json, info_to_json
from understudy.replay.format.segment import from_bytes, to_bytes
from understudy.service.wire.message import Buffer, check_of, pack, parse_json, unpack

Array = np.ndarray[Any, Any]

_BYTES, _LENGTHS = "ragged/", "length/"  # of a ragged field: its values end to end, and their lengths


def encode_chunk(seq: int, columns: Mapping[str, Any], parts: Sequence[Part]) -> list[Buffer]:
    """A chunk as the buffers of a message. Its writer is not in it: the stream's hello names it."""
    entries = [[p.episode, p.first_index, p.num_rows, p.state, info_to_json(p.info)] for p in parts]
    arrays: dict[str, Array] = {}
    for path, column in columns.items():
        if isinstance(column, list):
            arrays |= pack_ragged(path, column)
        else:
            arrays[path] = column
    return pack({"seq": str(seq), "parts": json.dumps(entries, ensure_ascii=False)}, arrays)


def decode_chunk(message: Buffer, *, writer: str, incarnation: str, spec: StepSpec) -> Chunk:
    """The chunk in a message; raises SpecError or WireError if a value does not fit the spec."""
    metadata, arrays = unpack(message)
    try:
        seq = int(metadata["seq"])
        parts = tuple(_part(*entry) for entry in parse_json(metadata["parts"]))
    except UnderstudyError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"not the parts of a chunk: {str(error)[:200]}") from None
    columns: dict[str, Any] = {}
    for path, leaf in spec.stored_columns.items():
        if leaf.ragged:
            columns[path] = unpack_ragged(path, leaf, arrays)
        elif path in arrays:
            columns[path] = column = arrays.pop(path)
            if column.dtype != leaf.numpy_dtype or column.ndim == 0 or column.shape[1:] != leaf.shape:
                raise SpecError(f"{path}: expected rows of {leaf}, got {describe(column)}; send what the spec says")
        else:
            raise SpecError(f"{path}: expected {leaf}, got nothing; send all fields of the spec")
    if arrays:
        raise SpecError(f"{next(iter(arrays))[:80]}: expected no such field; send what the spec says")
    chunk = Chunk(
        writer=writer,
        incarnation=incarnation,
        seq=seq,
        spec=spec,
        columns=columns,
        parts=parts,
        check=check_of(message),
    )
    if chunk.num_rows != len(columns["is_step"]):
        raise WireError(f"expected {chunk.num_rows} rows as in its parts, got {len(columns['is_step'])}; send all")
    _check_values(spec, columns)
    return chunk


def _part(episode: Any, first_index: Any, num_rows: Any, state: Any, info: Any) -> Part:
    numbers = (episode, first_index, num_rows)
    if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
        raise WireError(f"not the numbers of a part: {str(numbers)[:100]}")
    if state not in ("open", "ended", "cut"):
        raise WireError(f"not the state of an episode: {str(state)[:40]}")
    return Part(episode=episode, first_index=first_index, num_rows=num_rows, state=state, info=info_from_json(info))


def _check_values(spec: StepSpec, columns: Mapping[str, Any]) -> None:
    """The checks that our Writer makes for each step, for senders that do not use it."""
    for path, leaf in spec.stored_columns.items():
        column = columns[path]
        if leaf.bounded and not leaf.ragged and len(column):
            low, high = leaf.limits
            if not ((column >= low) & (column <= high)).all():
                raise SpecError(f"{path}: expected values from {leaf.low} to {leaf.high}; clip them before append")
    if len(columns["source"]) and columns["source"].max() >= len(Source):
        raise SpecError(f"source: expected numbers below {len(Source)}, got {columns['source'].max()}; pass a Source")
    if not np.isfinite(columns["reward"]).all():
        raise SpecError("reward: expected finite numbers; check the environment")


# ---- ragged fields


def pack_ragged(path: str, values: Sequence[Any]) -> dict[str, Array]:
    """The two arrays of a ragged field."""
    data = [to_bytes(value) for value in values]
    return {
        _BYTES + path: np.frombuffer(b"".join(data), np.uint8),
        _LENGTHS + path: np.array([len(value) for value in data], np.uint32),
    }


def unpack_ragged(path: str, leaf: ArraySpec, arrays: dict[str, Array]) -> list[Any]:
    """The values of a ragged field; removes its two arrays from `arrays`."""
    data, lengths = arrays.pop(_BYTES + path, None), arrays.pop(_LENGTHS + path, None)
    if data is None or lengths is None or data.dtype != np.uint8 or lengths.dtype != np.uint32 or lengths.ndim != 1:
        raise SpecError(f"{path}: expected {leaf}, got something else; send all fields of the spec")
    ends = np.cumsum(lengths, dtype=np.int64)
    if data.ndim != 1 or (int(ends[-1]) if len(ends) else 0) != data.size:
        raise WireError(f"{path}: expected {int(lengths.sum())} bytes of values, got {data.size}; send them end to end")
    everything = data.tobytes()
    try:
        return [
            from_bytes(everything[stop - size : stop], leaf)
            for stop, size in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]
    except ValueError:  # not UTF-8, or not a whole number of elements
        raise WireError(f"{path}: expected {leaf}, got bytes that are not; check the sender") from None
