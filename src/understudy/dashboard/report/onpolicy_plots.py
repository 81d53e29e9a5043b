"""Figures of on-policy runs: success in evaluations and rollouts, kept and dropped groups, success by task."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from understudy.dashboard.api.rollout_groups import drop_reasons
from understudy.dashboard.report.axes import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SIZE,
    label_last,
    legend_above,
    new_axes,
    steps_axis,
)
from understudy.dashboard.report.run_data import Line, PracticeEpisode, RunData
from understudy.dashboard.report.scores import sampling_text

MAX_TASKS = 60  # in a figure
COLOURS = {  # by the reason why a group was dropped
    "too easy": "#c8b560",
    "too hard": ORANGE,
    "failed workers": RED,
    "truncated": "#b07aa1",
    "out of bounds": "#76588a",
    "too old": "#b9b9b9",
}


def learning(data: RunData) -> tuple[Figure, str] | None:
    """Success of evaluations with their intervals, and of rollouts."""
    lines = data.evaluations
    if not lines:
        return None
    at = np.array([line["iteration"] for line in lines])
    rate, low, high = (100 * np.array([line[name] for line in lines]) for name in ("success", "low", "high"))
    figure, axes = new_axes()
    rollouts = [_success_percent(line) for line in data.collections]
    if rollouts:
        axes.plot(np.arange(1, len(rollouts) + 1), rollouts, color=GREY, linewidth=1, label="rollouts")
    if len(lines) == 1:  # one point has no band
        axes.errorbar(
            at, rate, yerr=[rate - low, high - rate], fmt="o", color=BLUE, markersize=4, capsize=3, label="evaluation"
        )
    else:
        axes.fill_between(at, low, high, color=BLUE, alpha=0.18, linewidth=0)
        axes.plot(at, rate, color=BLUE, marker="o", markersize=3.5, label="evaluation")
    label_last(axes, at[-1], rate[-1])
    axes.set(xlabel="iterations", ylabel="success (%)", ylim=(-3, 103))
    legend_above(axes)
    steps_axis(axes, max(int(at[-1]), len(rollouts)))
    newest = lines[-1]
    return figure, (
        f"Each point is {newest['episodes']:,} episodes, {sampling_text(newest)} ({newest['meaning']}). The band is "
        f"Wilson's 95 % interval of that evaluation; it does not cover other seeds. Rollouts begin at training starts."
    )


def kept_and_dropped(data: RunData) -> tuple[Figure, str] | None:
    """Kept and dropped groups of each iteration."""
    lines = data.collections
    if not lines:
        return None
    at = np.arange(1, len(lines) + 1)
    names = list(dict.fromkeys(name for line in lines for name in drop_reasons(line)))
    parts = [("kept", GREEN, [line["kept"] for line in lines])]
    parts += [(name, COLOURS.get(name, GREY), [drop_reasons(line).get(name, 0) for line in lines]) for name in names]
    figure, axes = new_axes()
    below = np.zeros(len(at))
    for name, colour, values in parts:
        axes.bar(at, values, bottom=below, width=0.9, color=colour, label=name, linewidth=0)
        below += np.array(values)
    wanted = lines[-1]["num_requested"]
    axes.axhline(wanted, color="#333333", linewidth=0.8, linestyle=(0, (4, 2)))
    axes.set(xlabel="iterations", ylabel="groups", ylim=(0, max(float(below.max()), wanted) * 1.08))
    legend_above(axes)
    steps_axis(axes, len(lines) + 1)
    size = data.config["plan"]["n_samples"]
    return figure, (
        f"Groups of {size} episode{'s' if size != 1 else ''}: kept for the update, or dropped, by reason. The broken "
        f"line is the number of groups that an iteration needs."
    )


def by_task(data: RunData) -> tuple[Figure, str] | None:
    """Success by task at the last evaluation and at the first."""
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
        shown_rows = [(row, found[name]) for row, name in enumerate(names) if name in found]
        rate, low, high = (100 * np.array([line[key] for _, line in shown_rows]) for key in ("success", "low", "high"))
        axes.errorbar(
            rate,
            [row + shift for row, _ in shown_rows],
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
    return figure, f"With Wilson's 95 % intervals; {sampling_text(newest)}.{left}"


def lengths(data: RunData) -> tuple[Figure, str] | None:
    """Median episode length by iteration."""
    if not data.episodes:
        return None
    found: dict[int, list[PracticeEpisode]] = {}
    for episode in data.episodes:  # all episodes of an iteration are logged at its end, with the same step
        found.setdefault(episode.step, []).append(episode)
    at = np.arange(1, len(found) + 1)
    figure, axes = new_axes()
    for success, colour, label in ((True, GREEN, "success"), (False, RED, "failure")):
        some = [[one.length for one in episodes if one.success is success] for episodes in found.values()]
        middle = [float(np.median(lengths)) if lengths else np.nan for lengths in some]
        axes.plot(at, middle, color=colour, marker="o", markersize=2.5, linewidth=1.2, label=label)
    most = max(episode.length for episode in data.episodes)
    axes.set(xlabel="iterations", ylabel="steps in the episode", ylim=(0, most * 1.06))
    legend_above(axes)
    steps_axis(axes, len(at))
    return figure, "Median length of the episodes of an iteration, by outcome."


def _success_percent(line: Line) -> float:
    """The success rate of all episodes of an iteration, in per cent."""
    episodes, successes = (sum(task[name] for task in line["tasks"].values()) for name in ("episodes", "successes"))
    return 100 * successes / episodes if episodes else float("nan")
