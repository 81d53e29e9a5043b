"""SFT: its losses and schedule as numbers, each option, and that it goes on to the same bits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from safetensors.numpy import load_file, save_file
from tests.unit.policies.vla.test_policy import GREEDY, SPEC, TINY, act, observations, policy_of, told

from understudy.algorithms import AlgorithmError
from understudy.algorithms.sft import SFT, Blocks, SFTUpdateConfig
from understudy.algorithms.sft.sft import cosine
from understudy.core import SpecError
from understudy.core import tree as trees
from understudy.policies import Stats
from understudy.policies.imitation import weighted_mean
from understudy.policies.vla.soft_targets import soft_cross_entropy, soft_targets

BASE = SFTUpdateConfig(warmup_updates=2)


def blocks(num: int = 6, seed: int = 0) -> Blocks:
    rng = np.random.default_rng(seed)
    unit = rng.random((num, 3, 2))
    weight = np.ones((num, 3), np.float32)
    weight[0, 1:] = 0.0
    return Blocks(
        observation=observations(num, seed),
        instruction=tuple(told(num)),
        action=(unit * [2, 4] - [1, 0]).astype(np.float32),
        weight=weight,
    )


def sft_of(config: SFTUpdateConfig = BASE, *, total: int = 10, seed: int = 0, **vla: Any) -> SFT:
    return SFT(config, policy_of(replace(TINY, **vla)), total_updates=total, seed=seed)


def losses_of(sft: SFT, num: int = 5) -> list[float]:
    return [sft.update(blocks(seed=number))["loss"] for number in range(num)]


# ---- numbers


def test_targets_by_hand() -> None:
    position = torch.tensor([0.0, 1.5, 3.0], dtype=torch.float64)
    assert soft_targets(position[[0, 2]], 4, 0.0).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert soft_targets(torch.tensor([1.4, 1.6]), 4, 0.0).argmax(dim=-1).tolist() == [1, 2]
    bell = [math.exp(-((k - 1.5) ** 2) / (2 * 0.8**2)) for k in range(4)]
    wanted = [one / sum(bell) for one in bell]
    np.testing.assert_allclose(soft_targets(position, 4, 0.8)[1].numpy(), wanted, rtol=1e-13)
    np.testing.assert_allclose(soft_targets(position, 4, 0.8).sum(dim=-1).numpy(), 1.0, rtol=1e-13)


def test_the_loss_by_hand() -> None:
    logits = torch.tensor([[[[0.0, 0.0], [0.0, math.log(3.0)]], [[5.0, 1.0], [2.0, 2.0]]]], dtype=torch.float64)
    targets = torch.tensor([[[[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    first = (math.log(2.0) + math.log(4.0 / 3.0)) / 2
    weight = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert soft_cross_entropy(logits, targets, weight).item() == pytest.approx(first, rel=1e-13)
    second = (math.log(1 + math.exp(-4.0)) + math.log(2.0)) / 2
    both = torch.ones(1, 2, dtype=torch.float64)
    assert soft_cross_entropy(logits, targets, both).item() == pytest.approx((first + second) / 2, rel=1e-13)
    assert weighted_mean(torch.ones(1, 2), torch.zeros(1, 2)).item() == 0.0


def test_the_schedule_by_hand() -> None:
    found = [cosine(number, total=6, warmup=2, min_ratio=0.2) for number in range(8)]
    wanted = [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2, 0.2]
    assert found == pytest.approx(wanted, rel=1e-13)
    assert cosine(0, total=1, warmup=0, min_ratio=0.0) == 1.0


def test_the_first_step_is_adams_golden() -> None:
    """At the first step Adam moves each weight by the learning rate against its gradient's sign."""
    sft = sft_of(replace(BASE, weight_decay=0.0, warmup_updates=0, learning_rate=1e-3, clip_norm=None))
    before = trees.flatten(sft.parameters())
    metrics = sft.update(blocks())
    after = trees.flatten(sft.parameters())
    moved = np.abs(after["weights/queries"] - before["weights/queries"])
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-2)
    assert metrics["learning_rate"] == 1e-3
    assert set(metrics) == {"loss", "gradient", "error", "entropy", "learning_rate"}


# ---- learning


def test_it_learns_to_repeat_what_was_shown() -> None:
    sft = SFT(
        replace(BASE, learning_rate=1e-2, sigma=0.5),
        policy_of(replace(TINY, num_bins=32, hidden=32), shaken=0.02),
        total_updates=150,
        seed=0,
    )
    batch = blocks(6)
    metrics = [sft.update(batch) for _ in range(150)]
    assert metrics[0]["error"] > 0.4
    assert metrics[-1]["error"] < 0.1
    policy = sft.policy(version=150)
    greedy = act(policy, batch.observation, list(batch.instruction), GREEDY)
    away = np.abs(greedy.action - batch.action) / [1, 2]
    assert away[batch.weight > 0].mean() < 0.1
    assert greedy.version == 150
    kept = policy.parameters()
    sft.update(batch)
    assert trees.equal(policy.parameters(), kept)  # later updates do not change it


def test_what_lies_behind_the_end_of_an_episode_teaches_nothing() -> None:
    batch = blocks()
    behind = np.array(batch.action)
    behind[0, 1:] = behind[0, 1:][::-1] * 0.5
    ones, twos = (sft_of() for _ in range(2))
    assert ones.update(batch) == twos.update(replace(batch, action=behind))
    within = np.array(batch.action)
    within[1, 0] *= 0.5
    assert ones.update(batch) != twos.update(replace(batch, action=within))


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"learning_rate": 3e-3}, False),
        ({"warmup_updates": 0}, False),
        ({"min_lr_ratio": 0.5}, False),
        ({"weight_decay": 0.5}, False),
        ({"clip_norm": 1e-3}, False),
        ({"sigma": 1.0}, True),
        ({"sigma": 0.0}, True),
        ({"shift_pixels": 4}, True),
    ],
    ids=str,
)
def test_every_option_changes_what_is_learned(change: dict[str, Any], first: bool) -> None:
    """From the first loss on, or after a step."""
    plain, again, changed = losses_of(sft_of()), losses_of(sft_of()), losses_of(sft_of(replace(BASE, **change)))
    assert plain == again
    assert (plain[0] != changed[0]) is first
    assert plain[-1] != changed[-1]


def test_the_clip_holds_the_gradient() -> None:
    plain, clipped = (sft_of(replace(BASE, clip_norm=norm, warmup_updates=0)) for norm in (None, 1e-9))
    before = trees.flatten(plain.parameters())["weights/queries"]
    assert plain.update(blocks())["gradient"] == clipped.update(blocks())["gradient"]  # as it came
    moved = [np.abs(trees.flatten(one.parameters())["weights/queries"] - before).max() for one in (plain, clipped)]
    assert moved[1] < 0.1 * moved[0]


def test_decay_spares_vectors() -> None:
    plain, decayed = (sft_of(replace(BASE, weight_decay=decay)) for decay in (0.0, 5.0))
    for one in (plain, decayed):
        one.update(blocks())
    ones, twos = (trees.flatten(one.parameters()["weights"]) for one in (plain, decayed))
    for name, weight in ones.items():
        assert np.array_equal(weight, twos[name]) is (weight.ndim == 1), name


def test_less_memory_is_the_same_learning() -> None:
    plain, little = losses_of(sft_of()), losses_of(sft_of(replace(BASE, checkpoint_gradients=True)))
    assert little == pytest.approx(plain, rel=1e-4)
    assert sft_of(replace(BASE, checkpoint_gradients=True))._policy.model.text.checkpointed
    assert not sft_of()._policy.model.text.checkpointed


def test_the_seed_is_that_of_the_shifts() -> None:
    config = replace(BASE, shift_pixels=4)
    assert losses_of(sft_of(config)) != losses_of(sft_of(config, seed=1))


def test_a_head_for_values_is_left_alone() -> None:
    sft = sft_of(value_head=True)
    before = sft.parameters()["weights"]["value"]
    losses_of(sft)
    assert trees.equal(sft.parameters()["weights"]["value"], before)


def test_nothing_is_reported_unasked() -> None:
    sft = sft_of()
    assert sft.update(blocks(), report=False) == {}
    assert sft.num_updates == 1


# ---- going on


def through_files(state: dict[str, Any], path: Path) -> dict[str, Any]:
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    save_file(arrays, path)
    plain = json.loads(json.dumps({name: value for name, value in state.items() if name not in arrays}))
    return {**load_file(path), **plain}


@pytest.mark.parametrize("at", [0, 3])
def test_it_goes_on_to_the_same_bits(at: int, tmp_path: Path) -> None:
    config = replace(BASE, shift_pixels=2)
    whole, half = sft_of(config), sft_of(config)
    wanted = [whole.update(blocks(seed=number)) for number in range(6)]
    for number in range(at):
        half.update(blocks(seed=number))
    state = through_files(half.state(), tmp_path / "it")
    stats = Stats(mean={"state": np.float32([9, 9, 9])}, std={"state": np.float32([7, 7, 7])})
    policy = policy_of(TINY, seed=5)
    other = SFT(config, type(policy)(policy.config, SPEC, policy.words, stats, policy.model), total_updates=10, seed=8)
    losses_of(other, 2)
    other.restore(state)
    assert other.num_updates == at
    assert [other.update(blocks(seed=number)) for number in range(at, 6)] == wanted[at:]
    assert trees.equal(other.parameters(), whole.parameters())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sft_of(replace(BASE, sigma=1.0)), "config/update/sigma: the state was saved with 2.0"),
        (lambda: sft_of(total=11), "config/total_updates: the state was saved with 10, this run has 11"),
        (lambda: sft_of(layers=2), "config/vla/layers: the state was saved with 1, this run has 2"),
        (
            lambda: SFT(BASE, _with_words("knock"), total_updates=10, seed=0),
            "config/words",
        ),
    ],
)
def test_the_state_of_another_is_refused(make: Any, said: str) -> None:
    other = make()
    before = other.state()
    with pytest.raises(AlgorithmError, match=said):
        other.restore(sft_of().state())
    after = other.state()
    assert all(trees.equal_leaf(after[name], value) for name, value in before.items())


def _with_words(word: str) -> Any:
    """A policy with another word in place of its first, so that all shapes are the same."""
    policy = policy_of()
    policy.words.known = (word, *policy.words.known[1:])
    return policy


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SFTUpdateConfig(learning_rate=0.0), "learning_rate, clip_norm: expected more than 0, got 0.0"),
        (lambda: SFTUpdateConfig(clip_norm=-1.0), "learning_rate, clip_norm: expected more than 0"),
        (lambda: SFTUpdateConfig(sigma=-1.0), "sigma: expected 0 or more, got -1.0"),
        (lambda: SFTUpdateConfig(shift_pixels=-1), "shift_pixels: expected 0 or more, got -1"),
        (lambda: SFTUpdateConfig(min_lr_ratio=2.0), "min_lr_ratio: expected a share from 0 to 1"),
        (lambda: sft_of(total=0), "total_updates: expected a number from 1, got 0"),
        (
            lambda: sft_of().update(replace(blocks(), weight=np.ones((6, 2), np.float32))),
            r"weight: expected \[6, 3\], one number an action, got \[6, 2\]; draw blocks of 3 steps",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises((AlgorithmError, SpecError), match=said):
        make()
