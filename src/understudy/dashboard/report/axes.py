"""Axes, colours and sizes that all figures of a report share. Needs the extra `plot`."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

SIZE = (4.6, 2.9)  # inches: one column of a paper, with room to scale
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#009e73", "#cc3311", "#8a8a8a"  # safe for colour-blind readers


def new_axes(size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    return figure, figure.subplots()


def legend_above(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, handletextpad=0.5, markerscale=2)


def label_last(axes: Axes, at: float, percent: float) -> None:
    """Writes the last success rate beside its point, right of every line."""
    axes.annotate(
        f"{percent:.0f} %",
        (at, percent),
        (7, 0),
        textcoords="offset points",
        va="center",
        color=BLUE,
        fontsize=8,
        fontweight="bold",
    )


def steps_axis(axes: Axes, last: int) -> None:
    axes.set_xlim(0, max(last, 1) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


def thousands(value: float, _: object) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
