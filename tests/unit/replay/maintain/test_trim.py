"""A part of an episode becomes an episode of its own, bit for bit; the whole one can come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from understudy.core import Source, StoreError
from understudy.core import tree as trees
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, Store, verify
from understudy.replay.maintain.trim import trim

SPEC = small_spec()
WHOLE = random_episode(SPEC, 8, seed=3)


def write(store: Store, *, end: bool = True) -> None:
    writer = store.writer("w", SPEC)
    writer.begin(task="pick", kind="practice", success=True, labels={"origin": "x:1", "intervention_count": "9"})
    for index, step in enumerate(WHOLE.steps()):
        source = Source.HUMAN if index in (1, 2, 4, 6) else Source.POLICY
        writer.append(replace(step, source=source))
    if end:
        writer.end(WHOLE.last_observation)
    else:
        writer.flush()


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (2, 5), (3, 8), (7, 8)])
def test_the_part_is_kept_bit_for_bit(first: int, stop: int, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write(store)
        assert trim(store, 1, first, stop) == 2
    with Reader(tmp_path / "store") as reader:
        old, new = reader.episodes("1")
        part = reader.read(2)
        human = reader.read(1).source[first:stop] == Source.HUMAN
    assert old.deleted is not None
    assert (new.state, new.num_steps, new.info.task, new.info.success) == ("ended", stop - first, "pick", True)
    assert new.info.kind == ("correction" if human.any() else "practice")
    assert new.info.labels["trimmed_from"] == f"episode 1, steps {first} to {stop - 1}"
    assert new.info.labels["origin"] == "x:1"  # a second import still finds it
    assert new.info.labels["intervention_steps"] == str(human.sum())
    takeovers = sum(bool(now) and not before for before, now in zip([False, *human], human, strict=False))
    assert new.info.labels["intervention_count"] == str(takeovers)
    columns = WHOLE.columns()
    for path, column in part.columns().items():
        if path in ("terminated", "truncated", "source"):
            continue
        more = path.startswith("observation")
        assert trees.equal_leaf(column, columns[path][first : stop + more]), path
    last = WHOLE.step(stop - 1)
    ends = (last.terminated, last.truncated) if stop == 8 else (False, True)
    assert (bool(part.terminated[-1]), bool(part.truncated[-1])) == ends
    assert not np.any(part.terminated[:-1] | part.truncated[:-1])
    assert verify(tmp_path / "store").ok


@pytest.mark.parametrize(("first", "stop"), [(0, 8), (-1, 3), (3, 3), (5, 2), (2, 9)])
def test_what_is_no_part_is_refused(first: int, stop: int, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write(store)
        with pytest.raises(StoreError, match="expected a part of episode 1, which has steps 0 to 7"):
            trim(store, 1, first, stop)
        with pytest.raises(StoreError):
            trim(store, 7, 0, 1)
    with Reader(tmp_path / "store") as reader:
        assert [record.deleted for record in reader.episodes("1")] == [None]


def test_an_episode_that_is_being_recorded_is_left_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write(store, end=False)
        with pytest.raises(StoreError, match="is still being recorded"):
            trim(store, 1, 0, 2)
