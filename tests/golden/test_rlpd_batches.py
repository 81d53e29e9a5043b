"""RLPD's batches from a local store, to the bit: rlpd_batches.json was drawn before RLPD trained through `Mixture`.

Left out, because it changed on purpose: a batch size that the shares do not divide, drawn in groups. There every batch
of a group got the rounded share of the group's first one, which was not exact over the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from understudy.core import Source, TransitionBatch
from understudy.core import tree as trees
from understudy.core.examples import random_tree, robot_spec
from understudy.core.step import Step
from understudy.replay import Mixture, Store, Transitions
from understudy.training.offpolicy.demo_online_mixture import open_demo_online_mixture

SPEC = robot_spec(8)
GOLDEN: dict[str, list[str]] = json.loads((Path(__file__).parent / "rlpd_batches.json").read_text())


def record(store: Store, kind: str, *, seed: int, episodes: int, human_steps: int = 0) -> None:
    rng = np.random.default_rng(seed)
    writer = store.writer(f"{kind}-{seed}", SPEC)
    for _ in range(episodes):
        writer.begin(kind=kind, split="train", success=True)
        for step in range(6):
            writer.append(
                Step(
                    observation=random_tree(SPEC.observation, rng),
                    action=random_tree(SPEC.action, rng),
                    reward=float(rng.integers(5)),
                    terminated=step == 5,
                    truncated=False,
                    source=Source.HUMAN if step < human_steps else Source.POLICY,
                )
            )
        writer.end(random_tree(SPEC.observation, rng), success=True)


def open_mixture(store: Path, **options: Any) -> Mixture[TransitionBatch]:
    given: dict[str, Any] = {"demos": None, "batch_size": 10, "demo_weight": 1, "online_weight": 1, **options}
    shape = Transitions(num_steps=3, discount=0.95)
    return open_demo_online_mixture(store=store, spec=SPEC, seed=3, shape=shape, **given)


def digest(tree: Any) -> str:
    hasher = xxhash.xxh3_64()
    for path, leaf in sorted(trees.leaves(tree)):
        hasher.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
        hasher.update(np.ascontiguousarray(leaf).tobytes())
    return hasher.hexdigest()


def digests(batches: Iterable[TransitionBatch]) -> list[str]:
    return [digest({item.name: getattr(batch, item.name) for item in fields(batch)}) for batch in batches]


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A store with demonstrations, practice and interventions."""
    with Store.open(tmp_path / "both") as store:
        record(store, "demonstration", seed=1, episodes=3)
        record(store, "practice", seed=2, episodes=5, human_steps=2)
    return tmp_path / "both"


def test_demonstrations_and_practice(both: Path) -> None:
    with open_mixture(both) as mixture:
        mixture.follow()
        samplers = mixture.samplers
        assert [digest(sampler.peek(32).observation) for sampler in samplers.values()] == GOLDEN["peek"]
        assert digests([samplers["demo"].sample(size=5)]) == GOLDEN["demonstrations only"]
        drawn = digests(mixture.sample_many(20)) + digests([mixture.sample()])
        assert drawn == GOLDEN["demonstrations and practice"]


def test_a_share_that_is_no_whole_number_one_batch_at_a_time(both: Path) -> None:
    with open_mixture(both, batch_size=7) as mixture:
        mixture.follow()
        drawn = digests(mixture.sample() for _ in range(6))
        assert drawn == GOLDEN["a share that is no whole number, one batch at a time"]


def test_without_demonstrations_and_with_those_of_another_store(tmp_path: Path) -> None:
    with Store.open(tmp_path / "practice") as store, Store.open(tmp_path / "demos") as demos:
        record(store, "practice", seed=4, episodes=4)
        record(demos, "demonstration", seed=5, episodes=2)
    with open_mixture(tmp_path / "practice") as mixture:
        mixture.follow()
        assert digests(mixture.sample_many(20)) == GOLDEN["no demonstrations"]
    with open_mixture(tmp_path / "practice", demos=tmp_path / "demos", demo_weight=3, online_weight=2) as mixture:
        mixture.follow()
        assert digests(mixture.sample_many(6)) == GOLDEN["demonstrations in a store of their own, 3 to 2"]


def test_a_store_that_grows(tmp_path: Path) -> None:
    drawn = []
    with Store.open(tmp_path / "s") as store:
        with open_mixture(tmp_path / "s") as mixture:
            mixture.follow()  # nothing is there
            record(store, "practice", seed=6, episodes=2)
            mixture.follow()
            drawn += digests(mixture.sample_many(3))
            record(store, "demonstration", seed=7, episodes=2)
            mixture.follow()
            drawn += digests(mixture.sample_many(5))
            record(store, "practice", seed=8, episodes=3, human_steps=1)
            drawn += digests(mixture.sample_many(2))  # as of the last `follow`
            mixture.follow()
            drawn += digests(mixture.sample_many(17))
            state = json.loads(json.dumps(mixture.state()))
        record(store, "practice", seed=9, episodes=1)
        with open_mixture(tmp_path / "s") as mixture:
            mixture.restore(state)
            drawn += digests(mixture.sample_many(4))
            mixture.follow()
            drawn += digests(mixture.sample_many(4))
    assert drawn == GOLDEN["a store that grows"]
