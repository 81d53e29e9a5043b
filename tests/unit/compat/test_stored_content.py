"""What a store holds is recognized by content, each transition once, whoever wrote it and in whatever chunks."""

from pathlib import Path

import numpy as np
import pytest

from understudy.compat.stored_content import StoredContent
from understudy.core import ArraySpec, Source, Spec, Step, StepSpec
from understudy.replay import Reader, Store

SPEC = StepSpec(
    observation=Spec(
        {"image": ArraySpec(shape=(32, 32, 3), dtype="uint8"), "x": ArraySpec(shape=(2,), dtype="float32")}
    ),
    action=Spec(ArraySpec(shape=(1,), dtype="float32")),
)


def observation(n: int) -> dict[str, np.ndarray]:
    return {"image": np.full((32, 32, 3), n, np.uint8), "x": np.full(2, n, np.float32)}


def step(n: int, **changes: object) -> Step:
    return Step(**{"observation": observation(n), "action": np.array([n], np.float32), "reward": n / 2, **changes})


@pytest.mark.parametrize("commit_steps", [1, 3, 50])
def test_each_stored_transition_is_taken_once(commit_steps: int, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        for name in ("a", "b"):
            writer = store.writer(name, SPEC, commit_steps=commit_steps)
            writer.begin()
            for n in range(5):
                writer.append(step(n, source=Source.HUMAN))
            writer.cut(observation(5))
        store.delete([2])
    with Reader(tmp_path / "store") as reader:
        found = StoredContent(reader, SPEC, reader.catalog.spec_ids()[0])
        assert len(found) == 5
        assert not found.take(step(1), observation(3))
        assert not found.take(step(1, reward=0.0), observation(2))
        assert not found.take(step(1, truncated=True), observation(2))
        assert found.take(step(1), observation(2))
        assert not found.take(step(1), observation(2))
        assert all(found.take(step(n), observation(n + 1)) for n in (4, 0, 2, 3))
        assert len(found) == 0


def test_an_empty_store_has_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store"), Reader(tmp_path / "store") as reader:
        assert not StoredContent(reader, SPEC, None).take(step(0), observation(1))
