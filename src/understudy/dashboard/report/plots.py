"""The figures of a report, in the size and style of a paper. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from understudy.dashboard.report import onpolicy_plots as groups
from understudy.dashboard.report.axes import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    label_last,
    legend_above,
    new_axes,
    steps_axis,
    thousands,
)
from understudy.dashboard.report.run_data import PracticeEpisode, RunData

RECENT = 20  # episodes in a moving average
SMOOTH, MANY = 15, 60  # a running median over SMOOTH metrics lines, if there are at least MANY
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "understudy",
    "pdf.fonttype": 42,
    "figure.constrained_layout.use": True,
}
# The metrics to draw, of all algorithms; two on one axis share a unit.
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("policy loss", ("policy_loss",)),
    ("KL from the rollout policy", ("approx_kl",)),
    ("clipped share", ("clip_low", "clip_high")),
    ("KL from the reference", ("kl",)),
    ("value loss", ("value_loss",)),
    ("value and return", ("value", "return")),
    ("explained variance", ("explained_variance",)),
    ("critic loss", ("critic_loss",)),
    ("value", ("q", "q_target")),
    ("actor loss", ("actor_loss",)),
    ("entropy", ("entropy",)),
    ("temperature", ("temperature",)),
    ("TD error", ("td_error",)),
    ("loss", ("loss",)),
    ("log likelihood", ("log_likelihood",)),
    ("error of the predicted action", ("error",)),
    ("gradient norm", ("gradient",)),
)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure that was written, and its caption."""

    name: str
    title: str
    caption: str
    svg: Path
    width: float  # inches


def draw_all(data: RunData, out: Path) -> list[Plot]:
    """Write each figure that there is data for as SVG, PDF and PNG to `out`."""
    makers: list[tuple[str, str, Callable[[RunData], tuple[Figure, str] | None]]] = [
        ("learning", "Success rate in evaluations", groups.learning if data.on_policy else _learning),
        ("groups", "Kept and dropped groups", groups.kept_and_dropped),
        ("intervention", "Intervention rate", _intervention),
        ("lengths", "Episode length", groups.lengths if data.on_policy else _lengths),
        ("by_task", "Success rate by task, in evaluations", groups.by_task),
        ("age", "Policy lag of samples", _age),
        ("losses", "Metrics of the updates", _losses),
    ]
    found = []
    with mpl.rc_context(STYLE):
        for name, title, make in makers:
            made = make(data)
            if made is None:
                continue
            figure, caption = made
            for ending in ("svg", "pdf", "png"):
                date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[ending]
                figure.savefig(out / f"{name}.{ending}", dpi=300, metadata=date)
            found.append(
                Plot(name=name, title=title, caption=caption, svg=out / f"{name}.svg", width=figure.get_figwidth())
            )
    return found


def _learning(data: RunData) -> tuple[Figure, str] | None:
    lines = data.evaluations
    if not lines or data.imitates:  # evaluated once: the headline says it
        return None
    at = np.array([line["step"] for line in lines])
    rate, low, high = (100 * np.array([line[name] for line in lines]) for name in ("success", "low", "high"))
    figure, axes = new_axes()
    if len(lines) == 1:  # one point has no band
        axes.errorbar(at, rate, yerr=[rate - low, high - rate], fmt="o", color=BLUE, markersize=4, capsize=3)
    else:
        axes.fill_between(at, low, high, color=BLUE, alpha=0.18, linewidth=0)
        axes.plot(at, rate, color=BLUE, marker="o", markersize=3.5)
    label_last(axes, at[-1], rate[-1])
    axes.set(xlabel="environment steps of practice", ylabel="success (%)", ylim=(-3, 103))
    steps_axis(axes, int(at[-1]))
    numbers = {int(line["episodes"]) for line in lines}
    many = f"{min(numbers):,}" if len(numbers) == 1 else f"{min(numbers):,} to {max(numbers):,}"
    return figure, (
        f"Each point is {many} episodes from held-out starts, without action noise and without interventions. "
        f"The band is Wilson's 95 % interval of that evaluation; it does not cover other seeds."
    )


def _intervention(data: RunData) -> tuple[Figure, str] | None:
    episodes = data.episodes
    if not any(episode.human_steps for episode in episodes):
        return None
    steps = [episode.human_steps for episode in episodes]
    at, share = _moving_percent(episodes, steps, [episode.length for episode in episodes])
    helped = [float(num_steps > 0) for num_steps in steps]
    _, some = _moving_percent(episodes, helped, [1.0] * len(episodes))
    figure, axes = new_axes()
    axes.fill_between(at, 0, share, color=ORANGE, alpha=0.18, linewidth=0)
    axes.plot(at, share, color=ORANGE, label="share of steps")
    axes.plot(at, some, color=GREY, linewidth=1, linestyle=(0, (4, 2)), label="share of episodes with an intervention")
    axes.set(xlabel="environment steps of practice", ylabel="intervention rate (%)", ylim=(0, max(20, *some) * 1.05))
    legend_above(axes)
    steps_axis(axes, int(at[-1]))
    return figure, f"Moving average over the last {RECENT} episodes of practice."


def _lengths(data: RunData) -> tuple[Figure, str] | None:
    episodes = data.episodes
    if not episodes:
        return None
    at = np.array([episode.step for episode in episodes])
    length = np.array([episode.length for episode in episodes])
    success = np.array([episode.success for episode in episodes])
    figure, axes = new_axes()
    size = 14 if len(at) < 150 else 6
    helped = np.array([episode.human_steps > 0 for episode in episodes])
    alone = success & ~helped
    for which, colour, label in (
        (alone, GREEN, "success alone"),
        (success & helped, ORANGE, "success, intervention"),
        (~success, RED, "failure"),
    ):
        if which.any():
            axes.scatter(at[which], length[which], s=size, color=colour, alpha=0.55, linewidth=0, label=label)
    middle = [float(np.median(length[max(0, i + 1 - RECENT) : i + 1])) for i in range(len(at))]
    axes.plot(at, middle, color="#333333", linewidth=1.2, label=f"median of {RECENT}")
    axes.set(xlabel="environment steps of practice", ylabel="steps in the episode", ylim=(0, length.max() * 1.06))
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, handletextpad=0.2, columnspacing=0.8, markerscale=2
    )
    steps_axis(axes, int(at[-1]))
    return figure, f"Every episode of practice, by outcome. Intervention: {data.helper} took over in it."


def _age(data: RunData) -> tuple[Figure, str] | None:
    lines = [line for line in data.trains if "lag_mean" in line]
    if not lines:
        return None
    at, mean, most = (np.array([line[name] for line in lines], float) for name in ("update", "lag_mean", "lag_max"))
    figure, axes = new_axes()
    axes.plot(at, most, color=GREY, linewidth=1, linestyle=(0, (4, 2)), label="oldest")
    axes.plot(at, mean, color=BLUE, label="mean")
    axes.set(xlabel="updates", ylabel="policy versions behind")
    axes.set_ylim(0, max(float(most.max()), 1) * 1.06)
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.legend(loc="upper left")
    steps_axis(axes, int(at[-1]))
    return figure, (
        f"Policy lag of the sampled steps whose action a policy chose. Each stored step was sampled "
        f"{lines[-1]['reuse']:.0f} times so far; {100 * lines[-1]['demo_share']:.0f} % of the last samples were "
        f"demonstrations or human steps."
    )


def _losses(data: RunData) -> tuple[Figure, str] | None:
    known = {name for line in data.trains for name in line}
    known -= {"loss"} if "policy_loss" in known else set()  # nearly the same
    panels = [(title, [name for name in names if name in known]) for title, names in PANELS]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return None
    num_columns = min(len(panels), 3)
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(2.35 * num_columns, 1.75 * num_rows))
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, (title, names) in zip(grid.flat, panels, strict=False):
        for name, colour in zip(names, (BLUE, ORANGE), strict=False):
            lines = [line for line in data.trains if line.get(name) is not None]
            at, values = (np.array([line[key] for line in lines], float) for key in ("update", name))
            if len(at) >= MANY:
                axes.plot(at, values, color=colour, alpha=0.25, linewidth=0.7)
                values = _smooth(values)
            axes.plot(at, values, color=colour, label=name.replace("_", " "))
        axes.set_title(title, fontsize=8.5, loc="left", pad=3)
        steps_axis(axes, data.update)
        if len(names) > 1:
            axes.legend(handlelength=1)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("updates", fontsize=9)
    strong = f" Strong: median of the last {SMOOTH}." if len(data.trains) >= MANY else ""
    when = "over the updates of each iteration" if data.on_policy else "at the last update of each round"
    return figure, f"{'Pale: as' if strong else 'As'} reported, {when}.{strong}"


# ---- parts


def _moving_percent(
    episodes: Sequence[PracticeEpisode], parts: Sequence[float], wholes: Sequence[float]
) -> tuple[np.ndarray[Any, Any], list[float]]:
    """The end of each episode in steps, and 100 * parts / wholes over the RECENT episodes up to it."""
    part, whole = np.cumsum([0, *parts]), np.cumsum([0, *wholes])
    ends = np.arange(1, len(episodes) + 1)
    begins = np.maximum(ends - RECENT, 0)
    share = 100 * (part[ends] - part[begins]) / (whole[ends] - whole[begins])
    return np.array([episode.step for episode in episodes]), share.tolist()


def _smooth(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([np.median(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))])
