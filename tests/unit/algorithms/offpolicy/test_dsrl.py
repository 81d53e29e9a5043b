"""DSRL: its transitions by hand, one update against numpy, each option, and what it learns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.algorithms.batches import CAMERAS, GRIPPER, STATE, random_tree, same_tree, small_actor, small_sac
from tests.unit.algorithms.offpolicy.test_sac import critic_values, sampled

from understudy.algorithms import DSRL, AlgorithmError, SACConfig
from understudy.algorithms.offpolicy.block_transitions import block_transitions
from understudy.core import ArraySpec, SequenceBatch, Source, Spec, StepSpec
from understudy.policies import ActorConfig, Inputs, Stats
from understudy.policies.actions import Actions

H, LENGTH, BOUND = 2, 3, 1.5


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Base:
    """A policy whose noise has one number more than its blocks, which it ignores."""

    block_steps = H
    noise_shape = (H, 4)

    def __call__(self, observation: Any, noise: Any) -> Any:
        assert noise.shape == (len(observation["state"]), *self.noise_shape)
        assert noise.dtype == np.float32
        assert np.abs(noise).max() <= BOUND
        return np.tanh(noise[..., :3] + observation["state"][:, None, :3]).astype(np.float32)


def dsrl_of(spec: StepSpec = STATE, *, seed: int = 0, **options: Any) -> DSRL:
    given = {"actor": small_actor(), "critic_hidden": (16, 16), "noise_bound": BOUND, **options}
    return DSRL(SACConfig(**given), spec, Stats.none(Inputs(spec.observation)), Base(), seed=seed)


def sequences(spec: StepSpec = STATE, size: int = 32, seed: int = 0, **fields: Any) -> SequenceBatch:
    """Episodes that end within a sequence or behind it; what is past the end is zero, as a store's samplers have it."""
    rng = np.random.default_rng(seed)
    num_steps = rng.integers(1, LENGTH + 1, size)
    there = np.arange(LENGTH) < num_steps[:, None]

    def steps(tree: Any) -> Any:
        return {path: leaf.reshape(size, LENGTH, *leaf.shape[1:]) for path, leaf in tree.items()}

    action = steps({"": random_tree(spec.action, size * LENGTH, rng)})[""] * there[..., None]
    frames = random_tree(spec.observation, size * (LENGTH + 1), rng)
    drawn: dict[str, Any] = {
        "observation": {path: leaf.reshape(size, LENGTH + 1, *leaf.shape[1:]) for path, leaf in frames.items()},
        "action": action.astype(np.float32),
        "reward": (rng.random((size, LENGTH)) * there).astype(np.float32),
        "terminated": (np.arange(LENGTH) == num_steps[:, None] - 1) & (rng.random((size, 1)) < 0.5),
        "truncated": np.zeros((size, LENGTH), bool),
        "source": np.zeros((size, LENGTH), np.uint8),
        "policy_version": np.zeros((size, LENGTH), np.int64),
        "proposal": np.zeros_like(action),
        "has_proposal": np.zeros((size, LENGTH), bool),
        "extras": {},
        "episode": np.zeros(size, np.int64),
        "index": np.zeros(size, np.int32),
        "weight": there.astype(np.float32),
    }
    return SequenceBatch(**{**drawn, **fields})


# ---- transitions


def test_transitions_by_hand() -> None:
    """Three rows: a whole sequence, one that terminates after two steps, and one that is cut after one."""
    spec = Spec(ArraySpec(shape=(1,), dtype="float32", low=0.0, high=4.0))
    there = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], np.float32)
    zeros = np.zeros((3, 3))
    batch = SequenceBatch(
        observation={"state": np.arange(12.0).reshape(3, 4, 1)},
        action=np.array([[0, 2, 4], [4, 2, 0], [1, 0, 0]], np.float32)[..., None],
        reward=np.array([[1, 2, 4], [1, 1, 0], [8, 0, 0]], np.float32),
        terminated=np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]], bool),
        truncated=np.array([[0, 0, 0], [0, 0, 0], [1, 0, 0]], bool),
        source=zeros.astype(np.uint8),
        policy_version=zeros.astype(np.int64),
        proposal=zeros[..., None].astype(np.float32),
        has_proposal=zeros.astype(bool),
        extras={},
        episode=np.zeros(3, np.int64),
        index=np.zeros(3, np.int32),
        weight=there,
    )
    found = block_transitions(batch, Actions(spec), block_steps=2, discount=0.5)
    assert found.observation["state"].ravel().tolist() == [0, 4, 8]
    assert found.next_observation["state"].ravel().tolist() == [3, 6, 9]
    assert found.action[..., 0].tolist() == [[-1, 0], [1, 0], [-0.5, -1]]
    assert found.executed.tolist() == [[True, True], [True, True], [True, False]]
    assert found.reward.tolist() == [3.0, 1.5, 8.0]
    assert found.terminated.tolist() == [0, 1, 0]
    assert found.num_steps.tolist() == [3, 2, 1]
    odd = found.part(1, 2)
    assert odd.reward.tolist() == [1.5]
    assert odd.next_observation["state"].tolist() == [[6]]
    with pytest.raises(AlgorithmError, match=r"expected sequences of at least a block \(4 steps\), got 3 steps"):
        block_transitions(batch, Actions(spec), block_steps=4, discount=0.5)


# ---- one update, written out


@pytest.mark.parametrize("backup_entropy", [False, True])
def test_one_update_equals_the_equations_in_numpy(backup_entropy: bool) -> None:
    dsrl = dsrl_of(num_critics=5, num_target_critics=2, initial_temperature=0.3, backup_entropy=backup_entropy)
    for seed in range(5):  # so that targets, critics and temperature differ from how they began
        dsrl.update(sequences(seed=seed))
    state = dsrl.state()
    arrays = {k: v.astype(np.float64) for k, v in state.items() if isinstance(v, np.ndarray) and v.dtype == np.float32}
    batch = sequences(seed=9)
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state["generator"]))
    noise_next = torch.randn(32, 8, generator=generator).numpy().astype(np.float64)
    which = torch.randperm(5, generator=generator)[:2].tolist()
    anything = 2.0 * torch.rand(32, H, 3, generator=generator).numpy() - 1.0
    noise_chosen = torch.randn(32, 8, generator=generator).numpy().astype(np.float64)
    normal = torch.randn(32, 8, generator=generator).numpy()
    noise_actor = torch.randn(32, 8, generator=generator).numpy().astype(np.float64)

    found = dsrl.update(batch)

    def blocks(now: Any, unit: Any) -> Any:
        noise = np.clip((BOUND * unit).astype(np.float32), -BOUND, BOUND).reshape(32, *Base.noise_shape)
        return Base()({"state": now}, noise).reshape(32, -1)

    rows = np.arange(32)
    num_steps = batch.weight.sum(axis=1).astype(int)
    now, then = batch.observation["state"][:, 0], batch.observation["state"][rows, num_steps]
    temperature = math.exp(arrays["modules/temperature/log"])
    unit, log_prob = sampled(arrays, then, noise_next)
    next_value = critic_values(arrays, "target", np.hstack([then, blocks(then, unit)]), which).min(axis=0)
    if backup_entropy:
        next_value = next_value - temperature * log_prob
    reward = (batch.reward * 0.97 ** np.arange(LENGTH)).sum(axis=1)
    target = reward + 0.97**num_steps * np.where(batch.terminated.any(axis=1), 0.0, next_value)
    executed = np.where(batch.weight[:, :H, None] > 0, batch.action[:, :H], anything).reshape(32, -1)
    q = critic_values(arrays, "critic", np.hstack([now, executed]), [0, 1, 2, 3, 4])
    assert found["critic_loss"] == pytest.approx(((q - target) ** 2).mean(), rel=1e-4)
    assert found["q"] == pytest.approx(q.mean(), rel=1e-4)
    assert found["q_target"] == pytest.approx(target.mean(), rel=1e-4)
    assert found["q_target_max"] == pytest.approx(target.max(), rel=1e-4)
    assert found["td_error"] == pytest.approx(np.abs(q - target).mean(), rel=1e-4)
    assert found["q_disagreement"] == pytest.approx(q.std(axis=0).mean(), rel=1e-4)

    after = {k: v.astype(np.float64) for k, v in dsrl.state().items() if k.startswith("modules/")}
    moved = 0.995 * arrays["modules/target/0/weight"] + 0.005 * after["modules/critic/0/weight"]
    np.testing.assert_allclose(after["modules/target/0/weight"], moved, atol=1e-7)

    own = np.clip(normal / BOUND, -1, 1)
    noise = np.where(rows[:, None] % 2 == 0, own, sampled(arrays, now, noise_chosen)[0])
    target = critic_values(after, "critic", np.hstack([now, blocks(now, noise)]), [0, 1, 2, 3, 4])
    q = critic_values(arrays, "noise_critic", np.hstack([now, noise]), [0, 1, 2, 3, 4])
    assert found["noise_critic_loss"] == pytest.approx(((q - target) ** 2).mean(), rel=1e-3)
    own_q = critic_values(after, "noise_critic", np.hstack([now, own]), [0, 1, 2, 3, 4])
    assert found["own_noise_q"] == pytest.approx(own_q.mean(), rel=1e-3, abs=1e-5)

    unit, log_prob = sampled(arrays, now, noise_actor)
    q = critic_values(after, "noise_critic", np.hstack([now, unit]), [0, 1, 2, 3, 4])
    assert found["actor_loss"] == pytest.approx((temperature * log_prob - q.mean(axis=0)).mean(), rel=1e-3, abs=1e-5)
    assert found["actor_q"] == pytest.approx(q.mean(), rel=1e-3, abs=1e-5)
    assert found["entropy"] == pytest.approx(-log_prob.mean(), rel=1e-4)
    assert found["temperature"] == pytest.approx(temperature, rel=1e-5)


# ---- options


ANOTHER: dict[str, Any] = {
    "actor": small_actor(hidden=(16, 8)),
    "critic_hidden": (16, 8),
    "num_critics": 3,
    "num_target_critics": 1,
    "layer_norm": False,
    "discount": 0.5,
    "tau": 0.5,
    "critic_steps": 2,
    "actor_lr": 1e-2,
    "critic_lr": 1e-2,
    "temperature_lr": 1e-2,
    "initial_temperature": 0.1,
    "target_entropy": -30.0,
    "backup_entropy": True,
    "shift_pixels": 1,
    "noise_bound": 1.0,
}


@pytest.mark.parametrize("option", ANOTHER)
def test_every_option_changes_what_is_learned(option: str) -> None:
    first, second = dsrl_of(CAMERAS), dsrl_of(CAMERAS, **{option: ANOTHER[option]})
    for dsrl in (first, second):
        for _ in range(3):
            dsrl.update(sequences(CAMERAS))
    before, after = (
        {name: value for name, value in dsrl.state().items() if name != "config"} for dsrl in (first, second)
    )
    assert any(not np.array_equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise_bound": 0.0}, "noise_bound: expected more than 0, got 0.0"),
        ({"base_action_dropout": 0.5}, "base_action_dropout: has no effect with noise_bound"),
        ({"bc_weight": 0.5}, "bc_weight: has no effect with noise_bound, because the actor chooses noise"),
        ({"actor": ActorConfig(gripper=GRIPPER)}, "actor/gripper: has no effect with noise_bound"),
        ({"actor": ActorConfig(residual_scale=0.5)}, "actor/residual_scale: has no effect with noise_bound"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(AlgorithmError, match=said):
        SACConfig(**{"noise_bound": BOUND, **options})


def test_each_algorithm_is_refused_the_others_config() -> None:
    with pytest.raises(AlgorithmError, match=r"noise_bound: expected None, because SAC chooses actions, got 1\.5"):
        small_sac(noise_bound=BOUND)
    with pytest.raises(AlgorithmError, match="noise_bound: expected the largest noise that the actor may choose"):
        dsrl_of(noise_bound=None)
    with pytest.raises(AlgorithmError, match=r"batch: expected a multiple of critic_steps \(4\) rows, got 30"):
        dsrl_of(critic_steps=4).update(sequences(size=30))


def test_the_target_entropy_is_the_authors() -> None:
    assert dsrl_of().target_entropy == 0.0
    assert dsrl_of(target_entropy=-3.0).target_entropy == -3.0


# ---- what it learns


def same_state(first: DSRL, second: DSRL) -> bool:
    one, other = first.state(), second.state()
    return one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())


def test_a_restored_state_goes_on_to_the_same_bits() -> None:
    dsrl, other = dsrl_of(CAMERAS), dsrl_of(CAMERAS, seed=1)
    dsrl.update(sequences(CAMERAS))
    other.restore(dsrl.state())
    for algorithm in (dsrl, other):
        algorithm.update(sequences(CAMERAS, seed=1), report=algorithm is dsrl)
    assert same_state(dsrl, other)
    assert same_tree(dsrl.parameters(), other.policy().parameters())


def test_the_policy_chooses_noise_within_the_bound() -> None:
    policy = dsrl_of().policy(version=3)
    observation = {"state": np.full(5, 100.0, np.float32)}
    acted = policy.act(observation, rng=np.random.default_rng(0))
    assert acted.action.shape == Base.noise_shape
    assert np.abs(acted.action).max() <= BOUND
    assert acted.version == 3


def corrected(seed: int, source: Source) -> SequenceBatch:
    """Blocks that end an episode at once, with a reward of 1 if all their numbers are high."""
    rng = np.random.default_rng(seed)
    good = rng.random(32) < 0.5
    action = np.where(good, 0.8, -0.8)[:, None, None] + rng.uniform(-0.2, 0.2, (32, LENGTH, 3))
    ends = np.zeros((32, LENGTH))
    ends[:, H - 1] = 1
    return sequences(
        seed=seed,
        action=action.astype(np.float32),
        reward=(ends * good[:, None]).astype(np.float32),
        terminated=ends.astype(bool),
        weight=(np.arange(LENGTH) < H).astype(np.float32)[None].repeat(32, axis=0),
        source=np.full((32, LENGTH), source, np.uint8),
    )


def test_the_actor_learns_the_noise_of_what_a_human_did() -> None:
    """The blocks are a human's and no noise stands behind them: the action critics carry over what they are worth."""
    dsrl = dsrl_of(actor_lr=3e-3, critic_lr=3e-3)
    for seed in range(150):
        metrics = dsrl.update(corrected(seed, Source.HUMAN))
    assert metrics["actor_q"] > metrics["own_noise_q"] + 0.1
    observation = {"state": np.zeros((8, 5), np.float32)}
    noise = dsrl.policy().act(observation, rng=np.random.default_rng(0), deterministic=True).action
    assert Base()(observation, noise).mean() > 0.5


def test_human_steps_count_like_all_others() -> None:
    first, second = dsrl_of(), dsrl_of()
    for dsrl, source in ((first, Source.HUMAN), (second, Source.POLICY)):
        dsrl.update(corrected(0, source))
    assert same_state(first, second)
