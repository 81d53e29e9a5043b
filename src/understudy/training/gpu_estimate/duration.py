"""Duration: how long an iteration takes, by a simple model. Arithmetic alone: it imports no torch.

| phase | seconds |
|---|---|
| collection | decisions of a rank / its worlds, times the slower of a world's steps with a pass and all passes |
| publication | FSDP gathers all weights, so that each rank can act |
| log-probs | a forward pass of each micro batch, if they are recomputed, and one if KL is measured |
| learning | forward and backward passes, steps of the optimizer |

With `max_lag` 1 the first wave, which is the accepted share of all episodes, is run during the other phases. These take
longer by the GPU's time for its passes.

A pass takes as long as the slowest of three: its FLOPs, reading the weights from the GPU's memory, and FSDP's
transfers, which go on at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from understudy.algorithms.onpolicy.minibatches import micro_batches, mini_batches
from understudy.training.gpu_estimate.gpus import PER_NODE, Gpus
from understudy.training.gpu_estimate.memory import gathered_element
from understudy.training.gpu_estimate.network_size import NetworkSize
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.runs.config import ConfigError

MEMORY_EFFICIENCY = 0.7  # share of the data sheet's bandwidth that reading weights reaches
LINK_EFFICIENCY = 0.7  # the same of links between GPUs
HOST_GB_S = 25.0  # between a GPU and host memory: PCIe 4 with 16 lanes has 32; the rest is assumed to be lost
NODE_GB_S = 25.0  # of a GPU to other machines: 200 Gb/s
_ADAM_BYTES = 28  # that a step of AdamW moves for a number: weight and two moments read and written, gradient read


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What no config says and the estimate needs."""

    prompt_tokens: int = 32
    """Number of tokens of a prompt of OpenVLA, with its padding."""
    episode_steps: int | None = None
    """Number of environment steps of an episode; None takes max-steps, or the limit of the world's tasks."""
    step_ms: float = 25.0
    """Milliseconds of one environment step with its camera images, in a process that has a core of its own."""
    accepted: float = 1.0
    """Share of groups that the filter accepts; the others are collected and not learned from."""
    efficiency: float = 0.4
    """Share of the GPU's FLOPs that training and acting reach."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "episode_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected a number from 1, got {value}")
        if not self.step_ms >= 0:
            raise ConfigError(f"step_ms: expected 0 or more, got {self.step_ms}")
        for name in ("accepted", "efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}: expected a share above 0 and up to 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an iteration does, in numbers."""

    episodes: int  # collected
    decisions: int  # of all of them
    rows: int  # learned from: decisions of accepted episodes
    updates: int  # steps of the optimizer
    micro_rows: int  # rows of the largest micro batch of a rank
    micro_batches: int  # of a rank, in one pass over the batch
    accumulates: bool  # whether a step of the optimizer has several micro batches
    epochs: int
    evaluation_decisions: int  # of one evaluation


@dataclass(frozen=True, kw_only=True)
class Cost:
    """FLOPs of one row, and what a decision needs."""

    forward_flops: float
    backward_flops: float  # recomputed activations included
    act_flops: float  # of one decision
    act_passes: int
    act_rows: int
    block_steps: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How long a phase takes, and what it waits for."""

    seconds: float
    bound: str
    bytes_moved: int = 0  # by one GPU to others
    gpu_s: float = 0.0  # of collecting: how long the GPU is busy


@dataclass(frozen=True, kw_only=True)
class Durations:
    """An iteration and the whole run."""

    phases: dict[str, Phase]
    iteration_s: float  # the sum of its phases; with max_lag 1, at most that
    evaluation_s: float  # one evaluation
    run_s: float

    @property
    def bottleneck(self) -> str:
        name = max(self.phases, key=lambda one: self.phases[one].seconds)
        return f"{name}, which waits for {self.phases[name].bound}"


def work_of(
    config: OnPolicyConfig, *, ranks: int, block_steps: int, tokens: int, episode_steps: int, accepted: float
) -> Work:
    """Count what an iteration does, with the splits that the learner itself makes."""
    learned = config.plan.data_batch_size
    each = math.ceil(episode_steps / block_steps)
    rows, algorithm = learned * each, config.algorithm
    if algorithm.mini_batch_unit == "episodes":
        split = mini_batches(learned, algorithm.ppo_mini_batch_size, 1, shuffle=False, seed=0)
        sizes = [len(part) * each for part in split]
    else:
        sizes = [len(part) for part in mini_batches(rows, algorithm.ppo_mini_batch_size, 1, shuffle=False, seed=0)]
    largest = algorithm.ppo_micro_batch_size or max(1, (algorithm.max_tokens or 1) // tokens)
    shares = [math.ceil(size / ranks) for size in sizes]
    pieces = [len(micro_batches(np.arange(share), largest)) for share in shares]
    collected = round(learned / accepted)
    return Work(
        episodes=collected,
        decisions=collected * each,
        rows=rows,
        updates=len(sizes) * algorithm.ppo_epochs,
        micro_rows=min(largest, max(shares)),
        micro_batches=sum(pieces),
        accumulates=max(pieces) > 1,
        epochs=algorithm.ppo_epochs,
        evaluation_decisions=config.evaluation.episodes * each,
    )


def durations(
    config: OnPolicyConfig, size: NetworkSize, cost: Cost, work: Work, gpus: Gpus, assume: Assumptions
) -> Durations:
    """How long an iteration and the run take on these GPUs, one rank on each."""
    ranks, engine = gpus.num, config.engine
    clock = _Clock(gpus, assume.efficiency)
    fsdp = engine.parallel == "fsdp" and ranks > 1
    element = gathered_element(size, engine)
    away = (ranks - 1) / ranks
    gather = int(size.parameters * element * away) if fsdp else 0
    reduce = int(size.trained * 4 * away) if fsdp else 0
    read = size.parameters * element
    host = size.parameters * element / ranks if engine.offload_parameters else 0.0

    acting = _collect(config, cost, work.decisions / ranks, clock, read, ranks, assume)
    found = {"collection": acting}
    found["publication"] = Phase(seconds=gather / clock.link, bound="links", bytes_moved=gather)
    rows = work.rows / ranks / max(work.micro_batches, 1)  # of a micro batch, on average
    recomputes = config.algorithm.with_max_lag(config.max_lag).recomputes(engine.precision)
    evaluations = int(recomputes) + int(config.algorithm.kl_in != "none")
    once = clock.run_pass(rows * cost.forward_flops, read, gather, host)
    passes = evaluations * work.micro_batches
    found["log-probs"] = Phase(seconds=passes * once.seconds, bound=once.bound, bytes_moved=passes * once.bytes_moved)
    both = rows * (cost.forward_flops + cost.backward_flops)
    learn = clock.run_pass(both, 3 * read, 2 * gather + reduce, 2 * host)
    passes = work.epochs * work.micro_batches
    step_s, step_bytes = _step(config, size, ranks, clock)
    found["learning"] = Phase(
        seconds=passes * learn.seconds + work.updates * step_s,
        bound=learn.bound,
        bytes_moved=passes * learn.bytes_moved + work.updates * step_bytes,
    )
    evaluation = _collect(config, cost, work.evaluation_decisions / ranks, clock, read, ranks, assume).seconds
    evaluations = 1 + math.ceil(config.iterations / config.eval_every)
    iteration = sum(phase.seconds for phase in found.values())
    if config.max_lag:
        ahead = assume.accepted * acting.seconds
        others = iteration - acting.seconds
        iteration = acting.seconds - ahead + max(ahead, others + assume.accepted * acting.gpu_s)
    return Durations(
        phases=found,
        iteration_s=iteration,
        evaluation_s=evaluation,
        run_s=config.iterations * iteration + evaluations * evaluation,
    )


class _Clock:
    """The speeds of a GPU that work reaches, in numbers a second."""

    def __init__(self, gpus: Gpus, efficiency: float):
        self.flops = gpus.gpu.tflops * 1e12 * efficiency
        self.memory = gpus.gpu.bandwidth_gb_s * 1e9 * MEMORY_EFFICIENCY
        link = gpus.gpu.link_gb_s if gpus.num <= PER_NODE else min(gpus.gpu.link_gb_s, NODE_GB_S)
        self.link = link * 1e9 * LINK_EFFICIENCY
        self.host = HOST_GB_S * 1e9

    def run_pass(self, flops: float, read: float, moved: int, host: float = 0.0) -> Phase:
        times = {
            "FLOPs": flops / self.flops,
            "the GPU's memory": read / self.memory,
            "links": moved / self.link,
            "host memory": host / self.host,
        }
        bound = max(times, key=lambda name: times[name])
        return Phase(seconds=times[bound], bound=bound, bytes_moved=moved)


def _collect(
    config: OnPolicyConfig,
    cost: Cost,
    decisions: float,
    clock: _Clock,
    read: int,
    ranks: int,
    assume: Assumptions,
) -> Phase:
    """Decisions of one rank. Its worlds step on their own while the policy acts for others."""
    worlds = max(config.workers.num_parallel_envs // ranks, 1)
    one = clock.run_pass(cost.act_rows * cost.act_flops, cost.act_passes * read, 0)
    stepping = cost.block_steps * assume.step_ms / 1000
    acting = math.ceil(worlds / cost.act_rows) * one.seconds
    alone = stepping + one.seconds
    bound = one.bound if acting > alone or one.seconds > stepping else "worlds"
    turns = decisions / worlds
    return Phase(seconds=turns * max(alone, acting), bound=bound, gpu_s=turns * acting)


def _step(config: OnPolicyConfig, size: NetworkSize, ranks: int, clock: _Clock) -> tuple[float, int]:
    """Seconds of a step of the optimizer beside its passes, and bytes that it moves to other GPUs."""
    engine = config.engine
    mine = size.trained / (ranks if engine.parallel == "fsdp" else 1)
    if engine.offload_parameters:
        seconds = _ADAM_BYTES * mine / clock.host
    else:
        seconds = _ADAM_BYTES * mine / clock.memory
        seconds += 2 * 8 * mine / clock.host if engine.offload_optimizer else 0.0  # both moments, there and back
    moved = int(2 * size.trained * 4 * (ranks - 1) / ranks) if engine.parallel == "ddp" else 0
    return seconds + moved / clock.link, moved
