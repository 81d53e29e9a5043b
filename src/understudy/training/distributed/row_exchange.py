"""Row exchange: each rank has the rows of its own episodes and needs those of its share of a batch.

All ranks gather which rows each has and needs, compute the same plan, and then send each row once to each rank that
lacks it, point to point: raw bytes of the columns, whose layout both sides know from the plan. They exchange with one
partner at a time, so no rank needs more memory than its rows and those of one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import Ranks, pieces

Array = np.ndarray[Any, Any]

_KINDS = "biufU"  # bool, int, uint, float, text of a fixed width


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangedRows:
    """The requested rows, in that order, and how much was sent."""

    columns: dict[str, Array]  # [M, ...]
    num_rows_moved: int  # received by this rank
    num_bytes_sent: int
    num_bytes_received: int


def exchange_rows(ranks: Ranks, ids: Array, columns: Mapping[str, Array], need: Array) -> ExchangedRows:
    """Rows `need` [M] of all ranks' rows, which are numbered by `ids` [N]; a rank without rows may pass no columns.

    A row that several ranks have comes from the lowest of them; a row that this rank has is not sent. Rows may be
    requested more than once.
    """
    have = _checked_ids("ids", ids)
    want = _checked_ids("need", need)
    columns = {name: _checked_column(name, column, len(have)) for name, column in columns.items()}
    layout = {name: [column.dtype.str, list(column.shape[1:])] for name, column in columns.items()}
    if ranks.size == 1 and np.array_equal(have, want):
        return ExchangedRows(columns=columns, num_rows_moved=0, num_bytes_sent=0, num_bytes_received=0)
    gathered = ranks.gather_json([have.tolist(), want.tolist(), layout], name="exchange_rows")
    plan = _Plan([one[0] for one in gathered], [one[1] for one in gathered])
    specs = _agreed([one[2] if one[0] else None for one in gathered]) or _agreed([one[2] or None for one in gathered])
    unique, position = np.unique(want, return_inverse=True)  # each row once, and where each requested row is
    result = {name: np.zeros((len(unique), *shape), dtype) for name, (dtype, shape) in specs.items()}
    mine = _positions(have, plan.rows(ranks.rank, ranks.rank))
    _fill(result, unique, plan.rows(ranks.rank, ranks.rank), {name: column[mine] for name, column in columns.items()})
    sent = received = moved = 0
    for distance in range(1, ranks.size):
        to, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
        out_ids, in_ids = plan.rows(ranks.rank, to), plan.rows(source, ranks.rank)
        outgoing = {
            name: columns[name][_positions(have, out_ids)].astype(dtype)
            for name, (dtype, _) in specs.items()
            if len(out_ids)
        }
        incoming = {name: np.empty((len(in_ids), *shape), dtype) for name, (dtype, shape) in specs.items()}
        with ranks.collective("exchange_rows"):
            _send_and_receive(ranks, list(outgoing.values()), to, list(incoming.values()), source)
        _fill(result, unique, in_ids, incoming)
        sent += sum(array.nbytes for array in outgoing.values())
        received += sum(array.nbytes for array in incoming.values())
        moved += len(in_ids)
    return ExchangedRows(
        columns={name: array[position] for name, array in result.items()},
        num_rows_moved=moved,
        num_bytes_sent=sent,
        num_bytes_received=received,
    )


class _Plan:
    """Which rank sends which rows to which; the same on all ranks, or the same error on all."""

    def __init__(self, have: Sequence[Sequence[int]], need: Sequence[Sequence[int]]):
        self._have = [set(rows) for rows in have]
        self._owner: dict[int, int] = {}
        for rank, rows in enumerate(have):
            if len(self._have[rank]) != len(rows):
                raise RanksError(f"ids: rank {rank} has the same row twice; give every row its own number")
            for row in rows:
                self._owner.setdefault(row, rank)
        self._need = [sorted(set(rows)) for rows in need]
        for rank, rows in enumerate(self._need):
            absent = [row for row in rows if row not in self._owner]
            if absent:
                shown = ", ".join(map(str, absent[:5]))
                raise RanksError(f"need: rank {rank} needs {len(absent)} rows that no rank has: {shown}")

    def rows(self, source: int, to: int) -> Array:
        """The rows that `source` sends to `to`, ascending; with itself, those that it has already."""
        if source == to:
            return np.array([row for row in self._need[to] if row in self._have[to]], np.int64)
        return np.array(
            [row for row in self._need[to] if self._owner[row] == source and row not in self._have[to]], np.int64
        )


def _agreed(layouts: Sequence[Mapping[str, Any] | None]) -> dict[str, tuple[np.dtype[Any], list[int]]]:
    """The common layout of all ranks that have rows; text is as wide as the widest."""
    agreed: dict[str, tuple[np.dtype[Any], list[int]]] = {}
    first: int | None = None
    for rank, layout in enumerate(layouts):
        if layout is None:
            continue
        if first is not None and layout.keys() != agreed.keys():
            strange = ", ".join(sorted(layout.keys() ^ agreed.keys()))
            raise RanksError(f"columns: rank {first} and rank {rank} differ in {strange}; give the same columns")
        for name, (dtype_name, shape) in layout.items():
            dtype = np.dtype(dtype_name)
            if first is not None:
                known, known_shape = agreed[name]
                if shape != known_shape or (dtype != known and not dtype.kind == known.kind == "U"):
                    raise RanksError(
                        f"{name}: rank {first} has {known.name} {known_shape}, rank {rank} {dtype.name} {shape}; "
                        f"give rows of one kind"
                    )
                dtype = max(dtype, known, key=lambda one: one.itemsize)
            agreed[name] = (dtype, shape)
        first = rank if first is None else first
    return agreed


def _send_and_receive(ranks: Ranks, outgoing: Sequence[Array], to: int, incoming: Sequence[Array], source: int) -> None:
    parts = [piece for array in outgoing for piece in pieces(np.ascontiguousarray(array))]
    works = [dist.isend(part, to, group=ranks.host_group) for part in parts]
    works += [dist.irecv(part, source, group=ranks.host_group) for array in incoming for part in pieces(array)]
    for work in works:
        if work is not None:
            work.wait()


def _fill(result: Mapping[str, Array], unique: Array, ids: Array, rows: Mapping[str, Array]) -> None:
    if len(ids):
        where = np.searchsorted(unique, ids)
        for name, array in result.items():
            array[where] = rows[name]


def _positions(have: Array, ids: Array) -> Array:
    order = np.argsort(have)
    return order[np.searchsorted(have, ids, sorter=order)] if len(ids) else np.zeros(0, np.int64)


def _checked_ids(name: str, ids: Array) -> Array:
    ids = np.asarray(ids)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RanksError(f"{name}: expected int64 [N], got {ids.dtype} {list(ids.shape)}; give one number for each row")
    return ids.astype(np.int64)


def _checked_column(name: str, column: Array, num_rows: int) -> Array:
    column = np.asarray(column)
    if column.dtype.kind not in _KINDS or column.dtype.byteorder == ">":
        raise RanksError(f"{name}: expected numbers or text of a fixed width, got {column.dtype}; convert it first")
    if column.ndim == 0 or len(column) != num_rows:
        raise RanksError(f"{name}: expected {num_rows} rows, one for each id, got {list(column.shape)}")
    return column
