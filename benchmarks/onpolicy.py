"""What practice in groups costs beside bare loops that do the same work, and how many bytes it moves.

    python benchmarks/onpolicy.py rollout    # the Collector, beside the same workers and policy without it
    python benchmarks/onpolicy.py update     # PolicyGradientLearner.learn, beside torch on tensors that are ready
    python benchmarks/onpolicy.py bytes      # of pictures, in an iteration: by formula, and counted with two ranks
    python -m benchmarks.onpolicy overlap    # iterations an hour with max_lag 1, beside 0; also with --batch-wait-ms 5

Both sides of a ratio take turns, with the first changing from round to round; a ratio is the median over rounds of CPU
time of all processes, bare / ours: 1 is no cost. `rollout --env NAME` measures another world.
"""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from understudy.algorithms.onpolicy.policy_gradient import (
    MiniBatch,
    PolicyGradient,
    PolicyGradientConfig,
    loss_inputs,
)
from understudy.cli import main as understudy
from understudy.core import StepSpec, Tree
from understudy.core import tree as trees
from understudy.envs.registry import WORLD_REGISTRY
from understudy.envs.workers.outcomes import Observed, Reset, Stepped, Steps
from understudy.policies import Acted, Sampling
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.replay.maintain.summary import summarize
from understudy.training.collection.block_rows import to_batch
from understudy.training.collection.collector import Collector
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Plan, PlanConfig, PlannedTask, Ticket
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.ranks import single_rank
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig, WorkersConfig, default_config
from understudy.training.onpolicy.policy_gradient_learner import PolicyGradientLearner, _batch_seed
from understudy.training.onpolicy.rollout_exchange import RolloutExchange
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ROUNDS = 5
SAMPLING = Sampling()
METAWORLD = (
    'metaworld?tasks=["handle-press-v3","coffee-button-v3","faucet-open-v3","faucet-close-v3"]&cameras=["corner3"]'
    "&size=64&action_repeat=2&max_steps=45&hide_goal=true&state=hand"
)
TOY = "toy?size=64"


# --- rollout ---


def rollout(
    *, env: tuple[str, ...] = (), episodes: int = 16, workers: int = 2, rounds: int = ROUNDS, max_steps: int = 50
) -> int:
    """Measure steps per second of the Collector and of the bare workers.

    Args:
        env: Worlds; by default the toy, and Metaworld if it is there.
        episodes: Of a round, of each side, in groups of four.
        workers: Processes with a world.
        rounds: That count; one more comes before them.
        max_steps: Of an episode.
    """
    torch.set_num_threads(1)
    for name in env or (TOY, *([METAWORLD] if WORLD_REGISTRY["metaworld"].ready else [])):
        _rollout(name, episodes, workers, rounds, max_steps)
    return 0


def _rollout(env: str, episodes: int, workers: int, rounds: int, max_steps: int) -> None:
    with Collector(env, num_parallel_envs=workers, max_steps=max_steps) as collector:
        policy = _new_policy(collector)
        plan = _plan(collector, episodes)
        _load_all(collector)
        asked = _count_calls(policy)
        measured: dict[str, list[Taken]] = {"ours": [], "bare": []}
        num_steps = {"ours": 0, "bare": 0}
        calls: dict[str, list[Call]] = {"ours": [], "bare": []}
        for round_ in range(rounds + 1):
            plan.next_iteration()
            tickets = plan.wave(episodes // 4)
            sides = {
                "ours": partial(our_rollout, collector, tickets, policy),
                "bare": partial(bare_rollout, collector, tickets, policy, max_steps),
            }
            found = {}
            for name in sorted(sides, reverse=bool(round_ % 2)):
                asked.clear()
                found[name], taken = _measured(sides[name], collector.pids)
                if round_:  # the first warms up
                    measured[name].append(taken)
                    calls[name] += asked
                    num_steps[name] += found[name]
            assert found["ours"] == found["bare"], f"not the same steps: {found}"  # the same tickets, the same bits
    label = env.partition("?")[0]
    for clock in ("cpu_s", "wall_s"):
        ours, bare = ([getattr(one, clock) for one in measured[name]] for name in ("ours", "bare"))
        ratios = [b / a for a, b in zip(ours, bare, strict=True)]
        print(
            f"rollout, {label}, {workers} workers, {clock}: {num_steps['ours'] / sum(ours):.1f} steps/s with the "
            f"Collector, {num_steps['bare'] / sum(bare):.1f} bare, {np.median(ratios):.3f}x (rounds {min(ratios):.2f} "
            f"to {max(ratios):.2f}; 0.8 is wanted); rows of a call of the policy "
            f"{np.mean([one.num_rows for one in calls['ours']]):.2f} and "
            f"{np.mean([one.num_rows for one in calls['bare']]):.2f}"
        )
    rest = {
        name: 1e3
        * (sum(one.own_s for one in measured[name]) - sum(one.cpu_s for one in calls[name]))
        / sum(one.num_rows for one in calls[name])
        for name in measured
    }
    print(
        f"rollout, {label}, beside policy and workers: {rest['ours']:.2f} CPU ms a block with the Collector, "
        f"{rest['bare']:.2f} bare",
        flush=True,
    )


@dataclass(frozen=True, kw_only=True)
class Call:
    """Of the policy."""

    num_rows: int
    cpu_s: float


def _count_calls(policy: VLAPolicy) -> list[Call]:
    """All calls from now on. Chance decides how many workers wait at once, and a call of one row costs as much as one
    of eight."""
    calls: list[Call] = []
    act = policy.act

    def counted(observation: Tree, instructions: Sequence[str], **rest: Any) -> Acted:
        began = time.process_time()
        acted = act(observation, instructions, **rest)
        calls.append(Call(num_rows=len(instructions), cpu_s=time.process_time() - began))
        return acted

    policy.act = counted  # type: ignore[method-assign]
    return calls


def our_rollout(collector: Collector, tickets: Sequence[Ticket], policy: VLAPolicy) -> int:
    return sum(one.num_steps for one in collector.collect(tickets, policy, SAMPLING))


def bare_rollout(collector: Collector, tickets: Sequence[Ticket], policy: VLAPolicy, max_steps: int) -> int:
    """The same episodes by the same workers and policy; nothing is checked, built or kept. Returns the steps."""
    vector = collector._vector
    waiting = deque(tickets)
    rngs: dict[int, np.random.Generator] = {}
    said: dict[int, str] = {}
    done: dict[int, int] = {}
    num_steps = 0

    def begin(slot: int) -> None:
        if waiting:
            ticket = waiting.popleft()
            rngs[slot], done[slot] = np.random.default_rng([ticket.seed, 2]), 0
            vector.send(slot, Reset(seed=ticket.world_seed, options={"task": ticket.task, "start": ticket.start}))

    for slot in range(len(vector)):
        begin(slot)
    while vector.num_pending:
        seen: dict[int, Any] = {}
        for slot, outcome in vector.ready(1.0):
            if isinstance(outcome, Observed):
                said[slot] = outcome.info["instruction"]
            else:
                assert isinstance(outcome, Stepped), outcome
                done[slot] += len(outcome)
                num_steps += len(outcome)
                if outcome.last or done[slot] >= max_steps:
                    begin(slot)
                    continue
            seen[slot] = outcome.observation
        if not seen:
            continue
        batch = {name: np.stack([one[name] for one in seen.values()]) for name in policy.inputs.leaves}
        acted = policy.act(batch, [said[slot] for slot in seen], rngs=[rngs[slot] for slot in seen], sampling=SAMPLING)
        for row, slot in enumerate(seen):
            vector.send(slot, Steps(actions=list(acted.action[row][: max_steps - done[slot]])))
    return num_steps


def _load_all(collector: Collector) -> None:
    """Have each worker build each task, which takes longer than all that is measured."""
    for task in collector.tasks:
        for slot in range(len(collector._vector)):
            collector._vector.send(slot, Reset(seed=0, options={"task": task.name}))
        collector._drain()


# --- update ---


def update(*, episodes: int = 16, rounds: int = 9, max_steps: int = 50) -> int:
    """Measure an update of a batch by PolicyGradientLearner.learn and by torch alone.

    Args:
        episodes: Of the toy world, from which both learn, in groups of four.
        rounds: That count; one more comes before them.
        max_steps: Of an episode.
    """
    torch.set_num_threads(1)
    with Collector(TOY, num_parallel_envs=2, max_steps=max_steps) as collector:
        policy = _new_policy(collector)
        plan = _plan(collector, episodes)
        plan.next_iteration()
        rollouts = [_labelled(one) for one in collector.collect(plan.wave(episodes // 4), policy, SAMPLING)]
    config, engine = PolicyGradientConfig(), EngineConfig()
    shared = RolloutExchange(single_rank())
    light = [shared.keep(one) for one in rollouts]
    model = copy.deepcopy(policy.model)
    start = next(model.parameters()).detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=engine.learning_rate, weight_decay=engine.weight_decay)
    learner = PolicyGradientLearner(policy, config, engine, shared, SAMPLING, seed=0)
    ours: list[float] = []
    bare: list[float] = []
    num_updates = 0
    for round_ in range(rounds + 1):
        ready = _ready(policy, config, rollouts, round_)
        sides: dict[str, Callable[[], object]] = {
            "ours": partial(learner.learn, light, round_),
            "bare": partial(bare_update, model, optimizer, ready, config),
        }
        taken = {name: _measured(sides[name], [])[1].cpu_s for name in sorted(sides, reverse=bool(round_ % 2))}
        if round_:  # the first warms up
            ours.append(taken["ours"])
            bare.append(taken["bare"])
            num_updates = len(ready)
    assert not torch.equal(start, next(model.parameters())), "nothing was learned"
    ratios = [b / a for a, b in zip(ours, bare, strict=True)]
    theirs = policy.model.state_dict()
    apart = max(float((value - theirs[name]).abs().max()) for name, value in model.state_dict().items())
    size = sum(value.numel() for value in model.parameters())
    num_rows = sum(one.num_rows for one in rollouts)
    print(
        f"update, {size / 1e6:.2f}M parameters, {num_rows} blocks, {num_updates} steps of the optimizer: "
        f"{np.median(ours):.2f} CPU s with the PolicyGradientLearner, {np.median(bare):.2f} bare, "
        f"{np.median(ratios):.3f}x (rounds {min(ratios):.2f} to {max(ratios):.2f}; 0.9 is wanted); "
        f"the weights differ by {apart:.1e} at the end"
    )
    return 0


Micro = tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]  # inputs, tokens, old log-probs, advantage, weight


def _ready(
    policy: VLAPolicy, config: PolicyGradientConfig, rollouts: Sequence[Rollout], number: int
) -> list[list[Micro]]:
    """All micro batches of a learn, as tensors in memory of their own."""
    batch = to_batch(rollouts)
    algorithm = PolicyGradient(config)
    prepared = algorithm.prepare(batch)

    def tensors(part: MiniBatch) -> Micro:
        seen = trees.map_leaves(lambda leaf: leaf[part.rows], batch.observation)
        inputs = policy.tensors(seen, [batch.instruction[row] for row in part.rows])
        tokens = torch.from_numpy(batch.replay["tokens"][part.rows]).long()
        given = loss_inputs(prepared, part)
        return inputs, tokens, given.old_log_prob, given.advantage, given.weight

    plan = algorithm.mini_batches(prepared, seed=_batch_seed(0, number))
    return [[tensors(part) for part in algorithm.micro_batches(mini)] for mini in plan]


def bare_update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ready: list[list[Micro]], config: PolicyGradientConfig
) -> None:
    """The clipped surrogate and AdamW, and no more: no metrics, no checks."""
    low, high = 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high
    for parts in ready:
        for inputs, tokens, old_log_prob, advantage, weight in parts:
            logits, _ = model(inputs)
            log_probs = torch.log_softmax(logits, dim=-1)
            ratio = (log_probs.gather(-1, tokens[..., None]).squeeze(-1) - old_log_prob).exp()
            gain = advantage[:, None, None]
            terms = torch.maximum(-gain * ratio, -gain * ratio.clamp(low, high))
            (terms * weight[..., None]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _labelled(rollout: Rollout) -> Rollout:
    """Every other one as a success: a policy that knows nothing has none, and then no gradient."""
    assert rollout.episode is not None
    info = replace(rollout.episode.info, success=rollout.ticket.slot % 2 == 0)
    return replace(rollout, episode=replace(rollout.episode, info=info))


# --- bytes ---


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of observations in an iteration of E episodes with B blocks each, R ranks and P passes (epochs).

    An observation has C cameras x H x W x 3 bytes (and some numbers). It is looked at once a block and once at the
    end. In pass p a row is learned from by one rank of R, drawn anew; a rank gets a row once, if it has not lived it.
    """

    row: int  # C x H x W x 3
    episodes: int
    blocks: float  # of an episode, on average
    ranks: int
    epochs: int

    @property
    def through_shared_memory(self) -> float:
        """Worker to collector: E x (B + 1) x row; copied out of it once."""
        return self.episodes * (self.blocks + 1) * self.row

    @property
    def to_stores(self) -> float:
        """E x (B + 1) x row; as it is, with actions and choices and a catalog beside it."""
        return self.through_shared_memory

    @property
    def between_ranks(self) -> float:
        """E x B x row x (R - 1) x (1 - (1 - 1/R)^P), received by all ranks together, on average."""
        needs_it = 1 - (1 - 1 / self.ranks) ** self.epochs
        return self.episodes * self.blocks * self.row * (self.ranks - 1) * needs_it


def count_bytes(*, place: Path | None = None, iterations: int = 3) -> int:
    """Say what an iteration moves at the size of SimpleVLA-RL, and count it in a small run of two ranks.

    Args:
        place: Directory for the run; by default a new one that is removed.
        iterations: Of the small run.
    """
    theirs = 512 * 64 * 6 * 224 * 224 * 4
    published = Moved(row=224 * 224 * 3, episodes=512, blocks=64, ranks=8, epochs=1)
    print(
        f"bytes, 512 episodes x 64 blocks x 1 camera x 224 x 224, 8 ranks, 1 pass: as float32 in six channels "
        f"{theirs / 1e9:.1f} GB; uint8 {512 * 64 * published.row / 1e9:.2f} GB once; here "
        f"{published.through_shared_memory / 1e9:.2f} GB through shared memory, {published.to_stores / 1e9:.2f} GB to "
        f"the stores, {published.between_ranks / 1e9:.2f} GB between ranks, none of it pickled"
    )
    with tempfile.TemporaryDirectory() as made:
        return _count(place or Path(made), iterations)


def _count(place: Path, iterations: int) -> int:
    torch.set_num_threads(1)
    with Collector(TOY, num_parallel_envs=1) as collector:
        _new_policy(collector, hidden=32, vision_hidden=32, layers=1, vision_layers=1).save(
            place / "policy.safetensors"
        )
        row = _num_bytes(collector.step_spec)
    epochs = PolicyGradientConfig().ppo_epochs
    argv = [
        "train",
        "grpo",
        str(place / "run"),
        "--policy",
        str(place / "policy.safetensors"),
        "--env",
        TOY,
        "--iterations",
        str(iterations),
        "--max-steps",
        "50",
        "--ranks",
        "2",
        "--engine.parallel",
        "ddp",
        "--plan.n-samples",
        "4",
        "--plan.data-batch-size",
        "16",
        "--plan.tasks-per-iteration",
        "4",
        "--filters.no-filter-accuracy",
        "--evaluation.episodes",
        "2",
        "--workers.num-parallel-envs",
        "2",
    ]
    assert understudy(argv) == 0
    lines = list(read_metrics(place / "run" / "metrics.jsonl", "episode"))
    blocks = [math.ceil(line["length"] / VLAConfig().block_steps) for line in lines]
    expected = Moved(row=row, episodes=len(blocks), blocks=float(np.mean(blocks)), ranks=2, epochs=epochs)
    received = list(read_metrics(place / "run" / "metrics.jsonl", "train"))[-1]["bytes_moved"]  # by rank 0, in all
    half = expected.between_ranks / 2  # each rank lives half of the episodes and gets half of what is moved
    stores = [place / "run" / "store", place / "run" / "stores" / "rank-1"]
    stored = sum(summarize(store).disk_bytes for store in stores)
    print(
        f"bytes, toy, 2 ranks, {epochs} passes, {len(blocks)} episodes, {sum(blocks)} blocks of {row} bytes: rank 0 "
        f"received {received / 1e6:.2f} MB, by the formula {half / 1e6:.2f} on average ({received / half:.3f}x); "
        f"stores {stored / 1e6:.2f} MB, by the formula {expected.to_stores / 1e6:.2f}"
    )
    return 0


# --- overlap ---

WAITING = "benchmarks.worlds.waiting:WaitingWorld?tasks=4&step_ms=20"


def overlap(
    *,
    env: tuple[str, ...] = (TOY, WAITING),
    iterations: int = 6,
    rounds: int = 3,
    episodes: int = 32,
    max_steps: int | None = None,
    workers: int = 2,
    threads: int | None = None,
    ray: int = 0,
    inference: int = 0,
    batch_wait_ms: float = 0.0,
) -> int:
    """Measure iterations an hour of GRPO with max_lag 1 and 0, of the same small VLA, in turns.

    Args:
        env: Worlds: by default the toy, whose simulators need the cores, and one that waits 20 ms a step, as if its
            simulators were elsewhere.
        iterations: Of a run, between the first and the last, which are left out: these run less at the same time.
        rounds: Runs of each side.
        episodes: Of an iteration, in groups of four.
        max_steps: Of an episode; by default the task's own.
        workers: Processes with a world.
        threads: Of torch; by default one per core, and on Ray one.
        ray: Rollout workers of a Ray of one node, among which the processes with a world are divided; 0 uses no Ray.
        inference: Inference workers of that Ray, which run the policy for all rollout workers.
        batch_wait_ms: Measure both also with this `batch_wait_ms`; 0 leaves it out.
    """
    sides = [(lag, wait_ms) for lag in (0, 1) for wait_ms in dict.fromkeys((0.0, batch_wait_ms))]
    options = []
    if ray:
        options = ["--cluster", "local", "--cluster.rollout.num", str(ray)]
        options += ["--cluster.rollout.envs", str(workers // ray), "--cluster.inference.num", str(inference)]
    for name in env:
        spent: dict[tuple[int, float], list[Spent]] = {side: [] for side in sides}
        for number in range(rounds):
            for lag, wait_ms in sides if number % 2 else reversed(sides):
                with tempfile.TemporaryDirectory() as place:
                    config = _overlap_config(Path(place), name, lag, iterations)
                    config = replace(
                        config,
                        max_steps=max_steps,
                        threads=threads,
                        plan=PlanConfig(n_samples=4, data_batch_size=episodes),
                        workers=WorkersConfig(num_parallel_envs=workers, batch_wait_ms=wait_ms),
                    )
                    took = _spend(Run.create(Path(place) / "run", "grpo", config), options)
                    spent[lag, wait_ms] += took
                    print(f"  round {number}, {_side(lag, wait_ms)}: {_median(took)}", flush=True)
        medians = {side: _median(found) for side, found in spent.items()}
        plain = medians[0, 0.0]
        phases = (plain.collect_s + plain.learn_s) / max(plain.collect_s, plain.learn_s)
        cores = plain.whole_s / (min(found.cpu_s for found in medians.values()) / (os.cpu_count() or 1))
        print(f"  at most {phases:.2f}x if the shorter phase took no time, {cores:.2f}x if no core had ever waited")
        for side, found in medians.items():
            gain = plain.whole_s / found.whole_s
            print(f"{name}, {_side(*side)}: {3600 / found.whole_s:.0f} an hour, {gain:.2f}x; {found}")
        print(f"(medians of {len(spent[0, 0.0])} iterations of each)", flush=True)
    return 0


def _side(lag: int, wait_ms: float) -> str:
    return f"max_lag {lag}" + (f", batch_wait_ms {wait_ms:g}" if wait_ms else "")


@dataclass(frozen=True, kw_only=True)
class Spent:
    """By an iteration."""

    collect_s: float
    learn_s: float
    whole_s: float
    cpu_s: float  # of all processes of the run

    def __str__(self) -> str:
        return (
            f"an iteration takes {self.whole_s:.2f} s: {self.collect_s:.2f} of collecting (or waiting for it), "
            f"{self.learn_s:.2f} of learning; {self.cpu_s:.2f} CPU s, {self.cpu_s / self.whole_s:.2f} cores"
        )


def _median(found: Sequence[Spent]) -> Spent:
    return Spent(**{name: float(np.median([getattr(one, name) for one in found])) for name in Spent.__annotations__})


def _overlap_config(place: Path, env: str, lag: int, iterations: int) -> OnPolicyConfig:
    with Collector(env, num_parallel_envs=1) as collector:
        policy = _new_policy(collector)
    policy.save(place / "policy.safetensors")
    return replace(
        default_config("grpo", policy=str(place / "policy.safetensors")),
        env=env,
        iterations=iterations + 2,
        max_lag=lag,
        filters=FilterConfig(filter_accuracy=False),
        eval_every=1000,
        evaluation=TaskEvaluationConfig(episodes=1),
        checkpoint_every=1000,
    )


def _spend(run: Run, options: Sequence[str]) -> list[Spent]:
    """What each iteration of a run takes, but the first and the last."""
    command = [sys.executable, "-m", "understudy", "resume", str(run.path), *options]
    here = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])  # for its worlds
    marks: list[tuple[float, float]] = []
    lines: list[dict[str, Any]] = []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": here})
    while process.poll() is None:
        time.sleep(0.02)
        lines = list(read_metrics(run.metrics, "train")) if run.metrics.exists() else []
        if len(lines) > len(marks):
            assert len(lines) == len(marks) + 1, "two iterations at once; make them longer"
            marks.append((time.monotonic(), _tree_cpu_s(process.pid)))
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    whole = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(marks)]
    return [
        Spent(collect_s=line["collect_s"], learn_s=line["learn_s"], whole_s=whole_s, cpu_s=cpu_s)
        for line, (whole_s, cpu_s) in zip(lines[1:-1], whole, strict=False)
    ]


def _tree_cpu_s(root: int) -> float:
    """CPU seconds so far of a process and all below it, with those that have ended there."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(int(field) for field in fields[11:15])
    found, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        found += ticks.get(pid, 0)
        waiting += children.get(pid, [])
    return found / os.sysconf("SC_CLK_TCK")


def _num_bytes(spec: StepSpec) -> int:
    """Of one observation."""
    return sum(math.prod(leaf.fixed_shape) * np.dtype(leaf.dtype).itemsize for leaf in spec.observation.flat.values())


# --- for all ---


@dataclass(frozen=True, kw_only=True)
class Taken:
    cpu_s: float  # of this process and the workers
    own_s: float  # of this process
    wall_s: float


def _measured(work: Callable[[], Any], pids: Sequence[int]) -> tuple[Any, Taken]:
    """What it gave, and what it took."""
    before, own, began = _cpu_s(pids), time.process_time(), time.monotonic()
    found = work()
    own_s, wall_s = time.process_time() - own, time.monotonic() - began
    return found, Taken(cpu_s=_cpu_s(pids) - before, own_s=own_s, wall_s=wall_s)


def _cpu_s(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _new_policy(collector: Collector, **shape: int) -> VLAPolicy:
    """One that knows nothing."""
    texts = [task.instruction for task in collector.tasks]
    return VLAPolicy.new(VLAConfig(**shape), collector.step_spec, texts, seed=0)  # type: ignore[arg-type]


def _plan(collector: Collector, episodes: int) -> Plan:
    tasks = [
        PlannedTask(name=task.name, starts=tuple(collector.suite.starts(task, "train"))) for task in collector.tasks
    ]
    return Plan(PlanConfig(n_samples=4, data_batch_size=episodes), tasks)


if __name__ == "__main__":
    sys.exit(
        tyro.extras.subcommand_cli_from_dict(
            {"rollout": rollout, "update": update, "bytes": count_bytes, "overlap": overlap}
        )
    )
