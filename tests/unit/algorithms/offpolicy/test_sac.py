"""SAC: one update against numpy, each option, its batches and its values."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.algorithms.batches import (
    ACTION,
    CAMERAS,
    GRIPPER,
    STATE,
    random_batch,
    same_tree,
    small_actor,
    small_sac,
)

from understudy.algorithms import SAC, AlgorithmError, Cloning, CloningConfig, SACConfig
from understudy.core import ArraySpec, Source, Spec, StepSpec, TransitionBatch
from understudy.policies import ActorConfig, Inputs, Stats
from understudy.policies.rlpd.actor import BASE_ACTION

OVER_BASE = StepSpec(
    observation=Spec({BASE_ACTION: ACTION.tree, "state": ArraySpec(shape=(5,), dtype="float32")}), action=ACTION
)
PENALTY = {"grasp_penalty": np.linspace(-1, 0, 32).astype(np.float32)}


# ---- one update, written out


def mlp(arrays: dict[str, Any], name: str, x: Any) -> Any:
    for layer in range(3):
        x = x @ arrays[f"{name}/{layer}/weight"].T + arrays[f"{name}/{layer}/bias"]
        x = np.maximum(x, 0) if layer < 2 else x
    return x


def critic_values(arrays: dict[str, Any], prefix: str, x: Any, which: list[int]) -> Any:
    found = []
    for e in which:
        y = x
        for layer in range(3):
            y = y @ arrays[f"modules/{prefix}/{layer}/weight"][e] + arrays[f"modules/{prefix}/{layer}/bias"][e]
            if layer < 2:
                y = np.maximum((y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5), 0)
        found.append(y[:, 0])
    return np.array(found)


def sampled(arrays: dict[str, Any], state: Any, noise: Any) -> tuple[Any, Any]:
    mean, raw = np.split(mlp(arrays, "modules/actor/actor", state), 2, axis=1)
    log_std = -5.0 + 0.5 * 7.0 * (np.tanh(raw) + 1)
    pre = mean + np.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - np.log(1 - np.tanh(pre) ** 2)
    return np.tanh(pre), log_prob.sum(axis=1)


@pytest.mark.parametrize("backup_entropy", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_one_update_equals_the_equations_in_numpy(backup_entropy: bool, num_steps: int) -> None:
    sac = small_sac(num_critics=5, num_target_critics=2, initial_temperature=0.3, backup_entropy=backup_entropy)
    rng = np.random.default_rng(1)
    for seed in range(5):  # so that targets, critics and temperature differ from how they began
        sac.update(random_batch(seed=seed))
    state = sac.state()
    arrays = {k: v.astype(np.float64) for k, v in state.items() if isinstance(v, np.ndarray) and v.dtype == np.float32}
    batch = random_batch(seed=9, num_steps=np.full(32, num_steps, np.int32), weight=rng.random(32).astype(np.float32))
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state["generator"]))
    noise_next = torch.randn(32, 3, generator=generator).numpy().astype(np.float64)
    which = torch.randperm(5, generator=generator)[:2].tolist()
    noise = torch.randn(32, 3, generator=generator).numpy().astype(np.float64)

    found = sac.update(batch)

    temperature = math.exp(arrays["modules/temperature/log"])
    next_action, next_log_prob = sampled(arrays, batch.next_observation["state"], noise_next)
    x = np.concatenate([batch.next_observation["state"], next_action], axis=1)
    next_value = critic_values(arrays, "target/critic", x, which).min(axis=0)
    if backup_entropy:
        next_value = next_value - temperature * next_log_prob
    target = batch.reward + 0.97**num_steps * np.where(batch.terminated, 0.0, next_value)
    x = np.concatenate([batch.observation["state"], batch.action], axis=1)
    q = critic_values(arrays, "critic", x, [0, 1, 2, 3, 4])
    assert found["critic_loss"] == pytest.approx((batch.weight * ((q - target) ** 2).mean(0)).mean(), rel=1e-4)
    assert found["q"] == pytest.approx(q.mean(), rel=1e-4)
    assert found["q_disagreement"] == pytest.approx(q.std(axis=0).mean(), rel=1e-4)
    assert found["q_target"] == pytest.approx(target.mean(), rel=1e-4)
    assert found["q_target_max"] == pytest.approx(target.max(), rel=1e-4)
    assert found["td_error"] == pytest.approx(np.abs(q - target).mean(), rel=1e-4)

    after = {k: v.astype(np.float64) for k, v in sac.state().items() if k.startswith("modules/")}
    for name in ("0/weight", "2/bias"):  # the target follows the critic that was just moved
        wanted = 0.995 * arrays[f"modules/target/critic/{name}"] + 0.005 * after[f"modules/critic/{name}"]
        np.testing.assert_allclose(after[f"modules/target/critic/{name}"], wanted, atol=1e-7)

    action, log_prob = sampled(arrays, batch.observation["state"], noise)
    x = np.concatenate([batch.observation["state"], action], axis=1)
    q = critic_values(after, "critic", x, [0, 1, 2, 3, 4])
    loss = (batch.weight * (temperature * log_prob - q.mean(axis=0))).mean()
    assert found["actor_loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
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
    "bc_weight": 0.5,
    "shift_pixels": 1,
    "gripper_penalty": "grasp_penalty",
}


def test_every_option_has_a_test() -> None:
    others = {"noise_bound", "base_action_dropout"}  # for DSRL, and for actors over a base policy (below)
    assert {*ANOTHER, *others} == {field.name for field in fields(SACConfig)}


@pytest.mark.parametrize("option", ANOTHER)
def test_every_option_changes_what_is_learned(option: str) -> None:
    gripper = option == "gripper_penalty"
    plain = {"actor": small_actor(gripper=GRIPPER if gripper else None)}
    batch = random_batch(CAMERAS, extras=PENALTY, source=np.full(32, Source.HUMAN, np.uint8))
    first, second = small_sac(CAMERAS, **plain), small_sac(CAMERAS, **{**plain, option: ANOTHER[option]})
    for sac in (first, second):
        for _ in range(3):
            sac.update(batch)
    before, after = (
        {name: value for name, value in sac.state().items() if name != "config"} for sac in (first, second)
    )
    assert any(not np.array_equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"critic_hidden": ()}, "critic_hidden: expected at least one positive number"),
        ({"num_critics": 0}, "num_critics: expected at least 1, got 0"),
        ({"critic_steps": 0}, "critic_steps: expected at least 1, got 0"),
        ({"num_target_critics": 3}, r"num_target_critics: expected from 1 to num_critics \(2\), got 3"),
        ({"discount": 1.0}, "discount: expected from 0 to less than 1, got 1.0"),
        ({"tau": 0.0}, "tau: expected more than 0 and at most 1, got 0.0"),
        ({"initial_temperature": 0.0}, "initial_temperature: expected more than 0, got 0.0"),
        ({"shift_pixels": -1}, "shift_pixels: expected 0 or more, got -1"),
        ({"bc_weight": -0.1}, "bc_weight: expected 0 or more, got -0.1"),
        ({"gripper_penalty": "x"}, "gripper_penalty: expected None for an actor without a gripper"),
        ({"base_action_dropout": 0.5}, "base_action_dropout: has no effect without a base action, got 0.5; set"),
        (
            {"base_action_dropout": 1.0, "actor": small_actor(residual_scale=0.5)},
            "base_action_dropout: expected from 0 to less than 1, got 1.0",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(AlgorithmError, match=said):
        SACConfig(**options)


def test_the_temperature_falls_while_the_policy_is_more_random_than_asked() -> None:
    """Adam's first step is as long as its learning rate."""
    for target, way in ((-30.0, -1), (30.0, 1)):
        sac = small_sac(target_entropy=target, temperature_lr=0.02, initial_temperature=0.5)
        assert sac.update(random_batch())["temperature"] == pytest.approx(0.5)
        assert sac.state()["modules/temperature/log"] == pytest.approx(math.log(0.5) + 0.02 * way, rel=1e-4)
    assert small_sac().target_entropy == -1.5
    assert small_sac(actor=small_actor(gripper=GRIPPER)).target_entropy == -1.0  # the gripper is no part of it


def test_a_large_tau_makes_targets_the_critics() -> None:
    sac = small_sac(tau=1.0)
    sac.update(random_batch())
    state = sac.state()
    targets = [name for name in state if name.startswith("modules/target/critic/")]
    assert targets
    for name in targets:
        assert np.array_equal(state[name], state[name.replace("target/", "")])


def test_critic_steps_are_many_for_the_critics_and_one_for_the_actor() -> None:
    sac = small_sac(critic_steps=4)
    sac.update(random_batch(size=32))
    state = sac.state()
    steps = [state[f"optimizers/{name}/0/step"] for name in ("critic", "actor", "temperature")]
    assert steps == [4, 1, 1]
    with pytest.raises(AlgorithmError, match=r"batch: expected a multiple of critic_steps \(4\) rows, got 30"):
        sac.update(random_batch(size=30))


def test_each_critic_step_has_the_mixtures_shares() -> None:
    """Half of the batch is demonstrations, and they stand together: every part must have half of its own."""
    from understudy.algorithms.offpolicy.transitions import to_tensors

    sac = small_sac()
    whole = to_tensors(random_batch(size=32, reward=np.float32([1] * 16 + [0] * 16)), sac.actor)
    parts = [whole.part(number, 4) for number in range(4)]
    assert [part.reward.sum().item() for part in parts] == [4.0] * 4
    rows = sorted(row for part in parts for row in part.observation["state"].tolist())
    assert rows == sorted(whole.observation["state"].tolist())


def test_it_can_start_from_a_clone() -> None:
    actor = small_actor()
    batch = random_batch(CAMERAS)
    stats = Stats.of_data(Inputs(CAMERAS.observation), [batch.observation])
    cloning = Cloning(CloningConfig(actor=actor), CAMERAS, stats, seed=5)
    for _ in range(5):
        cloning.update(batch)
    sac = small_sac(CAMERAS, actor=actor)
    sac.start_from(cloning.policy())
    assert same_tree(sac.parameters(), cloning.parameters())
    sac.update(batch)
    assert not same_tree(sac.parameters(), cloning.parameters())
    with pytest.raises(AlgorithmError, match="actor: expected a policy of ActorConfig"):
        small_sac(CAMERAS, actor=small_actor(hidden=(8,))).start_from(cloning.policy())


def test_a_clones_grip_is_not_taken_for_a_value() -> None:
    actor = small_actor(gripper=GRIPPER)
    clone = Cloning(CloningConfig(actor=actor), STATE, Stats.none(Inputs(STATE.observation)), seed=5).policy()
    sac = small_sac(actor=actor)
    before = sac.parameters()["weights"]
    sac.start_from(clone)
    after = sac.parameters()["weights"]
    assert same_tree(after["gripper"], before["gripper"])
    assert same_tree(after["actor"], clone.parameters()["weights"]["actor"])


# ---- batches


def with_ends(terminated: bool, truncated: bool) -> TransitionBatch:
    return random_batch(terminated=np.full(32, terminated), truncated=np.full(32, truncated))


def test_truncated_bootstraps_on_and_terminated_does_not() -> None:
    targets = {}
    for terminated in (False, True):
        for truncated in (False, True):
            sac = small_sac(initial_temperature=1.0, backup_entropy=True)
            targets[terminated, truncated] = sac.update(with_ends(terminated, truncated))["q_target"]
    reward = float(with_ends(True, False).reward.mean())
    assert targets[True, False] == pytest.approx(reward, rel=1e-6)
    assert targets[True, True] == pytest.approx(reward, rel=1e-6)
    assert targets[False, True] == targets[False, False]
    assert abs(targets[False, False] - reward) > 0.1


def test_weight_zero_is_as_good_as_not_there() -> None:
    batch = random_batch(weight=np.zeros(32, np.float32))
    sac = small_sac()
    before = sac.parameters()
    metrics = sac.update(batch)
    assert metrics["critic_loss"] == metrics["actor_loss"] == 0.0
    assert same_tree(before, sac.parameters())


def test_a_batch_is_left_alone() -> None:
    batch, again = random_batch(CAMERAS), random_batch(CAMERAS)
    small_sac(CAMERAS).update(batch)
    assert same_tree(batch.observation, again.observation)
    assert same_tree(batch.next_observation, again.next_observation)
    assert np.array_equal(batch.action, again.action)


def test_what_is_not_a_number_a_step_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"reward: expected one number a step, got float32 \[32, 2\]"):
        small_sac().update(random_batch(reward=np.zeros((32, 2), np.float32)))


def test_reporting_changes_nothing_but_the_report() -> None:
    quiet, loud = small_sac(), small_sac()
    for seed in range(3):
        assert quiet.update(random_batch(seed=seed), report=False) == {}
        assert loud.update(random_batch(seed=seed))
    assert same_tree(quiet.parameters(), loud.parameters())
    assert quiet.num_updates == 3


def test_the_bc_loss_follows_humans_and_scripts_and_nobody_else() -> None:
    for source in Source:
        follows = source in (Source.HUMAN, Source.SCRIPT)
        plain, cloning = small_sac(actor_lr=1e-2), small_sac(actor_lr=1e-2, bc_weight=3.0)
        for seed in range(60):
            batch = random_batch(seed=seed, source=np.full(32, source, np.uint8))
            batch.action[:] = (0.6, -0.6, 0.3)
            for sac in (plain, cloning):
                metrics = sac.update(batch)
        assert same_tree(plain.parameters(), cloning.parameters()) != follows
        if follows:
            observation = random_batch(seed=99).observation
            mode = cloning.policy().act(observation, rng=np.random.default_rng(0), deterministic=True).action
            assert np.abs(mode - batch.action).mean() < 0.1
            assert metrics["bc_mse"] < 0.03


# ---- base policies


def test_a_hidden_base_action_teaches_the_actor_nothing_and_the_critics_everything() -> None:
    """With next to all rows hidden, the actor's weights on the base action stay as they were made."""
    changed = {}
    for share in (0.0, 0.5, 0.999):
        sac = small_sac(OVER_BASE, actor=small_actor(residual_scale=0.5), bc_weight=1.0, base_action_dropout=share)
        columns = sac.actor.encoder.columns_of(BASE_ACTION)
        weights = [next(sac.actor.actor.parameters()), next(sac.critic.parameters()).mT]  # of the first layers
        before = [weight.detach()[..., columns].clone() for weight in weights]
        for seed in range(3):
            metrics = sac.update(random_batch(OVER_BASE, seed=seed))
            assert all(np.isfinite(value) for value in metrics.values())
        changed[share] = [
            not torch.equal(weight[..., columns], was) for weight, was in zip(weights, before, strict=True)
        ]
    assert changed == {0.0: [True, True], 0.5: [True, True], 0.999: [False, True]}


def test_the_first_of_several_fields_is_hidden() -> None:
    sac = small_sac(OVER_BASE, actor=small_actor(residual_scale=0.5), base_action_dropout=0.5)
    features = torch.ones(1000, sac.actor.encoder.size)
    seen = sac._with_hidden_base_actions(features)
    columns = sac.actor.encoder.columns_of(BASE_ACTION)
    hidden = seen[:, columns] == 0
    assert 0.4 < hidden.float().mean() < 0.6
    assert torch.equal(hidden.all(dim=1), hidden.any(dim=1))  # the whole action of a row
    seen[:, columns] = 1
    assert torch.equal(seen, features)


# ---- grippers


def test_the_grippers_penalty_is_its_own() -> None:
    """It lowers the gripper's target and leaves the arm's critics alone."""
    options = {"actor": small_actor(gripper=GRIPPER), "gripper_penalty": "grasp_penalty"}
    found = {}
    for penalty in (0.0, -0.5):
        sac = small_sac(**options)
        extras = {"grasp_penalty": np.full(32, penalty, np.float32)}
        found[penalty] = sac.update(random_batch(extras=extras, terminated=np.ones(32, bool)))
    assert found[0.0]["q_target"] == found[-0.5]["q_target"]
    assert found[0.0]["critic_loss"] == found[-0.5]["critic_loss"]
    assert found[0.0]["gripper_loss"] != found[-0.5]["gripper_loss"]
    with pytest.raises(AlgorithmError, match="extras/grasp_penalty: expected the gripper's penalty, got no extras"):
        small_sac(**options).update(random_batch())


def test_the_gripper_learns_which_value_pays_and_the_penalty_can_turn_it() -> None:
    """Every step ends the task; closing pays 1. With a penalty of 2 for closing it is better left open."""
    rng = np.random.default_rng(0)
    gripper = replace(GRIPPER, values=(-1.0, 1.0), epsilon=0.0)
    actor = small_actor(gripper=gripper)
    for penalty, best in ((0.0, 1.0), (-2.0, -1.0)):
        sac = small_sac(actor=actor, gripper_penalty="grasp_penalty", critic_lr=1e-2)
        for seed in range(60):
            grip = rng.choice([-1.0, 1.0], 32).astype(np.float32)
            batch = random_batch(
                seed=seed,
                reward=(grip > 0).astype(np.float32),
                terminated=np.ones(32, bool),
                extras={"grasp_penalty": (penalty * (grip > 0)).astype(np.float32)},
            )
            batch.action[:, 2] = grip
            metrics = sac.update(batch)
        observation = random_batch(seed=99).observation
        action = sac.policy().act(observation, rng=rng).action
        assert (action[:, 2] == best).all()
        assert set(metrics) >= {"gripper_loss", "gripper_q", "gripper_agreement"}


# ---- values known in closed form


def value_of_endless_reward(*, terminated: float, truncated: float) -> float:
    """Q of a world with one state and reward 1, in which a step ends the task or the episode with these chances."""
    rng = np.random.default_rng(0)
    config = SACConfig(
        actor=ActorConfig(hidden=(16,)), critic_hidden=(32,), discount=0.9, tau=0.05, critic_lr=3e-3, actor_lr=1e-4
    )
    sac = SAC(config, STATE, Stats.none(Inputs(STATE.observation)), seed=0)
    constant = {"state": np.ones((64, 5), np.float32)}
    values = []
    for update in range(1200):
        batch = random_batch(
            size=64,
            seed=update,
            observation=constant,
            next_observation=constant,
            reward=np.ones(64, np.float32),
            terminated=rng.random(64) < terminated,
            truncated=rng.random(64) < truncated,
        )
        values.append(sac.update(batch, report=update >= 1100).get("q"))
    return float(np.mean(values[1100:]))


@pytest.mark.nightly  # a learning run
def test_with_time_outs_the_value_is_that_of_going_on() -> None:
    assert value_of_endless_reward(terminated=0.0, truncated=0.1) == pytest.approx(1 / (1 - 0.9), rel=0.03)


@pytest.mark.nightly  # a learning run
def test_with_time_outs_taken_as_ends_the_value_is_half_of_that() -> None:
    """What a learner gets that does not tell the two apart; and what is right if the task does end."""
    assert value_of_endless_reward(terminated=0.1, truncated=0.0) == pytest.approx(1 / (1 - 0.9 * 0.9), rel=0.05)
