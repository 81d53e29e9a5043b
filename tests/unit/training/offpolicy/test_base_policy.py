"""A base policy: its actions are in the observations of worlds and demonstrations, and a run learns to change them."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.algorithms import SACConfig
from understudy.cli import main
from understudy.core import ArraySpec, Spec, SpecError
from understudy.core import tree as trees
from understudy.envs.registry import open_world
from understudy.policies import ActorConfig, ActorPolicy, Sampling
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.policies.rlpd.actor import BASE_ACTION
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import Reader, Store
from understudy.service import Server, ServerConfig
from understudy.training.offpolicy.actor import run_actor
from understudy.training.offpolicy.base_policy import (
    BasePolicyWorld,
    add_base_actions,
    with_base_action,
    without_base_action,
)
from understudy.training.offpolicy.learner_process import run_learner
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.offpolicy.rlpd_learner import RLPDLearner
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run, RunError

ENV = "toy:touch_purple?cameras=false"
BLOCK_STEPS = 3
SAC = SACConfig(
    actor=ActorConfig(hidden=(8, 8), residual_scale=0.5), critic_hidden=(8, 8), bc_weight=1.0, actor_lr=1e-2
)


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


def test_a_world_shows_the_actions_of_each_block_one_after_the_other() -> None:
    policy = new_policy()
    with BasePolicyWorld(open_world(ENV), policy) as world, open_world(ENV) as plain:
        assert world.step_spec == with_base_action(plain.step_spec)
        assert without_base_action(world.step_spec) == plain.step_spec
        seen, info = world.reset(seed=5)
        before, _ = plain.reset(seed=5)
        rng = np.random.default_rng([info["seed"], 3])
        found, wanted = [], []
        for step in range(2 * BLOCK_STEPS):
            world.step_spec.observation.check(seen, "observation")
            assert trees.equal({name: seen[name] for name in before}, before)
            if step % BLOCK_STEPS == 0:
                one = trees.map_leaves(lambda leaf: np.asarray(leaf)[None], before)
                acted = policy.act(one, [info["instruction"]], rngs=[rng], sampling=Sampling())
                wanted += list(acted.action[0])
            found.append(seen[BASE_ACTION])
            assert np.array_equal(world.observe()[BASE_ACTION], seen[BASE_ACTION])  # asking twice changes nothing
            seen, *_ = world.step(np.zeros(4, np.float32))
            before, *_ = plain.step(np.zeros(4, np.float32))
        assert np.array_equal(np.stack(found), np.stack(wanted))  # the toy's actions are from -1 to 1 already
        assert world.has_expert
        assert world.simulated


def test_fields_that_do_not_fit_are_refused() -> None:
    with open_world(ENV) as world:
        spec = world.step_spec
    leaf = ArraySpec(shape=(4,), dtype="float32")
    with pytest.raises(SpecError, match="observation/base_action: expected no such field"):
        with_base_action(replace(spec, observation=Spec({"state": leaf, BASE_ACTION: leaf})))
    with pytest.raises(SpecError, match="observation: expected fields with names"):
        with_base_action(replace(spec, observation=Spec(leaf)))


# ---- demonstrations


def test_demonstrations_get_the_actions_and_stay_the_same_else(given: Path, tmp_path: Path) -> None:
    policy = new_policy()
    with open_world(ENV) as world:
        spec = world.step_spec
    (tmp_path / "new.unfinished").mkdir()  # of a process that was killed
    (tmp_path / "new.unfinished" / "catalog.sqlite").write_text("half of one")
    counted: list[int] = []
    add_base_actions(given / "demos", tmp_path / "new", policy, spec, seed=0, progress=counted.append)
    assert counted == [1, 2, 3]
    assert not (tmp_path / "new.unfinished").exists()
    with Reader(given / "demos") as old, Reader(tmp_path / "new") as new:
        for before, after in zip(old.episodes(), new.episodes(), strict=True):
            was, now = old.read(before.id), new.read(after.id)
            base = now.observation[BASE_ACTION]
            assert base.shape == (len(was) + 1, 4)
            assert np.abs(base).max() <= 1.0
            rest = {name: leaf for name, leaf in now.observation.items() if name != BASE_ACTION}
            assert replace(now, observation=rest, info=was.info).equals(was)
            assert (now.info.task, now.info.success, now.info.kind) == (was.info.task, was.info.success, was.info.kind)
            second = trees.map_leaves(lambda leaf: leaf[BLOCK_STEPS][None], was.observation)
            rng = np.random.default_rng([0, before.id, 3, BLOCK_STEPS])
            acted = policy.act(second, [was.info.instruction or ""], rngs=[rng], sampling=Sampling())
            assert np.array_equal(acted.action[0], base[BLOCK_STEPS : 2 * BLOCK_STEPS])


def test_no_demonstrations_are_refused(given: Path, tmp_path: Path) -> None:
    policy = new_policy()
    with open_world(ENV) as world:
        spec = world.step_spec
    shutil.copytree(given / "demos", tmp_path / "none")
    with Store.open(tmp_path / "none") as store:
        store.delete([record.id for record in Reader(store.path).episodes()])
    with pytest.raises(SpecError, match="expected demonstrations, got none"):
        add_base_actions(tmp_path / "none", tmp_path / "new", policy, spec, seed=0)


# ---- a run


def test_a_run_learns_a_change_and_stays_near_the_base_action(given: Path, trained: Run, tmp_path: Path) -> None:
    run = trained
    with Reader(run.store) as reader:
        for record in reader.episodes():
            episode = reader.read(record.id)
            base = episode.observation[BASE_ACTION][:-1]
            assert np.abs(episode.action - base).max() <= 0.5 + 1e-6
            assert np.abs(episode.action - base).max() > 0
    last = list(read_metrics(run.metrics, "train"))[-1]
    assert last["demo_steps"] > 0
    assert last["bc_mse"] > 0
    policy = ActorPolicy.load(run.policy)
    assert policy.config.residual_scale == 0.5
    other = train(tmp_path / "other", config_of(given, sac=replace(SAC, actor=replace(SAC.actor, residual_scale=0.1))))
    with Reader(other.store) as reader:
        episode = reader.read(next(iter(reader.episodes())).id)
        assert np.abs(episode.action - episode.observation[BASE_ACTION][:-1]).max() <= 0.1 + 1e-6


def test_each_base_policy_gives_another_run(given: Path, trained: Run, tmp_path: Path) -> None:
    new_policy(seed=1).save(tmp_path / "other.safetensors")
    other = train(tmp_path / "run", config_of(given, base_policy=str(tmp_path / "other.safetensors")))
    first, second = (next(read_metrics(run.metrics, "train"))["actor_q"] for run in (trained, other))
    assert first != second


def test_a_human_takes_over_and_is_imitated(given: Path, tmp_path: Path) -> None:
    human = InterventionConfig(source="script", patience_steps=5)
    run = train(tmp_path / "run", config_of(given, intervention=human))
    assert sum(line["intervention_steps"] for line in read_metrics(run.metrics, "episode")) > 0


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


def test_a_run_that_is_stopped_before_its_first_step_leaves_nothing(given: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    stop.request()
    with pytest.raises(Stopped), Run.create_or_remove(tmp_path / "run", "rlpd", config_of(given)) as run:
        LocalRun(run, stop=stop)
    assert not (tmp_path / "run").exists()


def test_what_another_start_left_is_not_taken(given: Path, tmp_path: Path) -> None:
    """A start that fails in a directory that was there before leaves its copy of the demonstrations."""
    path = tmp_path / "policy.safetensors"
    config = config_of(given, base_policy=str(path))
    run = Run.create(tmp_path / "run", "rlpd", config)
    with open_world(ENV) as world:
        spec = with_base_action(world.step_spec)
    Store.open(run.store).close()
    found: list[list[Path]] = []
    for seed in (0, 1, 0):
        new_policy(seed=seed).save(path)
        RLPDLearner(run, config, spec).close()
        found.append(sorted(run.base_demos.iterdir()))
    assert [len(copies) for copies in found] == [1, 2, 2]
    one, other = (base_actions(copy) for copy in found[-1])
    assert not np.array_equal(one, other)


def base_actions(store: Path) -> Any:
    with Reader(store) as reader:
        return reader.read(next(iter(reader.episodes())).id).observation[BASE_ACTION]


def test_another_base_policy_is_refused_when_a_run_goes_on(given: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    new_policy().save(path)
    run = train(tmp_path / "run", config_of(given, base_policy=str(path)))
    new_policy(seed=1).save(path)
    with pytest.raises(RunError, match="is not the policy any more that this run started from"):
        LocalRun(Run(run.path))


def test_an_actor_with_another_base_policy_than_the_learner_is_refused(given: Path, tmp_path: Path) -> None:
    """On another machine the same path may hold another policy, whose actions the learner's actor does not fit."""
    other = tmp_path / "other.safetensors"
    new_policy(seed=1).save(other)
    run = Run.create(tmp_path / "run", "rlpd", config_of(given, steps=100_000))  # it learns until it is stopped
    stop = StopRequest()
    with Store.open(run.store) as store, Server(store, ServerConfig(port=0)) as server, ThreadPoolExecutor(1) as pool:
        learning = pool.submit(run_learner, run, server.address, stop=stop)
        try:
            with pytest.raises(
                ConfigError, match=r"expected the policy that the learner uses \(\w{32}\), got another one"
            ):
                run_actor(config_of(given, base_policy=str(other)), server.address)
            assert run_actor(config_of(given), server.address) > 0
        finally:
            stop.request()
        with pytest.raises(Stopped):
            learning.result()


def test_the_command_evaluates_with_the_base_policy(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(trained.path), "--episodes", "2"]) == 0
    assert "of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"base_policy": None}, r"base_policy: expected it together with .* got None, 0.5 and None"),
        ({"sac": SACConfig()}, r"base_policy: expected it together with .* add --sac.actor.residual-scale 0.5"),
        ({"start_steps": 5}, "start_steps: expected 0 with a base policy"),
        ({"cloning_updates": 5}, "cloning_updates: expected 0 with a base policy"),
        ({"demos": None}, "demos: expected a store with demonstrations, got None"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(given: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(given, **changes)


def test_a_policy_that_is_not_there_is_named(given: Path) -> None:
    with pytest.raises(ConfigError, match="base_policy: expected a policy file or a run with one, got nowhere"):
        config_of(given, base_policy="nowhere").open_world()
