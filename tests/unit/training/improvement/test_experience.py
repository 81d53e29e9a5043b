"""What each method learns from: which steps, where a block ends, and what is good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.algorithms.sft import Blocks
from understudy.core import ArraySpec, EpisodeInfo, Source, Spec, Step, StepSpec, StoreError
from understudy.replay import Estimates, Reader, Store
from understudy.training.improvement.config import METHODS
from understudy.training.improvement.experience import Experience, joined, open_experience
from understudy.training.onpolicy.sft import Demonstrations

SPEC = StepSpec(
    observation=Spec(ArraySpec(shape=(1,), dtype="float32")),
    action=Spec(ArraySpec(shape=(1,), dtype="float32", low=-99.0, high=99.0)),
)
P, H, S = Source.POLICY, Source.HUMAN, Source.SCRIPT


def write(path: Path, first: int, *episodes: tuple[list[Source], dict[str, Any]]) -> Path:
    """Episodes in which the action of step i is i + 1; observations are `first` + 100 for each episode + i."""
    with Store.open(path) as store:
        writer = store.writer("me", SPEC)
        for number, (sources, info) in enumerate(episodes, start=1):
            writer.begin(EpisodeInfo(instruction="do it", **info))
            for index, source in enumerate(sources):
                step = Step(
                    observation=np.array([first + number * 100 + index], np.float32),
                    action=np.array([index + 1], np.float32),
                    reward=0.0,
                    source=source,
                    truncated=index == len(sources) - 1,
                )
                writer.append(step)
            writer.end(np.array([-1], np.float32), success=info.get("success"))
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("stores")
    demos = write(
        root / "demos",
        1000,
        ([S] * 3, {"kind": "demonstration", "success": True}),
        ([S] * 3, {"kind": "demonstration", "success": False}),
        ([P, H], {"kind": "practice", "success": True}),  # not asked for
    )
    mixed = write(
        root / "mixed",
        0,
        ([P, P, H, H, P, H], {"kind": "practice", "success": True}),
        ([P, P, P], {"kind": "practice", "success": False}),
        ([P, H, P], {"kind": "practice"}),  # nobody knows how it ended
        ([P, H], {"kind": "practice", "success": True, "split": "eval"}),
        ([H, H], {"kind": "demonstration", "success": True}),
    )
    return demos, mixed


def learned(by: Any, stores: tuple[Path, Path], **options: Any) -> dict[float, tuple[list[float], list[float], Any]]:
    """By the observation that a block begins with: its actions, their weights, and whether it is good."""
    readers = {path: Reader(path) for path in stores}
    experience = open_experience(
        by, stores[0], [stores[1]], readers.__getitem__, block_steps=3, batch_size=400, seed=0, **options
    )
    for part in experience.parts:
        part.steps.follow()
    batch = experience.sample()
    good = [None] * 400 if batch.good is None else batch.good.tolist()
    found = {
        float(seen[0]): (action[:, 0].tolist(), weight.tolist(), is_good)
        for seen, action, weight, is_good in zip(batch.observation, batch.action, batch.weight, good, strict=True)
    }
    assert len(found) == len(experience)  # 400 draws find all of the few steps
    experience.close()
    for reader in readers.values():
        reader.close()
    return found


DEMOS = {1100.0, 1101.0, 1102.0, 500.0, 501.0}


def test_each_method_has_its_steps(stores: tuple[Path, Path]) -> None:
    success = {100.0, 101.0, 102.0, 103.0, 104.0, 105.0}
    assert set(learned("cloning", stores)) == DEMOS | success | {200, 201, 202, 300, 301, 302}
    assert set(learned("filtered-cloning", stores)) == DEMOS | success
    assert set(learned("hg-dagger", stores)) == DEMOS | {102, 103, 105, 301}


def test_a_block_ends_where_the_human_lets_go(stores: tuple[Path, Path]) -> None:
    """In episode 1 of the second store the steps 2, 3 and 5 are the human's."""
    found = learned("hg-dagger", stores)
    assert found[102] == ([3.0, 4.0, 0.0], [1.0, 1.0, 0.0], None)
    assert found[103] == ([4.0, 0.0, 0.0], [1.0, 0.0, 0.0], None)  # step 4 is the policy's, and step 5 is out of reach
    assert found[105] == ([6.0, 0.0, 0.0], [1.0, 0.0, 0.0], None)  # the end of the episode
    assert found[500] == ([1.0, 2.0, 0.0], [1.0, 1.0, 0.0], None)
    everything = learned("cloning", stores)
    assert everything[103] == ([4.0, 5.0, 6.0], [1.0, 1.0, 1.0], None)  # as it happened


def test_sft_on_corrections_ends_blocks_there_too(stores: tuple[Path, Path]) -> None:
    with Reader(stores[1]) as reader:
        demos = Demonstrations(reader, block_steps=2, batch_size=100, seed=0)
        demos.follow()
        batch = demos.sample()
        demos.close()
    at = batch.observation[:, 0].tolist().index(103)
    assert (batch.action[at, :, 0].tolist(), batch.weight[at].tolist()) == ([4.0, 0.0], [1.0, 0.0])


def test_recap_has_bad_steps_and_says_which(stores: tuple[Path, Path]) -> None:
    estimates = Estimates(
        store_id="",
        commit=0,
        model="",
        episode=np.array([1, 2]),
        num_steps=np.array([6, 3]),
        value=np.zeros(9, np.float32),
        advantage=np.zeros(9, np.float32),
        good=np.array([False, True, False, False, False, False, True, False, False]),
    )
    found = learned("recap", stores, estimates={stores[1]: estimates})
    assert set(found) == DEMOS | {100, 101, 102, 103, 104, 105, 200, 201, 202}  # those with an outcome
    assert {seen for seen, (_, _, good) in found.items() if not good} == {100, 104, 201, 202}
    assert found[103] == ([4.0, 0.0, 0.0], [1.0, 0.0, 0.0], True)  # the human's step is good, whatever was estimated
    assert found[104] == ([5.0, 0.0, 0.0], [1.0, 0.0, 0.0], False)  # before the human takes over again


def test_every_step_is_as_likely_and_it_goes_on_with_the_same_batches(stores: tuple[Path, Path]) -> None:
    def opened() -> Experience:
        readers = {path: Reader(path) for path in stores}
        return open_experience(
            "cloning", stores[0], [stores[1]], readers.__getitem__, block_steps=2, batch_size=17, seed=3
        )

    one = opened()
    for part in one.parts:
        part.steps.follow()
    assert one.num_steps == {"demonstrations": 5, "all": 12}
    for _ in range(4):
        batch = one.sample()
        demonstrated = np.isin(batch.observation[:, 0], list(DEMOS)).sum()
        assert (demonstrated, len(batch.instruction)) == (5, 17)  # the share of the demonstrations, exactly
    state, expected = one.state(), one.sample()
    other = opened()
    other.restore(state)
    assert np.array_equal(other.sample().observation, expected.observation)
    with pytest.raises(StoreError, match="the state has 1 parts and this run 3; resume it with the same stores"):
        opened().restore({**state, "parts": state["parts"][:1]})


def test_batches_are_joined_and_what_is_not_judged_is_good() -> None:
    def some(value: float, good: Any) -> Blocks:
        ones = np.full((2, 1), value, np.float32)
        return Blocks(observation={"a": ones}, instruction=("x", "y"), action=ones, weight=ones, good=good)

    both = joined([some(1.0, None), some(2.0, np.array([True, False]))])
    assert both.observation["a"][:, 0].tolist() == [1, 1, 2, 2]
    assert both.good is not None
    assert both.good.tolist() == [True, True, True, False]
    assert joined([some(1.0, None), some(2.0, None)]).good is None
    assert set(METHODS) == {"cloning", "filtered-cloning", "hg-dagger", "recap"}
