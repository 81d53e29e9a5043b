"""What was replayed: shares, lag and reuse, against a count by hand of the batches that were drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from understudy.core import NO_VERSION
from understudy.core.examples import random_tree, small_spec
from understudy.core.step import Step
from understudy.replay import Store, Transitions
from understudy.training.offpolicy.demo_online_batches import Batches
from understudy.training.offpolicy.replay_metrics import Replayed

SPEC = small_spec()
DOC = Path(__file__).parents[4] / "docs" / "training.md"


def live(store: Store, kind: str, versions: list[int]) -> None:
    rng = np.random.default_rng(0)
    writer = store.writer(kind, SPEC)
    writer.begin(kind=kind, split="train")
    for number, version in enumerate(versions):
        last = number == len(versions) - 1
        writer.append(
            Step(
                observation=random_tree(SPEC.observation, rng),
                action=random_tree(SPEC.action, rng),
                reward=0.0,
                terminated=last,
                policy_version=version,
            )
        )
    writer.end(random_tree(SPEC.observation, rng), success=True)


def open_batches(path: Path) -> Batches:
    return Batches(store=path, demos=None, spec=SPEC, size=8, weights=(1, 3), seed=1, shape=Transitions())


def test_it_counts_what_was_drawn(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, "practice", [3, 4, 5, 6, 7])
        batches = open_batches(tmp_path / "s")
        batches.follow()
        alone = Replayed(batches, version=9)
        for batch in batches.draw(4):
            alone.add(batch)
        said = alone.numbers()
        assert (said["demo_share_wanted"], said["demo_share"]) == (0.25, 0.0)  # there are no demonstrations yet
        assert said["reuse"] == 4 * 8 / 5

        live(store, "demonstration", [NO_VERSION] * 5)
        batches.follow()
        both, versions = Replayed(batches, version=9), []
        for batch in batches.draw(6):
            both.add(batch)
            versions += [version for version in batch.policy_version.tolist() if version != NO_VERSION]
        batches.close()
    said = both.numbers()
    assert said["demo_share"] == 0.25  # of this time, and not of all
    assert len(versions) == 6 * 6
    assert said["lag_mean"] == pytest.approx(9 - np.mean(versions))
    assert said["lag_max"] == 9 - min(versions)
    assert said["reuse"] == 10 * 8 / 10
    text = DOC.read_text()
    assert all(f"`{name}`" in text for name in said)


def test_without_a_policy_there_is_no_lag(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, "demonstration", [NO_VERSION] * 5)
        batches = open_batches(tmp_path / "s")
        batches.follow()
        replayed = Replayed(batches, version=0)
        for batch in batches.draw(2):
            replayed.add(batch)
        batches.close()
    assert replayed.numbers().keys() == {"demo_share_wanted", "demo_share", "reuse"}
