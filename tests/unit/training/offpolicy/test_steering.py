"""Steering: an actor chooses the noise of a frozen policy, in worlds, in runs and beside a human."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.algorithms import SACConfig
from understudy.cli import main
from understudy.core import Source
from understudy.core import tree as trees
from understudy.envs.registry import open_world
from understudy.policies import ActorConfig, ActorPolicy, EncoderConfig, Sampling
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.policies.subprocess import PolicyFactory, SubprocessPolicy
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import Reader, Store
from understudy.service import Server, ServerConfig
from understudy.training.offpolicy.actor import run_actor
from understudy.training.offpolicy.learner_process import run_learner
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.offpolicy.rlpd_learner import RLPDLearner
from understudy.training.offpolicy.steering import SteeredWorld, frozen_policy
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run, RunError

ENV = "toy:touch_purple?cameras=false"
BLOCK_STEPS = 3
BOUND = 1.5
SAC = SACConfig(actor=ActorConfig(hidden=(8, 8)), critic_hidden=(8, 8), actor_lr=1e-2, noise_bound=BOUND)
GREEDY = Sampling(greedy=True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def new_policy(seed: int = 0) -> FlowPolicy:
    with open_world(ENV) as world:
        config = FlowConfig(block_steps=BLOCK_STEPS, hidden=8, layers=1, num_inference_steps=2)
        return FlowPolicy.new(config, world.step_spec, [world.task.instruction], seed=seed)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a policy and a store of demonstrations."""
    path = tmp_path_factory.mktemp("given")
    new_policy().save(path / "policy.safetensors")
    assert main(["record", str(path / "demos"), "--env", ENV, "--successes", "3"]) == 0
    return path


def config_of(given: Path, **changes: Any) -> RLPDConfig:
    options: dict[str, Any] = {
        "env": ENV,
        "demos": str(given / "demos"),
        "base_policy": str(given / "policy.safetensors"),
        "steps": 110,
        "updates_per_step": 1,
        "batch_size": 16,
        "n_step": 1,
        "eval_every": 1000,
        "evaluation": EvaluationConfig(episodes=1),
        "checkpoint_every": 1000,
        "sac": SAC,
    }
    return RLPDConfig(**{**options, **changes})


def train(path: Path, config: RLPDConfig) -> Run:
    run = Run.create(path, "rlpd", config)
    with LocalRun(run) as local:
        local.run()
    return run


@pytest.fixture(scope="module")
def trained(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("trained") / "run", config_of(given, checkpoint_every=30))


# ---- the world


def test_noise_becomes_the_actions_of_a_block_one_after_the_other() -> None:
    policy, asked = new_policy(), []
    noises = np.random.default_rng(1).uniform(-BOUND, BOUND, (2, BLOCK_STEPS, 4)).astype(np.float32)

    def choose(observation: Any) -> tuple[Any, int]:
        asked.append(observation)
        return noises[len(asked) - 1], 6 + len(asked)

    with SteeredWorld(open_world(ENV), policy, BOUND) as world:
        act = world.steered(choose)
        observation, info = world.reset(seed=5)
        found, versions = [], []
        for _ in range(2 * BLOCK_STEPS):
            action, version = act(observation)
            assert trees.equal(act(observation)[0], action)  # asking twice changes nothing
            found.append(action)
            versions.append(version)
            observation, *_ = world.step(action)
        assert len(asked) == 2
        assert versions == [7] * BLOCK_STEPS + [8] * BLOCK_STEPS
        for number, seen in enumerate(asked):
            one = trees.map_leaves(lambda leaf: np.asarray(leaf)[None], seen)
            rngs = [np.random.default_rng(0)]
            acted = policy.act(one, [info["instruction"]], rngs=rngs, sampling=GREEDY, noise=noises[number][None])
            assert np.array_equal(np.stack(found[number * BLOCK_STEPS :][:BLOCK_STEPS]), acted.action[0])
        world.step_spec.action.check(found[0], "action")
        assert world.noise_spec.action.flat[""].fixed_shape == (BLOCK_STEPS, 4)
        assert world.has_expert


NUMPY_POLICY = """
import numpy as np

class Policy:
    block_steps, log_prob_size, replay_spec, has_value, noise_shape = 3, 1, {}, False, (3, 4)

    def act(self, observation, instructions, *, rngs, temperature, greedy, noise=None):
        action = np.tanh(noise + observation["state"][:, None, :1]).astype(np.float32)
        return {"action": action, "replay": {}, "log_prob": np.zeros((len(noise), 3, 1), np.float32)}
"""


def test_a_policy_in_another_process_is_steered_and_learned_from(tmp_path: Path) -> None:
    """It gives no gradients and knows numpy alone; the learner asks it for whole batches."""
    (tmp_path / "numpy_policy.py").write_text(NUMPY_POLICY)
    factory = PolicyFactory(factory="numpy_policy:Policy", env={"PYTHONPATH": str(tmp_path)})
    with open_world(ENV) as world, SubprocessPolicy(factory, world.step_spec) as policy:
        frozen = frozen_policy(policy, world.step_spec, "touch it", batch_size=16)
        with SteeredWorld(world, policy, BOUND) as steered:
            noise = np.full((3, 4), 0.5, np.float32)
            observation, _ = steered.reset(seed=5)
            action, _ = steered.steered(lambda _: (noise, 0))(observation)
            first = observation["state"][0]
            np.testing.assert_allclose(action, np.full(4, np.tanh(0.5 + first)), rtol=1e-5)
            many = trees.map_leaves(lambda leaf: np.repeat(np.asarray(leaf)[None], 16, axis=0), observation)
            blocks = frozen(many, np.repeat(noise[None], 16, axis=0))
        assert blocks.shape == (16, 3, 4)
        np.testing.assert_allclose(blocks[7, 0], trees.flatten(action)[""], rtol=1e-5)


def test_a_block_is_left_out_as_soon_as_something_else_is_executed() -> None:
    num_asked = 0

    def choose(observation: Any) -> tuple[Any, int]:
        nonlocal num_asked
        num_asked += 1
        return np.zeros((BLOCK_STEPS, 4), np.float32), 0

    with SteeredWorld(open_world(ENV), new_policy(), BOUND) as world:
        act = world.steered(choose)
        observation, _ = world.reset(seed=5)
        observation, *_ = world.step(act(observation)[0])
        act(observation)
        assert num_asked == 1
        observation, *_ = world.step(np.full(4, 0.25, np.float32))  # a human's
        act(observation)
        assert num_asked == 2
        observation, _ = world.reset(seed=5)
        act(observation)
        assert num_asked == 3


def test_a_learner_gets_the_blocks_that_the_world_executes() -> None:
    policy = new_policy()
    with open_world(ENV) as world:
        spec, instruction = world.step_spec, world.task.instruction
        seen = [world.reset(seed=seed)[0] for seed in range(5)]
    base = frozen_policy(policy, spec, instruction, batch_size=16)
    assert (base.block_steps, base.noise_shape) == (BLOCK_STEPS, (BLOCK_STEPS, 4))
    assert isinstance(base.policy, FlowPolicy)
    assert base.policy.config.act_rows == 16
    batch = {name: np.stack([observation[name] for observation in seen]) for name in seen[0]}
    noise = np.random.default_rng(0).normal(size=(5, BLOCK_STEPS, 4)).astype(np.float32)
    rngs = [np.random.default_rng(0)] * 5
    acted = policy.act(batch, [instruction] * 5, rngs=rngs, sampling=GREEDY, noise=noise)
    np.testing.assert_allclose(base(batch, noise), acted.action, atol=1e-6)  # the toy's are from -1 to 1 already


# ---- a run


def test_a_run_records_the_actions_of_the_policy_that_it_steers(given: Path, trained: Run) -> None:
    policy = new_policy()
    with Reader(trained.store) as reader, open_world(ENV) as world:
        assert "base_action" not in world.step_spec.observation.flat
        for record in reader.episodes():
            episode = reader.read(record.id)
            assert (episode.source == Source.POLICY).all()
            first = trees.map_leaves(lambda leaf: np.asarray(leaf)[:1], episode.observation)
            rngs, none = [np.random.default_rng(0)], np.zeros((1, BLOCK_STEPS, 4), np.float32)
            acted = policy.act(first, [world.task.instruction], rngs=rngs, sampling=GREEDY, noise=none)
            away = np.abs(episode.action[:BLOCK_STEPS] - acted.action[0])
            assert 0 < away.max() <= BOUND + 0.5  # noise is most of what an untrained flow gives
    last = list(read_metrics(trained.metrics, "train"))[-1]
    assert last["demo_steps"] > 0
    assert last["noise_critic_loss"] > 0
    assert last["lag_max"] < last["update"]
    assert ActorPolicy.load(trained.policy).spec.action.flat[""].low == -BOUND
    assert not trained.base_demos.exists()  # the demonstrations are learned from as they are


def test_another_bound_gives_other_actions(given: Path, trained: Run, tmp_path: Path) -> None:
    other = train(tmp_path / "run", config_of(given, sac=replace(SAC, noise_bound=0.1)))
    assert ActorPolicy.load(other.policy).spec.action.flat[""].high == pytest.approx(0.1)
    first, second = (next(read_metrics(run.metrics, "train"))["actor_q"] for run in (trained, other))
    assert first != second


def test_a_stopped_run_goes_on_to_the_same_bits(given: Path, trained: Run, tmp_path: Path) -> None:
    run, stop = Run.create(tmp_path / "run", "rlpd", config_of(given, checkpoint_every=30)), StopRequest()

    def watch(progress: Any) -> None:
        if progress.step > 40:
            stop.request()

    with LocalRun(run, watch, stop=stop) as local, pytest.raises(Stopped):
        local.run()
    with LocalRun(Run(run.path)) as local:
        local.run()
    assert trees.equal(ActorPolicy.load(run.policy).parameters(), ActorPolicy.load(trained.policy).parameters())
    measured = {"updates_per_s"}
    lines = [list(read_metrics(one.metrics, "train")) for one in (run, trained)]
    assert [{k: v for k, v in line.items() if k not in measured} for line in lines[0]] == [
        {k: v for k, v in line.items() if k not in measured} for line in lines[1]
    ]


def test_a_run_that_died_goes_on_to_the_same_bits(given: Path, trained: Run, tmp_path: Path) -> None:
    """What came after its last checkpoint is run again."""
    run = Run.create(tmp_path / "run", "rlpd", config_of(given, checkpoint_every=30))

    def watch(progress: Any) -> None:
        if progress.step > 70:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LocalRun(run, watch) as local:
        local.run()
    with LocalRun(Run(run.path)) as local:
        assert any("rolled back" in text or "removed" in text for text in local.restored)
        local.run()
    assert trees.equal(ActorPolicy.load(run.policy).parameters(), ActorPolicy.load(trained.policy).parameters())


def test_a_human_takes_over_and_the_action_critics_learn_from_it(given: Path, tmp_path: Path) -> None:
    human = InterventionConfig(source="script", patience_steps=5, burst_steps=4)
    run = train(tmp_path / "run", config_of(given, intervention=human, demo_weight=0))
    assert sum(line["intervention_steps"] for line in read_metrics(run.metrics, "episode")) > 0
    with RLPDLearner(run, config_of(given, intervention=human, demo_weight=0), spec_of_world()) as learner:
        batch = learner.mixture.sample()
        assert learner.sac is not None
        corrected = (batch.source == Source.HUMAN) & (batch.weight > 0)
        assert corrected.any()
        before = learner.sac.state()
        learner.sac.update(batch)
        after = learner.sac.state()
    for name in ("critic", "noise_critic", "actor/actor"):
        key = f"modules/{name}/0/weight"
        assert not np.array_equal(before[key], after[key])


def spec_of_world() -> Any:
    with open_world(ENV) as world:
        return world.step_spec


def test_the_first_steps_have_the_noise_of_the_policy_itself(given: Path, tmp_path: Path) -> None:
    """And no demonstrations are needed then."""
    run = train(tmp_path / "run", config_of(given, start_steps=60, demos=None))
    with Reader(run.store) as reader:
        versions = np.concatenate([reader.read(record.id).policy_version for record in reader.episodes()])
        assert (versions[:60] == -1).all()
        assert (versions >= 0).any()
        assert (reader.read(next(iter(reader.episodes())).id).source == Source.POLICY).all()
    assert next(read_metrics(run.metrics, "train"))["step"] >= 60


def test_an_n_step_return_is_at_least_a_block(given: Path, tmp_path: Path) -> None:
    lengths = []
    for number, n_step in enumerate((1, 5)):
        config = config_of(given, n_step=n_step)
        run = Run.create(tmp_path / str(number), "rlpd", config)
        Store.open(run.store).close()
        with RLPDLearner(run, config, spec_of_world()) as learner:
            lengths.append(learner.mixture.sample().reward.shape[1])
    assert lengths == [BLOCK_STEPS, 5]


def test_actors_and_a_learner_in_processes_of_their_own(given: Path, tmp_path: Path) -> None:
    """An actor with another base policy than the learner's is refused, as for residual actors."""
    other = tmp_path / "other.safetensors"
    new_policy(seed=1).save(other)
    run = Run.create(tmp_path / "run", "rlpd", config_of(given, steps=100_000))  # it learns until it is stopped
    stop = StopRequest()
    with Store.open(run.store) as store, Server(store, ServerConfig(port=0)) as server, ThreadPoolExecutor(1) as pool:
        learning = pool.submit(run_learner, run, server.address, stop=stop)
        try:
            with pytest.raises(ConfigError, match=r"expected the policy that the learner uses \(\w{32}\), got another"):
                run_actor(config_of(given, base_policy=str(other), steps=100_000), server.address)
            assert run_actor(config_of(given), server.address, name="actor-1") > 0
        finally:
            stop.request()
        with pytest.raises(Stopped):
            learning.result()


def test_another_base_policy_is_refused_when_a_run_goes_on(given: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    new_policy().save(path)
    run = train(tmp_path / "run", config_of(given, base_policy=str(path), steps=1))
    new_policy(seed=1).save(path)
    with pytest.raises(RunError, match="is not the policy any more that this run started from"):
        LocalRun(Run(run.path))


def test_the_command_evaluates_with_the_base_policy(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(trained.path), "--episodes", "2"]) == 0
    assert "of 2" in capsys.readouterr().out


# ---- what is refused


def test_a_policy_that_takes_no_noise_is_refused() -> None:
    policy: Any = object()  # has no noise_shape, like a policy that gives tokens
    with open_world(ENV) as world:
        with pytest.raises(ConfigError, match="base_policy: expected a policy whose noise can be chosen"):
            SteeredWorld(world, policy, BOUND)
        with pytest.raises(ConfigError, match="got object, which takes none; train a flow policy, or"):
            frozen_policy(policy, world.step_spec, "", batch_size=1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"base_policy": None}, r"base_policy: expected it together with .* got None, None and 1\.5"),
        (
            {"sac": SACConfig()},
            r"base_policy: expected it together with .* or --sac.noise-bound 1.5 to choose its noise",
        ),
        ({"cloning_updates": 5}, "cloning_updates: expected 0 with a base policy"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(given: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(given, **changes)


# ---- cameras


def test_the_policy_sees_whole_images_and_the_actor_smaller_ones(tmp_path: Path) -> None:
    env = "toy:touch_purple?size=32"
    with open_world(env) as world:
        encoder = EncoderConfig(filters=(4, 4), latent=4)
        flow = FlowConfig(encoder=encoder, block_steps=2, hidden=8, layers=1, num_inference_steps=1)
        FlowPolicy.new(flow, world.step_spec, [world.task.instruction], seed=0).save(tmp_path / "policy.safetensors")
    actor = ActorConfig(hidden=(8,), encoder=replace(encoder, image_size=(16, 16)))
    sac = replace(SAC, actor=actor)
    run = train(tmp_path / "run", config_of(tmp_path, env=env, demos=None, steps=101, batch_size=4, sac=sac))
    assert next(read_metrics(run.metrics, "train"))["noise_critic_loss"] > 0
