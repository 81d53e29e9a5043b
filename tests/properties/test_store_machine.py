"""A store against a plain dict: any order of appending, committing, crashing, deleting, compacting and reading."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from understudy.core import EpisodeInfo, Source, Step
from understudy.core import tree as trees
from understudy.core.examples import random_tree, small_spec, text_spec
from understudy.durable.lock import lock_is_held
from understudy.replay import Budget, Reader, Retention, Store, compact, verify
from understudy.replay.format.paths import segment_files

SPECS = {"small": small_spec(), "text": text_spec()}
SEGMENT_BYTES = 4_000  # a few dozen rows, so that sealing happens all the time


class Model:
    """An episode as it should be: the rows that were acknowledged and those that are not yet."""

    def __init__(self, spec: str, kind: str):
        self.spec = SPECS[spec]
        self.kind = kind
        self.committed: list[dict[str, Any]] = []
        self.pending: list[dict[str, Any]] = []
        self.state = "open"
        self.pending_state = "open"
        self.deleted = False
        self.labels: dict[str, str] = {}

    @property
    def num_steps(self) -> int:
        return sum(bool(row["is_step"]) for row in self.committed)


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="machine-"))
        self.path = self.directory / "store"
        self.rng = np.random.default_rng(0)
        self.episodes: dict[int, Model] = {}  # by seed
        self.open_store()
        self.reader = Reader(self.path)
        self.seen: dict[tuple[int, int], int] = {}  # (episode id, index) to how often the reader was told of it

    def open_store(self) -> None:
        self.store = Store.open(self.path, segment_bytes=SEGMENT_BYTES)
        self.writers = {
            name: self.store.writer(name, spec, commit_steps=5, flush_each_episode=name == "text", background=False)
            for name, spec in SPECS.items()
        }
        self.current = dict.fromkeys(SPECS)
        for model in self.episodes.values():  # a new incarnation cuts what the old one left open
            if model.state == "open" and model.committed:
                model.state = "cut"
            model.pending, model.pending_state = [], model.state

    # ---- writing

    @rule(name=st.sampled_from(list(SPECS)), count=st.integers(1, 9), human=st.booleans(), demo=st.booleans())
    def append(self, name: str, count: int, human: bool, demo: bool) -> None:
        writer = self.writers[name]
        if self.current[name] is None:
            seed = len(self.episodes) + 1
            kind = "demonstration" if demo else "practice"
            writer.begin(EpisodeInfo(seed=seed, kind=kind))
            self.current[name] = seed
            self.episodes[seed] = Model(name, kind)
        model = self.episodes[self.current[name]]
        for _ in range(count):
            step = Step(
                observation=random_tree(model.spec.observation, self.rng),
                action=random_tree(model.spec.action, self.rng),
                reward=float(self.rng.integers(5)),
                source=Source.HUMAN if human else Source.POLICY,
                extras=random_tree(model.spec.extras, self.rng),
            )
            model.pending.append(model.spec.row(step))
            writer.append(step)
            self.acknowledge(name)

    @rule(name=st.sampled_from(list(SPECS)))
    def flush(self, name: str) -> None:
        self.writers[name].flush()
        assert self.writers[name].num_uncommitted == 0
        self.acknowledge(name)

    @rule(name=st.sampled_from(list(SPECS)), truncated=st.booleans(), cut=st.booleans())
    def end(self, name: str, truncated: bool, cut: bool) -> None:
        seed = self.current[name]
        if seed is None:
            return
        model = self.episodes[seed]
        last = random_tree(model.spec.observation, self.rng)
        if cut:
            model.pending_state = "cut"
            self.current[name] = None
            self.writers[name].cut()
        else:
            step = Step(
                observation=random_tree(model.spec.observation, self.rng),
                action=random_tree(model.spec.action, self.rng),
                reward=1.0,
                terminated=not truncated,
                truncated=truncated,
                extras=random_tree(model.spec.extras, self.rng),
            )
            model.pending.append(model.spec.row(step))
            self.writers[name].append(step)
            self.acknowledge(name)
            model.pending.append(model.spec.last_row(last))
            model.pending_state = "ended"
            self.current[name] = None
            self.writers[name].end(last, success=True)
        self.acknowledge(name)

    def acknowledge(self, name: str) -> None:
        """What the writer holds no longer is committed: the model's pending rows become its own."""
        if self.writers[name].num_uncommitted or self.writers[name]._parts:  # rows, or an end without rows
            return
        for model in self.episodes.values():
            if model.spec is SPECS[name] and (model.pending or model.pending_state != model.state):
                if model.state == "open":
                    model.committed += model.pending
                    model.state = model.pending_state
                    if any(row["source"] == Source.HUMAN for row in model.committed) and model.kind == "practice":
                        model.kind = "correction"
                model.pending = []

    # ---- crashing

    @rule(garbage=st.booleans())
    def crash(self, garbage: bool) -> None:
        """The process dies: nothing is flushed or closed, and half-written rows may lie behind the last commit."""
        filling = [
            (s, self.store._segments[s.id]) for s in self.store.state.filling.values() if s.id in self.store._segments
        ]
        for record, segment in filling:
            if garbage:
                for column in segment.layout.columns.values():
                    room = (record.capacity - record.num_rows) * column.row_bytes
                    noise = self.rng.bytes(min(room, 3 * column.row_bytes))
                    with segment._file as fd:
                        os.pwrite(fd, noise, column.at(record.num_rows))
            segment.close()
        self.store.catalog._db.close()
        self.store._mark.close()
        self.store._lock_file.release()
        self.open_store()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        assert not lock_is_held(self.path / "writer.lock")
        self.open_store()

    # ---- changing

    def ids(self) -> dict[int, int]:
        """Episode ids by seed, of those with rows."""
        return {record.info.seed: record.id for record in self.reader.episodes("not purged")}

    @precondition(lambda self: self.episodes)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        ids = self.ids()
        chosen = data.draw(st.lists(st.sampled_from(sorted(ids)), unique=True)) if ids else []
        assert self.store.delete([ids[s] for s in chosen]) == sum(not self.episodes[s].deleted for s in chosen)
        for seed in chosen:
            self.episodes[seed].deleted = True

    @precondition(lambda self: self.episodes)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        ids = self.ids()
        chosen = data.draw(st.lists(st.sampled_from(sorted(ids)), unique=True)) if ids else []
        self.store.restore([ids[s] for s in chosen])
        for seed in chosen:
            self.episodes[seed].deleted = False

    @precondition(lambda self: self.episodes)
    @rule(data=st.data(), value=st.text(max_size=5))
    def label(self, data: st.DataObject, value: str) -> None:
        ids = self.ids()
        if ids:
            seed = data.draw(st.sampled_from(sorted(ids)))
            self.store.label([ids[seed]], {"note": value})
            self.episodes[seed].labels["note"] = value

    @rule(practice=st.integers(0, 40), correction=st.integers(0, 40))
    def retain(self, practice: int, correction: int) -> None:
        ids = self.ids()
        self.store.retain(Retention(practice=Budget(max_steps=practice), correction=Budget(max_steps=correction)))
        for kind, budget in (("practice", practice), ("correction", correction)):
            total = 0
            for seed in sorted((s for s in ids if self.episodes[s].kind == kind), key=lambda s: -ids[s]):
                model = self.episodes[seed]
                if model.deleted:
                    continue
                total += model.num_steps
                if total > budget and model.state != "open":
                    model.deleted = True

    @rule(min_dead=st.sampled_from([0.0, 0.3, 1.0]))
    def compact(self, min_dead: float) -> None:
        compact(self.store, min_dead=min_dead)
        if min_dead == 0.0:  # every deleted episode must be gone, and every leftover file
            assert not list(self.reader.episodes("deleted is not null and not purged and state != 'open'"))
        assert len(segment_files(self.path)) == len(self.store.catalog.segments())

    # ---- reading

    @invariant()
    def reader_is_told_once(self) -> None:
        for span in self.reader.follow().spans:
            for index in range(span["first_index"], span["first_index"] + span["num_rows"]):
                key = (int(span["episode"]), int(index))
                self.seen[key] = self.seen.get(key, 0) + 1

    @rule()
    def check(self) -> None:
        found = {record.info.seed: record for record in self.reader.episodes("1")}
        for seed, model in self.episodes.items():
            if not model.committed:
                assert seed not in found
                continue
            record = found.pop(seed)
            assert record.num_rows == len(model.committed)
            assert all((record.id, index) in self.seen for index in range(record.num_rows))
            if record.purged:
                assert model.deleted
                continue
            assert (record.state, record.deleted is not None) == (model.state, model.deleted)
            assert (record.info.kind, dict(record.info.labels)) == (model.kind, model.labels)
            assert record.num_steps == model.num_steps
            _, columns = self.reader.rows(record.id)
            for path in model.spec.columns:
                for index, row in enumerate(model.committed):
                    value = columns[path][index]
                    wanted = row[path] if isinstance(value, str) else np.asarray(row[path], value.dtype)
                    assert trees.equal_leaf(value, wanted), (seed, path, index)
        assert not found

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.check()
            self.reader.close()
            self.store.close()
            report = verify(self.path)
            assert report.ok, report.problems
            assert not report.notes
            shutil.rmtree(self.directory)


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class TestStore(StoreMachine.TestCase):
    settings = examples(40)


@pytest.mark.nightly
class TestStoreLong(StoreMachine.TestCase):
    settings = examples(2000)
