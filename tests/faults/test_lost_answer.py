"""A commit that fails for its writer may be in the store all the same: the answer was lost on the way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from understudy.core import Episode, StepSpec, StoreFailedError
from understudy.core.examples import random_steps, small_spec, text_spec
from understudy.replay import Reader, Store, Writer
from understudy.replay.format.chunk import Chunk


class LosesOneAnswer:
    """OperatorInput chunks on to a store; the answer to one of them does not come back."""

    keeps_columns = False

    def __init__(self, store: Store, lost: int):
        self._store = store
        self._left = lost

    def commit(self, chunk: Chunk) -> int:
        commit = self._store.commit(chunk)
        self._left -= 1
        if self._left == -1:
            raise StoreFailedError("the connection broke; try again")
        return commit


@pytest.mark.parametrize("spec", [small_spec(), text_spec()], ids=["fixed", "ragged"])
@pytest.mark.parametrize("each_episode", [True, False], ids=["flush at end", "flush later"])
@pytest.mark.parametrize("lost", range(5))
def test_a_writer_that_goes_on_loses_and_doubles_nothing(
    lost: int, each_episode: bool, spec: StepSpec, tmp_path: Path
) -> None:
    episodes = [random_steps(spec, num_steps, seed) for seed, num_steps in enumerate((7, 1, 5))]
    with Store.open(tmp_path / "store") as store:
        store.begin_writer("actor", "1")
        link = LosesOneAnswer(store, lost)
        writer = Writer(link, "actor", "1", spec, commit_steps=4, flush_each_episode=each_episode)
        for seed, (steps, last_observation) in enumerate(episodes):
            writer.begin(seed=seed)
            for index, step in enumerate(steps):
                with suppress(StoreFailedError):
                    writer.append(step)
                if index % 3 == 1:
                    with suppress(StoreFailedError):
                        writer.flush()
            with suppress(StoreFailedError):
                writer.end(last_observation)
        writer.flush()
    with Reader(tmp_path / "store") as reader:
        found = list(reader.episodes())
        assert [record.info.seed for record in found] == [0, 1, 2]
        for record, (steps, last_observation) in zip(found, episodes, strict=True):
            assert reader.read(record.id).equals(Episode.from_steps(spec, steps, last_observation, record.info))
