"""View: a named choice of steps. ViewIndex: the steps that are in a view, updated commit by commit.

A step is stored once and may be in many views. A view chooses episodes by their attributes and, in them, steps by the
source of the action. The catalog keeps the earlier attributes of edited episodes, so a view can also be made as of a
past commit.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from understudy.core import Source, StoreError
from understudy.core.spec import describe
from understudy.replay.format.arrays import Array
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.conditions import Guard, SqlRow, check_condition, guard_problem, shown
from understudy.replay.format.records import ATTRIBUTE_COLUMNS, attribute_values, info_from_json
from understudy.replay.read.reader import Reader
from understudy.replay.read.step_index import NONE, Column, StepIndex

ALL_SOURCES = frozenset(Source)
_ATTRIBUTE_SCHEMA = f"create table episodes (id, deleted, {', '.join(ATTRIBUTE_COLUMNS)})"
_BIT = np.array([1 << number if number < len(Source) else 0 for number in range(256)], np.uint8)  # by source


@dataclass(frozen=True, kw_only=True)
class Clause:
    """Steps of one of `sources` in the episodes that fit an SQL condition on their attributes and `state`."""

    where: str = "1"
    sources: frozenset[Source] = ALL_SOURCES

    @property
    def mask(self) -> int:
        return sum(1 << source for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class View:
    """The steps that fit at least one clause; never of episodes that are deleted."""

    name: str
    clauses: tuple[Clause, ...]

    def __post_init__(self) -> None:
        for clause in self.clauses:
            try:
                check_condition(clause.where, _ATTRIBUTE_SCHEMA, of_view=True)
            except StoreError as error:
                raise StoreError(f"view {self.name!r}: {error}") from None

    @property
    def mask_sql(self) -> str:
        """An SQL expression: for an episode, the sources whose steps are in the view, as bits."""
        return " | ".join(f"(case when ({c.where}\n) then {c.mask} else 0 end)" for c in self.clauses) or "0"

    @property
    def condition(self) -> str:
        """The conditions of all clauses, for an error."""
        return " or ".join(clause.where for clause in self.clauses)


def _attribute_table() -> closing[sqlite3.Connection]:
    """An empty table of episodes in memory, with the columns that a view may ask for."""
    db = sqlite3.connect(":memory:")
    db.execute(_ATTRIBUTE_SCHEMA)
    return closing(db)


# Held-out episodes are in none of these, so that nobody trains on what is evaluated on.
DEMO = View(
    name="demo",
    clauses=(
        Clause(where="split = 'train' and kind = 'demonstration' and coalesce(success, 1)"),
        Clause(where="split = 'train' and kind != 'demonstration'", sources=frozenset({Source.HUMAN})),
    ),
)
ONLINE = View(name="online", clauses=(Clause(where="split = 'train' and kind != 'demonstration'"),))
EVERYTHING = View(name="everything", clauses=(Clause(where="split = 'train'"),))


def check_view(value: Any) -> None:
    """Refuse what is no View, such as the name of one."""
    if not isinstance(value, View):
        named = value.upper() if isinstance(value, str) and value.upper() in ("DEMO", "ONLINE", "EVERYTHING") else None
        advice = f"us.{named}" if named else "us.DEMO, us.ONLINE, us.EVERYTHING or a us.View of your own"
        raise StoreError(f"view: expected a View such as us.DEMO, got {describe(value)}; pass {advice}")


class ViewCount(NamedTuple):
    """How many steps a view has, and of how many episodes."""

    steps: int
    episodes: int


def count_views(reader: Reader, views: Sequence[View], until: int | None = None) -> list[ViewCount]:
    """Count the steps and episodes of each view, as of commit `until` or the newest. Reads the whole index."""
    for view in views:
        check_view(view)
    steps = StepIndex(reader)
    steps.follow(until)
    found = []
    for view in views:
        index = ViewIndex(steps, view)
        index.follow()
        found.append(ViewCount(len(index), len(index.episodes())))
    return found


class ViewIndex:
    """The steps of a view, by position, in the order in which their outcomes were committed.

    A step is in only if at least `lookahead` rows follow it: 1 for transitions, L for sequences of L steps.
    """

    def __init__(self, step_index: StepIndex, view: View, *, spec: int | None = None, lookahead: int = 1):
        self.step_index = step_index
        self.view = view
        self.lookahead = lookahead
        self._spec = spec
        self.commit = 0
        self._mask = Column(np.uint8)  # by episode: the sources that are in the view, as bits
        self._count = Column(np.int32)  # by run: its steps that are in the view
        self._sum = Column(np.int64)  # by run: those of it and of all runs before it
        self._clean = 0  # the first runs, whose sums are right
        self._episode_count = Column(np.int64)  # by episode: its steps that are in the view

    def __len__(self) -> int:
        self._settle()
        return int(self._sum.values[-1]) if len(self._sum) else 0

    @property
    def num_bytes(self) -> int:
        return sum(column.num_bytes for column in (self._mask, self._count, self._sum, self._episode_count))

    def follow(self) -> None:
        """Update to the commit of `step_index`; the cost grows with what is new."""
        since, self.commit = self.commit, self.step_index.commit
        self._mask.resize(len(self.step_index.episode_num_rows))
        self._episode_count.resize(len(self.step_index.episode_num_rows))
        first_run = len(self._count)
        self._count.resize(len(self.step_index.run_span))
        self._sum.resize(len(self.step_index.run_span))
        changed = self._update_masks(since)
        new_spans = (
            np.arange(self.step_index.run_span.values[first_run], len(self.step_index.span_episode))
            if first_run < len(self._count)
            else np.zeros(0, np.int64)
        )
        self._recount(np.concatenate([new_spans, self._before(new_spans), self._spans_of(changed)]))

    def find(self, positions: Array) -> tuple[Array, Array]:
        """Span and offset of the rows after the steps at these positions, in [0, len)."""
        self._settle()
        order = np.argsort(positions)  # sorted look-ups are kind to the CPU's cache
        run = np.empty(len(positions), np.int64)
        run[order] = np.searchsorted(self._sum.values, positions[order], side="right")
        into = positions - (self._sum.values[run] - self._count.values[run])
        return self.step_index.run_span.values[run].astype(np.int64), self.step_index.run_offset.values[run] + into

    def position_of_row(self, row: int) -> int:
        """How many steps of the view come before a row, given by its number among all rows."""
        self._settle()
        run = int(np.searchsorted(self.step_index.run_base.values, row, side="right")) - 1
        if run < 0:
            return 0
        before = int(self._sum.values[run] - self._count.values[run])
        return before + min(row - int(self.step_index.run_base.values[run]), int(self._count.values[run]))

    def episodes(self) -> Array:
        """The episodes with steps in the view, the oldest first."""
        return np.flatnonzero(self._episode_count.values)

    def episode_counts(self, episodes: Array) -> Array:
        """How many steps of each episode are in the view."""
        return self._episode_count.values[episodes]

    def find_in_episodes(self, episodes: Array, numbers: Array) -> tuple[Array, Array]:
        """Span and offset of the row after step `number` of an episode, counting its steps in the view."""
        r = self.step_index
        run = r.span_first_run.values[r.episode_first_span.values[episodes]].astype(np.int64)
        left = numbers.copy()
        while (late := np.flatnonzero(left >= self._count.values[run])).size:
            left[late] -= self._count.values[run[late]]
            run[late] = self._run_after(run[late])
        return r.run_span.values[run].astype(np.int64), r.run_offset.values[run] + left

    def _run_after(self, run: Array) -> Array:
        """The next run of the same episode."""
        r = self.step_index
        span = r.run_span.values[run]
        following = np.minimum(run + 1, len(self._count) - 1)
        same = (r.run_span.values[following] == span) & (following > run)
        return np.where(same, following, r.span_first_run.values[r.span_next.values[span]])

    def contains(self, episodes: Array, sources: Array) -> Array:
        """Bool [B, ...]: whether steps of these sources [B, ...] in these episodes [B] are in the view."""
        masks = self._mask.values[episodes].reshape(-1, *[1] * (sources.ndim - 1))
        return np.asarray((masks & _BIT[sources]) != 0)

    def row_mask(self) -> Array:
        """For every row of the store, in the order of the commits, whether the step before it is in the view."""
        lengths = self.step_index.run_length.values
        return _ranges(lengths) < np.repeat(self._count.values, lengths)

    # ---- updating

    def _update_masks(self, since: int) -> Array:
        """Ask the catalog which sources of each episode are in the view; returns the episodes that changed."""
        answers = source_masks(self.step_index.reader.catalog, self.view, since, self.commit, self._spec)
        answers = answers[answers[:, 0] < len(self._mask)]
        ids, masks = answers[:, 0], answers[:, 1]
        changed: Array = ids[self._mask.values[ids] != masks]
        self._mask.values[ids] = masks
        return changed

    def _before(self, new_spans: Array) -> Array:
        """Earlier spans with steps that had too few rows after them before."""
        found = []
        spans = self.step_index.span_previous.values[new_spans]
        spans = np.unique(spans[(spans != NONE) & (spans < (new_spans[0] if len(new_spans) else 0))])
        missing = np.full(len(spans), self.lookahead - 1)  # rows of the episode's former end that were not in the view
        spans, missing = spans[missing > 0], missing[missing > 0]
        while len(spans):
            found.append(spans.astype(np.int64))
            missing = missing - self.step_index.span_num_rows.values[spans]
            spans = self.step_index.span_previous.values[spans]
            keep = (missing > 0) & (spans != NONE)
            spans, missing = spans[keep], missing[keep]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _spans_of(self, episodes: Array) -> Array:
        found = []
        spans = self.step_index.episode_last_span.values[episodes]
        while (spans := spans[spans != NONE]).size:
            found.append(spans.astype(np.int64))
            spans = self.step_index.span_previous.values[spans]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _recount(self, spans: Array) -> None:
        if not len(spans):
            return
        r = self.step_index
        spans = np.unique(spans)
        first = r.span_first_run.values[spans].astype(np.int64)
        following = spans + 1
        inside = following < len(r.span_first_run)
        stop = np.full(len(spans), len(self._count), np.int64)
        stop[inside] = r.span_first_run.values[following[inside]]
        runs = np.repeat(first, stop - first) + _ranges(stop - first)
        span = r.run_span.values[runs]
        episode = r.span_episode.values[span]
        start = r.span_first_index.values[span] + r.run_offset.values[runs]
        available = r.episode_num_rows.values[episode] - self.lookahead + 1 - start
        wanted = (self._mask.values[episode] & _BIT[r.run_source.values[runs]]) != 0
        counts = np.clip(available, 0, r.run_length.values[runs]) * wanted
        np.add.at(self._episode_count.values, episode, counts - self._count.values[runs])
        self._count.values[runs] = counts
        self._clean = min(self._clean, int(runs[0]))

    def _settle(self) -> None:
        """Compute the sums again from the first run that changed."""
        if self._clean < len(self._sum):
            base = self._sum.values[self._clean - 1] if self._clean else 0
            self._sum.values[self._clean :] = base + np.cumsum(self._count.values[self._clean :], dtype=np.int64)
            self._clean = len(self._sum)


def _ranges(lengths: Array) -> Array:
    """0..n-1 for each n, one after the other."""
    total = int(lengths.sum())
    starts: Array = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(total) - starts


# ---- the catalog


def source_masks(catalog: Catalog, view: View, since: int, until: int, spec: int | None) -> Array:
    """Pairs of episode and source mask as of commit `until`, for the episodes that changed after `since`."""
    of_spec = "1" if spec is None else f"spec = {int(spec)}"
    mask = f"case when deleted is null and {of_spec} then {view.mask_sql} else 0 end"
    sql = f"select id, {mask} from episodes where changed > ? and changed <= ?"
    rows = catalog.view_rows(sql, (since, until), view.condition)
    later = _as_of(catalog, until, of_spec)
    if later:
        with _attribute_table() as db:
            marks = ", ".join("?" * (len(ATTRIBUTE_COLUMNS) + 2))
            db.executemany(f"insert into episodes values ({marks})", later)
            sql = f"select id, case when deleted is null then {view.mask_sql} else 0 end from episodes"
            try:
                with Guard(db).held(of_view=True, num_episodes=len(later)):
                    rows += db.execute(sql).fetchall()
            except sqlite3.Error as error:
                raise StoreError(
                    f"condition {shown(view.condition)}: {guard_problem(error) or error}; change the view"
                ) from None
    return np.array(rows, np.int64).reshape(-1, 2)


def _as_of(catalog: Catalog, commit: int, condition: str) -> list[SqlRow]:
    """The attributes, as they were then, of the episodes that have changed since."""
    now = catalog.select(
        f"select id, deleted, {', '.join(ATTRIBUTE_COLUMNS)} from episodes"
        f" where changed > ? and begun <= ? and {condition}",
        (commit, commit),
    )
    if not now:  # the usual case
        return []
    gone = catalog.select(
        "select id from episodes where changed > ? and begun <= ? and purged and deleted > ?", (commit, commit, commit)
    )
    if gone:
        raise StoreError(
            f"episode {gone[0][0]} was in the store at commit {commit} and was removed by compaction since; "
            f"batches of that commit cannot be sampled again"
        )
    edits = catalog.select(
        "select episode, state, deleted, info, min(id) from edits where commit_id > ? group by episode", (commit,)
    )
    before = {
        episode: (deleted, *attribute_values(state, info_from_json(json.loads(info))))
        for episode, state, deleted, info, _ in edits
    }
    return [(row[0], *before.get(row[0], row[1:])) for row in now]
