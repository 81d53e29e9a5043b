"""`understudy plan`: whether an on-policy run fits on GPUs, how long it takes and what it costs, before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from understudy.cli.console import needs_extra
from understudy.core import UnderstudyError

with needs_extra("train"):
    from understudy.training.gpu_estimate.duration import Assumptions
    from understudy.training.gpu_estimate.gpus import GIB, GpuSpeed, parse_gpus
    from understudy.training.onpolicy.config import ESTIMATORS, OnPolicyConfig

if TYPE_CHECKING:
    from understudy.training.gpu_estimate.estimate import Change, Estimate

DEFAULT_ASSUMPTIONS, DEFAULT_SPEED = Assumptions(), GpuSpeed()


def command(
    source: Annotated[str, tyro.conf.Positional],
    *,
    gpus: str,
    network: str | None = None,
    assume: Assumptions = DEFAULT_ASSUMPTIONS,
    speed: GpuSpeed = DEFAULT_SPEED,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Estimate memory, time and cost of a run of GRPO, RLOO, REINFORCE++ or PPO on GPUs, which need not be here.

    The network is built without weights, and one micro batch of it is run without numbers. The exit code is 1 if
    the run does not fit; then it says what to change, having tried it.

    Args:
        source: Directory of a run, YAML file with its options, name of a recipe, or the Python file of one.
        gpus: Number and kind of GPUs, one rank on each: 8xA100-80GB, or 8x48GB for a kind that is not in the table, or
            `here` for those of this machine.
        network: Shape of a published network, if the policy itself is not on this machine: openvla-7b, which
            OpenVLA-OFT has too.
        assume: What no config says.
        speed: Speed of a kind of GPU that is not in the table; what is given also replaces what the table says.
        as_json: Print JSON instead of tables.
    """
    config = read_source(source)
    machine = parse_gpus(gpus, speed)
    with needs_extra("vla"):
        from understudy.training.gpu_estimate.estimate import changes_that_fit, estimate

        found = estimate(config, machine, assume, published=network)
        changes = changes_that_fit(found)
    if as_json:
        print(json.dumps(to_json(found, changes), indent=1))
    else:
        _show(found, changes)
    return 0 if found.fits else 1


def read_source(source: str) -> OnPolicyConfig:
    """The config of a run, a YAML file or a recipe."""
    from understudy.cli.training.config_file import read_config
    from understudy.recipes import load_recipe
    from understudy.training.onpolicy.config import default_config
    from understudy.training.runs.run import Run

    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        config: Any = read_config(path, default_config("grpo", policy=""))
    elif Run.is_at(path):
        run = Run(path)
        _check_kind(source, run.kind)
        config = run.config(OnPolicyConfig)
    elif path.is_dir():
        raise UnderstudyError(f"{source}: expected a run, got a directory without config.json; see `understudy init`")
    else:
        recipe = load_recipe(source)
        _check_kind(source, recipe.kind)
        config = recipe.config
    assert isinstance(config, OnPolicyConfig)
    return config


def _check_kind(source: str, kind: str) -> None:
    if kind not in ESTIMATORS:
        raise UnderstudyError(f"{source}: plan knows runs of {', '.join(ESTIMATORS)}, got one of {kind}")


def to_json(found: Estimate, changes: list[Change]) -> dict[str, Any]:
    """Plain numbers: bytes and seconds."""
    times = found.durations
    return {
        "gpus": str(found.gpus),
        "network": found.network,
        "parameters": found.size.parameters,
        "trained": found.size.trained,
        "fits": found.fits,
        "peak_bytes": found.peak,
        "reserve_bytes": found.reserve,
        "gpu_bytes": found.gpus.gpu.memory,
        "memory": {name: memory.by_category() for name, memory in found.memory.items()},
        "episodes": found.work.episodes,
        "rows": found.work.rows,
        "optimizer_steps": found.work.updates,
        "micro_batch_rows": found.work.micro_rows,
        "iteration_s": times.iteration_s,
        "phases": {
            name: {"seconds": phase.seconds, "bound": phase.bound, "bytes_moved": phase.bytes_moved}
            for name, phase in times.phases.items()
        },
        "bottleneck": times.bottleneck,
        "evaluation_s": times.evaluation_s,
        "run_s": times.run_s,
        "gpu_hours": found.gpu_hours,
        "assumptions": found.assumptions,
        "changes": [name for name, _ in changes],
    }


def _show(found: Estimate, changes: list[Change]) -> None:
    console = Console(highlight=False)

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, soft_wrap=True, markup=False)

    size, engine, times = found.size, found.config.engine, found.durations
    say(
        f"{found.network}: {size.parameters / 1e6:,.1f} million parameters, {size.trained / 1e6:,.1f} million trained; "
        f"{found.gpus}, {engine.parallel}, {engine.precision}"
    )
    _show_memory(console, found)
    need, there = (found.peak + found.reserve) / GIB, found.gpus.gpu.memory / GIB
    if found.fits:
        say(f"it fits: {need:.1f} of {there:.1f} GiB on each GPU, with the reserve", "green")
    else:
        say(f"it does not fit: {need:.1f} of {there:.1f} GiB on each GPU, with the reserve", "bold red")
        if changes:
            say(f"it would fit with {' '.join(name for name, _ in changes)}", "cyan")
        else:
            say("nothing that was tried makes it fit: take more or larger GPUs, or --lora.rank 32", "cyan")
    _show_time(console, found)
    hours = times.run_s / 3600
    say(
        f"bottleneck: {times.bottleneck}; the run of {found.config.iterations} iterations takes {hours:,.1f} hours "
        f"with its evaluations of {times.evaluation_s / 60:,.1f} minutes on all ranks, "
        f"{found.gpu_hours:,.0f} GPU hours"
    )
    say("assumed:")
    for sentence in found.assumptions:
        say(f"- {sentence}", "dim")


def _show_memory(console: Console, found: Estimate) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("GiB on each GPU")
    for name in found.memory:
        table.add_column(f"{name}*" if name == found.phase else name, justify="right")
    for category in next(iter(found.memory.values())).by_category():
        cells = [getattr(memory, category) / GIB for memory in found.memory.values()]
        if any(cells):
            table.add_row(category, *(f"{cell:.2f}" for cell in cells))
    table.add_row("all", *(f"{memory.total / GIB:.2f}" for memory in found.memory.values()), style="bold")
    table.add_row("reserve", *(f"{found.reserve / GIB:.2f}" for _ in found.memory))
    console.print(table)


def _show_time(console: Console, found: Estimate) -> None:
    work, times = found.work, found.durations
    console.print(
        f"an iteration: {work.episodes} episodes, {work.rows} rows, {work.updates} steps of the optimizer, micro "
        f"batches of {work.micro_rows} rows",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("phase", "seconds", "share", "waits for", "GB to other GPUs"):
        table.add_column(name, justify="left" if name in ("phase", "waits for") else "right")
    whole = times.iteration_s
    for name, phase in times.phases.items():
        share = phase.seconds / whole if whole else 0.0
        table.add_row(name, f"{phase.seconds:.1f}", f"{share:.0%}", phase.bound, f"{phase.bytes_moved / 1e9:.1f}")
    overlapped = whole < sum(phase.seconds for phase in times.phases.values())
    note = "collection goes on during the other phases" if overlapped else ""
    table.add_row("iteration", f"{whole:.1f}", "", note, "", style="bold")
    console.print(table)
