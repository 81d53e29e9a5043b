"""A run of supervised fine-tuning: a policy imitates the demonstrations of a store, of any number of tasks at once.

A resumed run ends with the same bits as one that was not killed: a checkpoint holds the algorithm's whole state, the
commit of the store that batches are sampled from, and the number of the next batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from understudy.algorithms.sft import Blocks, SFTUpdateConfig
from understudy.core import Episode, SequenceBatch, StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.resize import ResizeOption
from understudy.envs.registry import open_world
from understudy.policies import Stats
from understudy.policies.flow import FlowConfig
from understudy.policies.protocol import Array
from understudy.policies.vla import VLAConfig
from understudy.processes.stop import StopRequest
from understudy.replay import DEMO, Reader, Sampler, Sequences, View
from understudy.training.collection.collector import Collector
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.onpolicy.multi_task_evaluation import (
    TaskEvaluationResult,
    evaluate_tasks,
)
from understudy.training.runs.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import AUTO, choose_device
from understudy.training.runs.evaluate import count_episodes
from understudy.training.runs.fingerprint import Fingerprint, fingerprint
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.imitation_loop import ImitationLoop, Schedule, no_demonstrations, open_demonstrations
from understudy.training.runs.metrics import MetricLog, rewind
from understudy.training.runs.run import Run
from understudy.training.runs.threads import check_threads, use_threads

if TYPE_CHECKING:  # the config of a run is read without torch
    from understudy.algorithms.sft import SFT
    from understudy.policies.imitation import ImitationPolicy

KIND = "sft"
STATS_STEPS = 1024  # demonstrated steps, from which inputs are normalized


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """A run of supervised fine-tuning."""

    env: str = "toy:press_button"
    """World to evaluate in, as `understudy env list` names it, with its options."""
    demos: str | None = None
    """Directory of a store with demonstrations of one task or many; None uses the run's own store."""
    policy: str | None = None
    """File of a policy to fine-tune, of any kind that can imitate; None makes a new one."""
    network: Literal["vla", "flow"] = "vla"
    """Kind of the new policy: vla chooses among bins (options --vla), flow makes actions of noise (options --flow)."""
    updates: int = 300
    """Number of updates of the whole run."""
    batch_size: int = 64
    """Number of blocks of actions in a batch."""
    report_every: int = 25
    """Number of updates between two lines of metrics."""
    checkpoint_every: int = 100
    """Number of updates between two checkpoints."""
    keep_checkpoints: int = 2
    """Number of the newest checkpoints that are kept."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    device: str = AUTO
    """Device that torch trains on: cpu, cuda, cuda:1, or auto, which is a GPU where there is one and else the CPU."""
    threads: int | None = None
    """Number of CPU threads of torch; None: OMP_NUM_THREADS if it is set, else one per core, up to 8."""
    evaluate: bool = True
    """Whether the policy is evaluated at the end of the run."""
    evaluation: TaskEvaluationConfig = field(default_factory=lambda: TaskEvaluationConfig(sampling="sampled"))
    vla: VLAConfig = field(default_factory=VLAConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    sft: SFTUpdateConfig = field(default_factory=SFTUpdateConfig)

    def __post_init__(self) -> None:
        for name in ("updates", "batch_size", "report_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        check_threads(self.threads)
        for name, default in (("network", "vla"), ("vla", VLAConfig()), ("flow", FlowConfig())):
            if getattr(self, name) == default:
                continue
            if self.policy is not None:
                raise ConfigError(f"{name}: the given policy has its own network; leave these options out")
            if name not in ("network", self.network):
                raise ConfigError(
                    f"{name}: has no effect with network {self.network!r}; leave these options out, or set network to "
                    f"{name!r}"
                )


def run_sft(
    run: Run,
    say: Callable[[str], None],
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: StopRequest | None = None,
) -> tuple[Any, TaskEvaluationResult | None]:
    """Imitate, from the newest checkpoint if there is one; the policy, metrics and evaluation go to the run.

    `say` gets what it is doing now, and `note` what the user should know later too. `progress` gets the number of
    updates that are done, and of all. After a `stop` request it saves and raises Stopped.
    """
    config = run.config(SFTConfig)
    stop = stop or StopRequest()
    store = run.store if config.demos is None else Path(config.demos)
    device = choose_device(config.device)
    config = replace(config, device=device.name)  # the policy is made on this one
    note(str(use_threads(config.threads, large=True)))
    note(str(device))
    with run, Health(run.path / HEALTH, role="local", name=run.kind) as health, ExitStack() as undo:
        reader = undo.enter_context(open_demonstrations(store, config.env))
        sft, demos = _open(run, config, reader, undo)
        return imitate(
            run,
            config,
            sft,
            demos,
            env=config.env,
            evaluation=config.evaluation if config.evaluate else None,
            health=health,
            stop=stop,
            say=say,
            progress=progress,
        )


def imitate(
    run: Run,
    schedule: Schedule,
    sft: SFT,
    demos: Any,
    *,
    env: str,
    evaluation: TaskEvaluationConfig | None,
    health: Health,
    stop: StopRequest,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> tuple[Any, TaskEvaluationResult | None]:
    """Do the updates that are left, save the policy and evaluate it in the world `env`, if `evaluation` is given."""
    log = MetricLog(run.metrics)
    with closing(log):
        facts = {"policy": sft.description()}
        loop = ImitationLoop(run, schedule, sft, demos, log=log, health=health, stop=stop, facts=facts)
        with loop.saving_when_stopped():
            loop.run_updates(say, progress, doing="imitating")
            policy: Any = sft.policy(version=sft.num_updates)
            policy.save(run.policy)
            if evaluation is None:
                return policy, None
            found, measured_on = evaluate_policy(run, policy, env, evaluation, health, stop, say)
        log.write(
            "evaluation", step=len(demos), update=schedule.updates, **found.to_json(), fingerprint=measured_on.to_json()
        )
    return policy, found


def evaluate_policy(
    run: Run,
    policy: Any,
    env: str,
    evaluation: TaskEvaluationConfig,
    health: Health,
    stop: StopRequest,
    say: Callable[[str], None],
) -> tuple[TaskEvaluationResult, Fingerprint]:
    """Evaluate a policy on held-out starts of all tasks of the world; a run that is stopped evaluates again."""
    ended = count_episodes(evaluation.episodes, say)
    health.progress("evaluating")

    def progress(episode: object) -> None:
        health.progress("evaluating")
        ended(episode)
        stop.check()

    with Collector(env, num_parallel_envs=os.cpu_count() or 1, stop=stop) as collector:
        found = evaluate_tasks(
            collector,
            policy,
            evaluation,
            seed=0,
            videos=run.videos,
            progress=progress,
        )
        measured_on = fingerprint(
            config=run.metadata["config"], parameters=policy.parameters(), env=env, versions=collector.versions
        )
    return found, measured_on


class Demonstrations:
    """Blocks of the demonstrations of a store, or of another view of it, each with the instruction of its episode.

    A block ends before the first step that is not in the view, as it does at the end of the episode: what follows
    weighs nothing. So a correction ends where the human lets go, and never teaches what the policy did next.
    """

    def __init__(
        self,
        reader: Reader,
        view: View = DEMO,
        *,
        block_steps: int,
        batch_size: int,
        seed: int,
        spec: StepSpec | None = None,
        resize: ResizeOption | None = None,
    ):
        """`resize` asks for another size of cameras, as in `Sampler`."""
        self._reader = reader
        shape = Sequences(length=block_steps, first_observation_only=True)
        self._sampler: Sampler[SequenceBatch] = Sampler(
            reader, view, shape=shape, batch_size=batch_size, seed=seed, spec=spec, resize=resize
        )
        self._instructions: dict[int, str] = {}  # by episode

    @property
    def spec(self) -> StepSpec:
        """Of the steps in the store."""
        return self._sampler.stored_spec or self._sampler.spec

    def __len__(self) -> int:
        """Number of steps that a block can start at."""
        return len(self._sampler)

    @property
    def store(self) -> Path:
        return self._reader.path

    @property
    def store_id(self) -> str:
        return self._sampler.store_id

    def read(self, episode: int) -> Episode:
        """A whole episode of the store."""
        return self._reader.read(episode)

    def num_steps(self, episode: int) -> int:
        """The number of steps of an episode."""
        return self._reader.record(episode).num_steps

    @property
    def commit(self) -> int:
        """The commit of the store as of which batches are drawn."""
        return self._sampler.step_index.commit

    def follow(self, until: int | None = None) -> int:
        """Take in new commits (up to `until`); returns the number of steps that a block can start at."""
        return self._sampler.follow(until)

    def episodes(self) -> list[int]:
        """The episodes with steps in the view."""
        return self._sampler.index.episodes().tolist() if len(self) else []

    def sample(self, size: int | None = None) -> Blocks:
        """The next batch."""
        return self.blocks(self.draw(size))

    def draw(self, size: int | None = None) -> SequenceBatch:
        """The next batch as the store has it."""
        return self._sampler.sample(size=size)

    def blocks(self, batch: SequenceBatch) -> Blocks:
        """What there is to imitate in a batch."""
        inside = self._sampler.index.contains(batch.episode, batch.source) | (batch.weight == 0)
        inside = np.logical_and.accumulate(inside, axis=1)

        def cut(leaf: Array) -> Array:
            leaf[~inside] = 0
            return leaf

        return Blocks(
            observation=trees.map_leaves(lambda leaf: leaf[:, 0], batch.observation),
            instruction=tuple(self.instruction(episode) for episode in batch.episode.tolist()),
            action=trees.map_leaves(cut, batch.action),
            weight=batch.weight * inside,
        )

    def instruction(self, episode: int) -> str:
        """The instruction of an episode."""
        if episode not in self._instructions:
            found = self._reader.record(episode).info.instruction
            if found is None:
                raise StoreError(
                    f"{self._reader.path}: episode {episode} has no instruction, and the policy needs one; delete the "
                    f"episode, or record it with one"
                )
            self._instructions[episode] = found
        return self._instructions[episode]

    def state(self) -> dict[str, Any]:
        return self._sampler.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sampler.restore(state)

    def close(self) -> None:
        self._sampler.close()


def _open(run: Run, config: SFTConfig, reader: Reader, undo: ExitStack) -> tuple[SFT, Demonstrations]:
    """The algorithm and its data, new or restored from the newest checkpoint."""
    from understudy.algorithms.sft import SFT
    from understudy.policies import policy_file
    from understudy.policies.load import load_policy_file

    saved = newest_state(run.checkpoints)
    rewind(run.metrics, 0 if saved is None else int(saved.facts["metrics"]))
    policy: Any = None
    if saved is not None:
        policy = saved_policy(saved, config.device)
    elif config.policy is not None:
        policy = load_policy_file(Path(config.policy), device=config.device)
    is_new = policy is None
    policy = _new_policy(config, reader) if is_new else policy
    demos = Demonstrations(
        reader,
        block_steps=policy.block_steps,
        batch_size=config.batch_size,
        seed=config.seed,
        resize=resize_of(policy),
    )
    undo.callback(demos.close)
    if saved is not None:
        demos.restore(saved.facts["demos"])
    elif not demos.follow():
        raise no_demonstrations(reader.path, config.env)
    record = f"record in the world {config.env}, with the same options" if is_new else policy_file.SAME_WORLD
    policy_file.check_world(policy.spec, demos.spec, where=str(reader.path), advice=record)
    if is_new:
        policy = policy.with_stats(Stats.of_data(policy.inputs, [demos.sample(STATS_STEPS).observation]))
    sft = SFT(config.sft, policy, total_updates=config.updates, seed=config.seed)
    if saved is not None:
        sft.restore(saved.state)
    return sft, demos


def resize_of(policy: Any) -> ResizeOption | None:
    """The sizes in which a policy wants its cameras; None is as they are."""
    found: ResizeOption | None = getattr(getattr(policy, "inputs", None), "batch_resize", None)
    return found


def newest_state(checkpoints: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, if it has one."""
    newest = newest_checkpoint(checkpoints)
    return None if newest is None else read_checkpoint(newest)


def saved_policy(saved: Checkpoint, device: str) -> ImitationPolicy:
    """The policy of a checkpoint."""
    from understudy.policies.registry import policy_class

    weights = {
        name.replace("modules/policy/", "weights/", 1): value
        for name, value in saved.state.items()
        if name.startswith(("modules/policy/", "stats/"))
    }
    description = saved.facts["policy"]
    kind: Any = policy_class(description["kind"])
    policy: ImitationPolicy = kind.of(trees.unflatten(weights), description, device=device)
    return policy


def _new_policy(config: SFTConfig, reader: Reader) -> ImitationPolicy:
    """An untrained policy with the words of all instructions."""
    from understudy.policies.registry import policy_class

    with open_world(config.env) as world:
        spec, tasks = world.step_spec, world.suite.tasks
    recorded = sorted({record.info.instruction for record in reader.episodes() if record.info.instruction})
    instructions = [*(task.instruction for task in tasks), *recorded]
    kind: Any = policy_class(config.network)
    policy: ImitationPolicy = kind.new(_network(config), spec, instructions, seed=config.seed, device=config.device)
    return policy


def _network(config: SFTConfig) -> VLAConfig | FlowConfig:
    """The options of the new policy."""
    return config.flow if config.network == "flow" else config.vla
