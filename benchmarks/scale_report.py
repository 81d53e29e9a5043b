"""Tables and pictures of the study of scale, and what its figures say of a cluster (scale_model.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale_machine import Used, verdict
from benchmarks.scale_model import (
    LIMIT,
    RESOURCES,
    Costs,
    Load,
    Node,
    costs_of,
    first_full,
    here,
    most_envs,
    shares,
)
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

INK = "#7d8590"  # a grey that is read on white and on black
COLOURS = {"CPU": "#3d8bfd", "disk": "#e8710a", "network": "#2da44e", "shard": "#bf5af2", "memory": "#c9a227"}
ROLES = {"servers": "#3d8bfd", "writers": "#e8710a"}
NODES = 16
BATCHES_PER_GPU_S = 2.0
ENVS = (64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000)

Figures = Mapping[str, Any]


def report(figures: Figures, out: Path, console: Console) -> None:
    """Print what was measured and what follows; draw both below `out`."""
    console.print(measured_table(figures))
    console.print(limits_table(figures))
    try:
        costs = model_costs(figures)
    except ValueError as error:
        console.print(str(error), style="yellow")
        return
    console.print(costs)
    for line in checked(figures):
        console.print(line)
    console.print(cluster_table(costs))
    images = out / "images"
    images.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update(
        {
            "font.size": 11,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    for name, figure in (("measured", draw_measured(figures)), ("cluster", draw_cluster(costs))):
        figure.savefig(images / f"scale_{name}.svg", transparent=True)
        plt.close(figure)


def model_costs(figures: Figures) -> Costs:
    """Those of a moderate number of environments, where each still has much of a processor's caches to itself."""
    counts = [point["envs"] for point in figures["points"]]
    return costs_of(figures, 64 if 64 in counts else max(counts))


# ---- tables


def measured_table(figures: Figures) -> Table:
    table = _table(
        "Latency, p50 / p99 ms",
        "environments",
        "each, Hz",
        "steps/s",
        "commit",
        "sample 256, meanwhile",
        "sample 256, alone",
        "commit at full speed",
        "steps",
        "wrong",
    )
    for point in figures["points"]:
        table.add_row(
            f"{point['envs']:,}",
            f"{point['paced_hz']:g}",
            f"{point['paced']['rows_s']:,.0f}",
            *(_quantiles(point[name]) for name in ("paced_commits_ms", "paced_batches_ms", "alone_batches_ms")),
            _quantiles(point["full_commits_ms"]),
            f"{point['steps']:,}",
            str(len(point["problems"])),
        )
    return table


def limits_table(figures: Figures) -> Table:
    table = _table(
        "Full speed",
        "environments",
        "steps/s (rounds)",
        "MB/s",
        "servers",
        "writers",
        "not ours",
        "CPU s/GB",
        "disk MB/s",
        "of bare",
        "busiest thread",
        "limit",
    )
    for point in figures["points"]:
        full, rounds = point["full"], sorted(point["full_rows_s_of_rounds"])
        cores, gb_s = full["cores"], full["chunk_mb_s"] / 1e3
        found = verdict(Used(**full), figures["study"]["cores"], point["bare_disk_mb_s"])
        table.add_row(
            f"{point['envs']:,}",
            f"{full['rows_s']:,.0f} ({rounds[0]:,.0f} to {rounds[-1]:,.0f})",
            f"{1e3 * gb_s:.0f}",
            f"{cores['servers']:.2f}",
            f"{cores['writers']:.2f}",
            f"{full['other_cores']:.2f}",
            f"{cores['servers'] / gb_s:.1f} + {cores['writers'] / gb_s:.1f}" if gb_s else "-",
            f"{full['disk_mb_s']:.0f}",
            f"{found.shares['disk']:.2f}",
            f"{max(full['busiest_server_thread'], full['busiest_writer_thread']):.2f}",
            found.limit,
        )
    return table


def checked(figures: Figures) -> list[str]:
    """The model beside what was measured on this machine, with the costs of one number of environments."""
    costs = model_costs(figures)
    lines = []
    for point in figures["points"]:
        expected = here(figures, point["envs"], point["full"]["other_cores"], costs)
        found = point["full"]["rows_s"]
        lines.append(f"{point['envs']} environments: {found:,.0f} steps/s, the model says {expected:,.0f} at most")
    return lines


def cluster_table(costs: Costs, node: Node = Node()) -> Table:  # noqa: B008
    table = _table(
        f"{NODES} nodes of {node.cores:g} cores, {node.gpus} GPUs, {node.disk_gb_s:g} GB/s of disk, "
        f"{node.nic_gb_s:g} GB/s of network, {node.shards} shard each",
        "load",
        "environments",
        "steps/s",
        "GB/s in",
        "GB/s out",
        *RESOURCES,
        "first",
        f"at {LIMIT:.0%}",
    )
    for name, load in loads(node).items():
        for envs in (512, 1000, 4000):
            asked = replace(load, envs=envs)
            found = shares(asked, NODES, node, costs)
            most, which = most_envs(load, NODES, node, costs)
            table.add_row(
                name,
                f"{envs:,}",
                f"{asked.steps_s:,.0f}",
                f"{asked.ingest_gb_s:.2f}",
                f"{asked.draw_gb_s:.1f}",
                *(f"{found[one]:.0%}" for one in RESOURCES),
                first_full(asked, NODES, node, costs)[0],
                f"{most:,.0f} ({which})",
            )
    return table


def loads(node: Node) -> dict[str, Load]:
    """Environments in the cluster, with a learner on each GPU; and robots and simulators that are elsewhere."""
    batches_s = BATCHES_PER_GPU_S * node.gpus * NODES
    return {
        "simulators inside": Load(envs=0, batches_s=batches_s),
        "environments elsewhere": Load(envs=0, batches_s=batches_s, inside=False),
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index + 1 == len(columns) else "right")
    return table


def _quantiles(found: Mapping[str, float]) -> str:
    return f"{found['p50']:,.0f} / {found['p99']:,.0f}"


# ---- pictures


def draw_measured(figures: Figures) -> Figure:
    points = figures["points"]
    envs = [point["envs"] for point in points]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    _logarithmic(left, envs, "made durable at full speed, steps/s", "environments")
    left.set_yscale("linear")
    for point in points:
        for value in point["full_rows_s_of_rounds"]:
            left.plot(point["envs"], value, "o", color=INK, markersize=3, alpha=0.6)
    left.plot(envs, [point["full"]["rows_s"] for point in points], color=ROLES["servers"], linewidth=2, marker="o")
    left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter("{x:,.0f}")
    _logarithmic(middle, envs, "latency when paced, ms", "environments")
    for name, label, colour in (
        ("paced_commits_ms", "append to durable", ROLES["servers"]),
        ("paced_batches_ms", f"a batch of {figures['study']['batch_size']}", ROLES["writers"]),
    ):
        middle.plot(envs, [point[name]["p50"] for point in points], color=colour, linewidth=2, marker="o", label=label)
        middle.plot(envs, [point[name]["p99"] for point in points], color=colour, linewidth=1.2, linestyle="--")
    middle.yaxis.set_major_formatter("{x:g}")
    middle.legend(frameon=False, loc="upper left", fontsize=9, title="line p50, dashes p99", title_fontsize=9)
    right.set_title("cores in use at full speed", loc="left", fontsize=12)
    bottom = [0.0] * len(points)
    for role, colour in {**ROLES, "not ours": INK}.items():
        values = [
            point["full"]["other_cores"] if role == "not ours" else point["full"]["cores"][role] for point in points
        ]
        right.bar(range(len(points)), values, bottom=bottom, color=colour, label=role, width=0.65)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    right.axhline(figures["study"]["cores"], color=INK, linewidth=1, linestyle="--")
    right.set_xticks(range(len(points)), [f"{count:,}" for count in envs])
    right.set_xlabel("environments")
    right.set_ylim(top=1.45 * figures["study"]["cores"])
    right.legend(frameon=False, loc="upper left", ncols=2, fontsize=9)
    return figure


def draw_cluster(costs: Costs, node: Node = Node()) -> Figure:  # noqa: B008
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for axes, (name, load) in zip(panels, loads(node).items(), strict=True):
        _logarithmic(axes, ENVS, f"{NODES} nodes, {name}: share in use", "environments at 10 Hz")
        for resource in RESOURCES:
            values = [shares(replace(load, envs=envs), NODES, node, costs)[resource] for envs in ENVS]
            if max(values) > 0:
                axes.plot(ENVS, values, color=COLOURS[resource], linewidth=2, label=resource)
        axes.axhline(LIMIT, color=INK, linewidth=1, linestyle="--")
        most, which = most_envs(load, NODES, node, costs)
        axes.plot(most, LIMIT, "o", color=COLOURS[which])
        axes.annotate(f"{most:,.0f}: {which}", (most, LIMIT), xytext=(-8, 8), textcoords="offset points", ha="right")
        axes.set_ylim(0.002, 3)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}" if value < 0.01 else f"{value:.0%}")
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def _logarithmic(axes: Axes, envs: Sequence[int], title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(list(envs), [f"{count:,}" for count in envs], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel(below)
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
