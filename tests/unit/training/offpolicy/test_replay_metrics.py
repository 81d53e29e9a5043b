"""ReplayMetrics: shares, lag and reuse, against a count by hand of the batches that were drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from understudy.core import NO_VERSION, TransitionBatch
from understudy.core.examples import random_tree, small_spec
from understudy.core.step import Step
from understudy.replay import Mixture, Store, Transitions
from understudy.training.offpolicy.demo_online_mixture import open_demo_online_mixture
from understudy.training.offpolicy.replay_metrics import ReplayMetrics

SPEC = small_spec()
DOC = Path(__file__).parents[4] / "docs" / "training.md"


def record(store: Store, kind: str, versions: list[int]) -> None:
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


def open_mixture(path: Path) -> Mixture[TransitionBatch]:
    return open_demo_online_mixture(
        store=path, demos=None, spec=SPEC, batch_size=8, demo_weight=1, online_weight=3, seed=1, shape=Transitions()
    )


def test_it_counts_what_was_drawn(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, "practice", [3, 4, 5, 6, 7])
        mixture = open_mixture(tmp_path / "s")
        mixture.follow()
        alone = ReplayMetrics(mixture, policy_version=9)
        for batch in mixture.sample_many(4):
            alone.add(batch)
        found = alone.values()
        assert (found["demo_share_wanted"], found["demo_share"]) == (0.25, 0.0)  # there are no demonstrations yet
        assert found["reuse"] == 4 * 8 / 5

        record(store, "demonstration", [NO_VERSION] * 5)
        mixture.follow()
        both, versions = ReplayMetrics(mixture, policy_version=9), []
        for batch in mixture.sample_many(6):
            both.add(batch)
            versions += [version for version in batch.policy_version.tolist() if version != NO_VERSION]
        mixture.close()
    found = both.values()
    assert found["demo_share"] == 0.25  # of this time, and not of all
    assert len(versions) == 6 * 6
    assert found["lag_mean"] == pytest.approx(9 - np.mean(versions))
    assert found["lag_max"] == 9 - min(versions)
    assert found["reuse"] == 10 * 8 / 10
    text = DOC.read_text()
    assert all(f"`{name}`" in text for name in found)


def test_without_a_policy_there_is_no_lag(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, "demonstration", [NO_VERSION] * 5)
        mixture = open_mixture(tmp_path / "s")
        mixture.follow()
        metrics = ReplayMetrics(mixture, policy_version=0)
        for batch in mixture.sample_many(2):
            metrics.add(batch)
        mixture.close()
    assert metrics.values().keys() == {"demo_share_wanted", "demo_share", "reuse"}
