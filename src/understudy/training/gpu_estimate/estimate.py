"""Estimate: whether a run fits on its GPUs, how long it takes and what it costs, before it starts.

found = estimate(config, parse_gpus("8xA100-80GB"))
found.fits, found.peak, found.durations.iteration_s
changes_that_fit(found)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.module_blocks import find_blocks
from understudy.training.gpu_estimate.duration import (
    HOST_GB_S,
    LINK_EFFICIENCY,
    MEMORY_EFFICIENCY,
    NODE_GB_S,
    Assumptions,
    Cost,
    Durations,
    Work,
    durations,
    work_of,
)
from understudy.training.gpu_estimate.gpus import GIB, PER_NODE, Gpu, Gpus
from understudy.training.gpu_estimate.memory import (
    FRAGMENTED,
    NCCL_RESERVE,
    RESERVE,
    Memory,
    PassBytes,
    gathered_element,
    phases,
    reserve_bytes,
)
from understudy.training.gpu_estimate.network import Network, build_network
from understudy.training.gpu_estimate.network_size import NetworkSize
from understudy.training.gpu_estimate.traced_fsdp import Shards
from understudy.training.gpu_estimate.traced_pass import TracedPass, trace
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.runs.config import ConfigError

LONG_EPISODE = 1000  # steps, for a world whose limit is not known
Change: TypeAlias = tuple[str, OnPolicyConfig]  # options to set, and the config that then has all of them


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a config would need on these GPUs, one rank on each."""

    config: OnPolicyConfig
    gpus: Gpus
    assume: Assumptions
    published: str | None
    network: str
    episode_steps: int
    size: NetworkSize
    cost: Cost
    work: Work
    memory: dict[str, Memory]  # by phase
    durations: Durations
    traced: TracedPass = field(repr=False)

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.memory, key=lambda name: self.memory[name].total)

    @property
    def peak(self) -> int:
        """Bytes on each GPU, without the reserve."""
        return self.memory[self.phase].total

    @cached_property
    def reserve(self) -> int:
        return reserve_bytes(self.gpus.gpu.memory, ranks=self.gpus.num)

    @property
    def fits(self) -> bool:
        return self.peak + self.reserve <= self.gpus.gpu.memory

    @property
    def gpu_hours(self) -> float:
        return self.durations.run_s * self.gpus.num / 3600

    @property
    def assumptions(self) -> list[str]:
        """Everything that is assumed, a sentence each."""
        gpu, assume, config = self.gpus.gpu, self.assume, self.config
        worlds = max(config.workers.num_parallel_envs // self.gpus.num, 1)
        nccl = f", {NCCL_RESERVE / GIB:g} for NCCL" if self.gpus.num > 1 else ""
        found = [
            f"reserve: {RESERVE / GIB:g} GiB for CUDA{nccl}, {FRAGMENTED:.0%} of the memory for fragmentation",
            f"{gpu.name}: {gpu.tflops:g} TFLOPs in bfloat16, memory {gpu.bandwidth_gb_s:g} GB/s, link "
            f"{gpu.link_gb_s:g} GB/s each way ({gpu.source}); of these {assume.efficiency:.0%}, "
            f"{MEMORY_EFFICIENCY:.0%} and {LINK_EFFICIENCY:.0%} are reached",
            f"episodes have {self.episode_steps} steps of {assume.step_ms:g} ms, {worlds} at a time on each rank, each "
            f"in a process with a core of its own",
            f"{assume.accepted:.0%} of the groups are accepted",
            "attention takes the flash or the memory-efficient kernel; nothing waits for images or the host",
        ]
        if self.published is not None or config.openvla != type(config.openvla)():
            found.append(f"prompts have {assume.prompt_tokens} tokens with padding")
        if self.gpus.num > PER_NODE:
            found.append(f"machines have {PER_NODE} GPUs; {NODE_GB_S:g} GB/s for each GPU between machines")
        if config.engine.offload_optimizer or config.engine.offload_parameters:
            found.append(f"{HOST_GB_S:g} GB/s between a GPU and host memory")
        if config.engine.precision == "float32":
            found.append("float32 is counted at the speed of bfloat16; TF32 and float32 are slower")
        return found


def estimate(
    config: OnPolicyConfig, gpus: Gpus, assume: Assumptions | None = None, *, published: str | None = None
) -> Estimate:
    """Build the network without its weights, run a micro batch of it without numbers, and count."""
    assume = assume or Assumptions()
    traces = _Traces(published, assume.prompt_tokens, ranks=gpus.num, most_rows=1)
    return _estimate(config, gpus, assume, published, traces, exact=True)


def _estimate(
    config: OnPolicyConfig, gpus: Gpus, assume: Assumptions, published: str | None, traces: _Traces, *, exact: bool
) -> Estimate:
    if gpus.num > 1 and config.engine.parallel == "none":
        raise RanksError(f"parallel: 'none' is for 1 process, and there are {gpus.num} GPUs; use ddp or fsdp")
    network, size = traces.network(config)
    steps = episode_steps(config, assume)
    work = work_of(
        config,
        ranks=gpus.num,
        block_steps=network.block_steps,
        tokens=network.tokens,
        episode_steps=steps,
        accepted=assume.accepted,
    )
    reference = 0
    if config.algorithm.kl_in != "none" and not config.lora.rank:
        reference = size.parameters * (2 if config.openvla.dtype == "bfloat16" else 4)
    learning = traces.learning(config, work.micro_rows, accumulated=work.accumulates, exact=exact)
    acting = traces.acting(config)
    cost = Cost(
        forward_flops=learning.forward_flops / work.micro_rows,
        backward_flops=learning.backward_flops / work.micro_rows,
        act_flops=network.act_flops * acting.forward_flops / network.act_rows,
        act_passes=network.act_passes,
        act_rows=network.act_rows,
        block_steps=network.block_steps,
    )
    held = phases(
        size,
        config.engine,
        ranks=gpus.num,
        learning=_bytes(learning),
        acting=_bytes(acting),
        reference_bytes=reference,
        collects_ahead=config.max_lag > 0,
    )
    return Estimate(
        config=config,
        gpus=gpus,
        assume=assume,
        published=published,
        network=network.name,
        episode_steps=steps,
        size=size,
        cost=cost,
        work=work,
        memory=held,
        durations=durations(config, size, cost, work, gpus, assume),
        traced=learning,
    )


def memory_warning(config: OnPolicyConfig, *, ranks: int, gpu: str, memory: int) -> str | None:
    """What to say before a run starts on GPUs of this memory that it does not fit on; None if it fits."""
    machine = Gpus(num=ranks, gpu=Gpu(name=gpu, memory=memory, tflops=1, bandwidth_gb_s=1, link_gb_s=1, source=""))
    assume = Assumptions(episode_steps=config.max_steps or LONG_EPISODE)  # decides about time alone
    try:
        found = estimate(config, machine, assume)
    except Exception as error:  # noqa: BLE001  # an estimate must not keep a run from starting
        return f"the memory of this run was not estimated: {type(error).__name__}: {error}"
    if found.fits:
        return None
    need, there = (found.peak + found.reserve) / GIB, memory / GIB
    return (
        f"this run is estimated to need {need:.1f} GiB on each GPU while {found.phase}, and {gpu} has {there:.1f}; "
        f"`understudy plan RUN --gpus here` says what to change"
    )


def episode_steps(config: OnPolicyConfig, assume: Assumptions) -> int:
    """The number of steps of an episode: as given, as the config limits it, or as the world's tasks do."""
    if assume.episode_steps is not None:
        return assume.episode_steps
    if config.max_steps is not None:
        return config.max_steps
    name, _, rest = config.env.partition(":")
    if name == "libero":
        from understudy.envs.simulators.libero import MAX_STEPS as LIMITS

        suite = rest.partition("?")[0].partition("/")[0]
        if suite in LIMITS:
            return LIMITS[suite]
    if name == "toy":
        from understudy.envs.toy.tasks import MAX_STEPS

        return MAX_STEPS
    raise ConfigError(f"episode_steps: not known for {config.env!r}; give --assume.episode-steps")


class _Traces:
    """Networks and their traced passes, each made once: many configs differ in what does not change them."""

    def __init__(self, published: str | None, prompt_tokens: int, *, ranks: int, most_rows: int):
        self._published, self._prompt_tokens = published, prompt_tokens
        self._ranks, self._most_rows = ranks, most_rows
        self._networks: dict[object, tuple[Network, NetworkSize]] = {}
        self._passes: dict[object, TracedPass] = {}

    def network(self, config: OnPolicyConfig) -> tuple[Network, NetworkSize]:
        """The network in the dtype that it computes in, and its size as it is stored."""
        key = self._key(config)
        if key not in self._networks:
            network = build_network(config, published=self._published, prompt_tokens=self._prompt_tokens)
            size = network.size(self._ranks if config.engine.parallel == "fsdp" else 1)
            if config.engine.parallel == "fsdp" and config.engine.precision == "bfloat16":
                network.model.to(torch.bfloat16)  # FSDP gathers all weights in it, and needs no autocast
            self._networks[key] = network, size
        return self._networks[key]

    def learning(self, config: OnPolicyConfig, rows: int, *, accumulated: bool, exact: bool) -> TracedPass:
        """Of a micro batch; unless `exact`, along the line between passes of one and of the most rows.

        The peak is the highest of several moments, each a line in the number of rows, so it is no higher than that.
        """
        if exact or rows in (1, self._most_rows):
            return self._pass(config, rows, accumulated=accumulated, learning=True)
        ends = (self._pass(config, number, accumulated=accumulated, learning=True) for number in (1, self._most_rows))
        one, most = (asdict(end) for end in ends)
        share = (rows - 1) / (self._most_rows - 1)
        return TracedPass(**{name: round(value + share * (most[name] - value)) for name, value in one.items()})

    def acting(self, config: OnPolicyConfig) -> TracedPass:
        engine = replace(config.engine, gradient_checkpointing=False)  # it has no part in acting
        config = replace(config, engine=engine)
        return self._pass(config, self.network(config)[0].act_rows, accumulated=False, learning=False)

    def _pass(self, config: OnPolicyConfig, rows: int, *, accumulated: bool, learning: bool) -> TracedPass:
        fsdp, low = config.engine.parallel == "fsdp", config.engine.precision == "bfloat16"
        key = self._key(config), rows, accumulated and not fsdp, learning
        if key not in self._passes:
            network, _ = self.network(config)
            self._passes[key] = trace(
                network.model,
                lambda: network.forward(rows),
                autocast=network.autocast or (low and not fsdp),
                accumulated=accumulated and not fsdp,
                shards=self._shards(config) if fsdp and learning else None,
                learning=learning,
            )
        return self._passes[key]

    def _shards(self, config: OnPolicyConfig) -> Shards:
        network, size = self.network(config)
        return Shards(
            blocks=find_blocks(network.model, config.engine.blocks),
            ranks=self._ranks,
            element_bytes=gathered_element(size, config.engine),
        )

    @staticmethod
    def _key(config: OnPolicyConfig) -> object:
        engine = config.engine
        fsdp = engine.parallel == "fsdp"
        return config.lora, config.openvla, engine.precision, fsdp, engine.gradient_checkpointing, engine.blocks


def _bytes(traced: TracedPass) -> PassBytes:
    return PassBytes(activations=traced.activations, gradients=traced.gradients, copies=traced.copies)


# ---- what to change

_ROWS = "--algorithm.ppo-micro-batch-size"


def changes_that_fit(found: Estimate) -> list[Change]:
    """Changes after which it fits, each tried, the cheapest first; none if it fits, or if nothing helps.

    They are added one after the other until it fits; those that turn out not to be needed are left out again.
    """
    if found.fits:
        return []
    traces = _Traces(found.published, found.assume.prompt_tokens, ranks=found.gpus.num, most_rows=found.work.micro_rows)
    taken: list[tuple[str, Callable[[OnPolicyConfig], OnPolicyConfig]]] = []
    best = found
    for name, change in _changes(found):
        tried = _try(found, best.config, [change], traces)
        if tried is None or tried.peak >= best.peak:
            continue
        taken.append((name, change))
        best = tried
        if best.fits:
            break
    if not best.fits:
        return []
    for one in taken[:-1]:
        fewer = [other for other in taken if other is not one]
        tried = _try(found, found.config, [change for _, change in fewer], traces)
        if tried is not None and tried.fits:
            taken, best = fewer, tried
    config, steps = found.config, []
    rows = [name for name, _ in taken if name.startswith(_ROWS)]
    for name, change in taken:
        config = change(config)
        if name not in rows[:-1]:  # the last one counts
            steps.append((name, config))
    return steps


def _try(
    found: Estimate,
    config: OnPolicyConfig,
    changes: list[Callable[[OnPolicyConfig], OnPolicyConfig]],
    traces: _Traces,
) -> Estimate | None:
    try:
        for change in changes:
            config = change(config)
        return _estimate(config, found.gpus, found.assume, found.published, traces, exact=False)
    except (ConfigError, RanksError):  # options that exclude each other
        return None


def _changes(found: Estimate) -> Iterator[tuple[str, Callable[[OnPolicyConfig], OnPolicyConfig]]]:
    """What can be changed, from what costs least time to what costs most."""
    engine = found.config.engine
    openvla = found.published is not None or found.config.openvla.dtype != type(found.config.openvla)().dtype
    if engine.precision == "float32":
        yield "--engine.precision bfloat16", lambda config: _with_engine(config, precision="bfloat16")
    if openvla and found.config.openvla.dtype == "float32" and found.config.lora.rank:
        yield (
            "--openvla.dtype bfloat16",
            lambda config: replace(config, openvla=replace(config.openvla, dtype="bfloat16")),
        )
    if engine.parallel != "fsdp" and found.gpus.num > 1:
        yield "--engine.parallel fsdp", lambda config: _with_engine(config, parallel="fsdp")
    if not engine.gradient_checkpointing:
        yield "--engine.gradient-checkpointing", lambda config: _with_engine(config, gradient_checkpointing=True)
    rows = found.work.micro_rows
    while rows > 1:
        rows = rows // 2
        yield f"{_ROWS} {rows}", _with_rows(rows)
    if not engine.offload_optimizer:
        yield "--engine.offload-optimizer", lambda config: _with_engine(config, offload_optimizer=True)
    if not engine.offload_parameters:
        yield (
            "--engine.parallel fsdp --engine.offload-parameters",
            lambda config: _with_engine(config, parallel="fsdp", offload_parameters=True, offload_optimizer=False),
        )


def _with_engine(config: OnPolicyConfig, **options: object) -> OnPolicyConfig:
    return replace(config, engine=replace(config.engine, **options))  # type: ignore[arg-type]


def _with_rows(rows: int) -> Callable[[OnPolicyConfig], OnPolicyConfig]:
    def change(config: OnPolicyConfig) -> OnPolicyConfig:
        algorithm = replace(config.algorithm, ppo_micro_batch_size=rows, max_tokens=None)
        return replace(config, algorithm=algorithm)

    return change
