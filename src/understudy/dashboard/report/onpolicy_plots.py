"""Report groups: the figures of runs that go on in iterations: success of practice and alone, groups, tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from understudy.dashboard.api.rollout_groups import reasons
from understudy.dashboard.report.axes import BLUE, GREEN, GREY, ORANGE, RED, SIZE, legend_above, new_axes, steps_axis
from understudy.dashboard.report.run_data import Line, RunData
from understudy.dashboard.report.scores import how

MAX_TASKS = 60  # in a figure
COLOURS = {  # of reasons why a group was dropped
    "too easy": "#c8b560",
    "too hard": ORANGE,
    "failed workers": RED,
    "truncated": "#b07aa1",
    "out of bounds": "#76588a",
    "too old": "#b9b9b9",
}


def learning(data: RunData) -> tuple[Figure, str] | None:
    """Evaluations with their bands, over the success of practice."""
    lines = data.evaluations
    if not lines:
        return None
    at = np.array([line["iteration"] for line in lines])
    rate, low, high = (100 * np.array([line[name] for line in lines]) for name in ("success", "low", "high"))
    figure, axes = new_axes()
    lived = [_share(line) for line in data.collections]
    if lived:
        axes.plot(np.arange(1, len(lived) + 1), lived, color=GREY, linewidth=1, label="practice, all that was lived")
    if len(lines) == 1:  # one point has no band
        axes.errorbar(
            at, rate, yerr=[rate - low, high - rate], fmt="o", color=BLUE, markersize=4, capsize=3, label="policy alone"
        )
    else:
        axes.fill_between(at, low, high, color=BLUE, alpha=0.18, linewidth=0)
        axes.plot(at, rate, color=BLUE, marker="o", markersize=3.5, label="policy alone")
    axes.annotate(
        f"{rate[-1]:.0f} %",
        (at[-1], rate[-1]),
        (0, 7 if rate[-1] < 88 else -14),
        textcoords="offset points",
        ha="right" if at[-1] else "left",
        color=BLUE,
        fontsize=8,
        fontweight="bold",
    )
    axes.set(xlabel="iterations", ylabel="success (%)", ylim=(-3, 103))
    legend_above(axes)
    steps_axis(axes, max(int(at[-1]), len(lived)))
    newest = lines[-1]
    return figure, (
        f"Each point is {newest['episodes']:,} episodes, {how(newest)} ({newest['meaning']}). The band is Wilson's "
        f"95 % interval of that evaluation; it says nothing of other seeds. Practice is on training starts."
    )


def kept_and_dropped(data: RunData) -> tuple[Figure, str] | None:
    """Groups of each iteration by what became of them."""
    lines = data.collections
    if not lines:
        return None
    at = np.arange(1, len(lines) + 1)
    names = list(dict.fromkeys(name for line in lines for name in reasons(line)))
    parts = [("kept", GREEN, [line["kept"] for line in lines])]
    parts += [(name, COLOURS.get(name, GREY), [reasons(line).get(name, 0) for line in lines]) for name in names]
    figure, axes = new_axes()
    below = np.zeros(len(at))
    for name, colour, values in parts:
        axes.bar(at, values, bottom=below, width=0.9, color=colour, label=name, linewidth=0)
        below += np.array(values)
    wanted = lines[-1]["num_wanted"]
    axes.axhline(wanted, color="#333333", linewidth=0.8, linestyle=(0, (4, 2)))
    axes.set(xlabel="iterations", ylabel="groups", ylim=(0, max(float(below.max()), wanted) * 1.08))
    legend_above(axes)
    steps_axis(axes, len(lines) + 1)
    size = data.config["plan"]["n_samples"]
    return figure, (
        f"Groups of {size} episode{'s' if size != 1 else ''}: learned from (kept), or dropped and why. The broken line "
        f"is how many an iteration wants."
    )


def by_task(data: RunData) -> tuple[Figure, str] | None:
    """Each task at the last evaluation, and at the first."""
    newest = data.evaluations[-1] if data.evaluations else data.later
    tasks = {} if newest is None else newest.get("tasks", {})
    if newest is None or len(tasks) < 2:
        return None
    names = list(tasks)[:MAX_TASKS]
    figure, axes = new_axes((2 * SIZE[0], 0.9 + 0.26 * len(names)))
    shown = [("last evaluation", BLUE, tasks, 0.0)]
    if len(data.evaluations) > 1:
        shown.insert(0, ("first evaluation", GREY, data.evaluations[0].get("tasks", {}), -0.22))
    for label, colour, found, shift in shown:
        there = [(place, found[name]) for place, name in enumerate(names) if name in found]
        rate, low, high = (100 * np.array([line[key] for _, line in there]) for key in ("success", "low", "high"))
        axes.errorbar(
            rate,
            [place + shift for place, _ in there],
            xerr=[rate - low, high - rate],
            fmt="o",
            color=colour,
            markersize=4,
            capsize=2,
            linewidth=1,
            label=label,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="success (%)", xlim=(-2, 102), ylim=(len(names) - 0.5, -0.5))
    legend_above(axes)
    left = f" {len(tasks) - len(names)} other tasks are in the table." if len(tasks) > len(names) else ""
    return figure, f"With Wilson's 95 % intervals; {how(newest)}.{left}"


def lengths(data: RunData) -> tuple[Figure, str] | None:
    """Steps of episodes, iteration by iteration."""
    if not data.episodes:
        return None
    found: dict[int, list[Any]] = {}
    for lived in data.episodes:  # all of an iteration are told of at its end
        found.setdefault(lived.step, []).append(lived)
    at = np.arange(1, len(found) + 1)
    figure, axes = new_axes()
    for success, colour, label in ((True, GREEN, "success"), (False, RED, "failure")):
        some = [[lived.length for lived in lives if lived.success is success] for lives in found.values()]
        middle = [float(np.median(lengths)) if lengths else np.nan for lengths in some]
        axes.plot(at, middle, color=colour, marker="o", markersize=2.5, linewidth=1.2, label=label)
    most = max(lived.length for lived in data.episodes)
    axes.set(xlabel="iterations", ylabel="steps in the episode", ylim=(0, most * 1.06))
    legend_above(axes)
    steps_axis(axes, len(at))
    return figure, "Medians over the episodes of practice of an iteration, by how they ended."


def _share(line: Line) -> float:
    """Per cent of all episodes of an iteration that succeeded."""
    lived, won = (sum(task[name] for task in line["tasks"].values()) for name in ("episodes", "successes"))
    return 100 * won / lived if lived else float("nan")
