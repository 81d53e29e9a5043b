"""The stages of `understudy demo`, in the terminal and on a page. Needs torch.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the demo's stages (training/demo.py) | nothing | - |
| a process, `understudy watch` | the run's files | requests | sockets; it ends with this process |
| `page`, a thread | the output of that process | its first line | that line, or the end of the process |
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from understudy.cli.operator import split_address
from understudy.cli.progress import ProgressLine
from understudy.cli.training.progress_text import rlpd_progress
from understudy.processes.stop import Interrupted, StopRequest, stop_on_signals
from understudy.training import demo as demos

if TYPE_CHECKING:
    from understudy.training.runs.wilson_interval import SuccessRate

NICE = 10  # of the page's process: training has priority
IMAGE_COLUMNS = 32  # of each image in the terminal
BAR = 30  # columns of a success rate of 100 %
LEVELS = "▁▂▃▄▅▆▇█"

Image: TypeAlias = np.ndarray[Any, Any]  # [H, W, 3] uint8


def run_demo(directory: Path, *, seed: int | None, steps: int | None, episodes: int | None, page: str | None) -> int:
    """Run or continue the demo and print its result; returns the exit code."""
    console = Console(highlight=False)
    if page not in (None, "none"):
        split_address(page)  # a wrong one is refused before anything is made
    try:
        demo = demos.Demo(directory, seed=seed, steps=steps, episodes=episodes)
        if demo.result is not None:
            console.print(f"[bold]{directory}[/]: the demo has finished; this is its result", soft_wrap=True)
        else:
            with stop_on_signals() as stop, Page(console, directory, page):
                _work(console, demo, stop)
        _show(console, demo)
    except Interrupted as error:
        Console(stderr=True).print(
            Text(f"stopped; nothing is lost, and `{_words('demo', directory)}` continues", style="yellow"),
            soft_wrap=True,
        )
        return error.exit_code
    return 0


# ---- the stages


def _work(console: Console, demo: demos.Demo, stop: StopRequest) -> None:
    verb = "trains" if demo.is_new else "continues to train"
    console.print(f"[bold]understudy demo[/] {verb} a gripper: {demos.ABOUT}\n", soft_wrap=True)
    _record(console, demo, stop)
    _clone(console, demo, stop)
    _train_rlpd(console, demo, stop)
    with ProgressLine(console, "videos"):
        stop.check()
        demo.video_of_correction()
        demo.video_of_both()
        demo.conclude()


def _record(console: Console, demo: demos.Demo, stop: StopRequest) -> None:
    with ProgressLine(console, "record", "demonstrations") as line:
        demo.record(lambda number: line(number, demos.DEMONSTRATIONS), stop)
        video, images = demo.video_of_demonstration()
    _stage(
        console, 1, f"{demos.DEMONSTRATIONS} demonstrations", f"by a script, all in one corner of the table: {video}"
    )
    if console.color_system in ("truecolor", "256") and demo.is_new:
        console.print(in_terminal([images[0], images[-1]]))


def _clone(console: Console, demo: demos.Demo, stop: StopRequest) -> None:
    with ProgressLine(console, "cloning") as line:
        score = demo.clone(line.say, stop)
    _stage(
        console,
        2,
        "behaviour cloning",
        f"{_percent(score.rate)} success on {score.num_episodes} starts all over the table",
    )


def _train_rlpd(console: Console, demo: demos.Demo, stop: StopRequest) -> None:
    _stage(console, 3, "RLPD", "a scripted human takes over when the policy stalls; Ctrl-C stops it without loss")
    with rlpd_progress(console) as progress:

        def show_restored(restored: list[str]) -> None:
            if restored:
                console.print(f"  {restored[0]}", style="dim", soft_wrap=True)

        # The evaluation at the end is shown below, next to that of behaviour cloning.
        demo.train(lambda now: progress(replace(now, evaluation=None)), show_restored, stop)


def _stage(console: Console, number: int, what: str, more: str) -> None:
    console.print(f"[bold cyan]{number}[/] [bold]{what}[/]  {more}", soft_wrap=True)


class Page:
    """`understudy watch` in a subprocess that ends with this process; prints its address, or why there is none."""

    CODE = (
        "import ctypes, signal, sys; die = getattr(ctypes.CDLL(None), 'prctl', None); "  # Linux: die with the parent
        "die and die(1, signal.SIGTERM); from understudy.cli import main; sys.exit(main())"
    )

    def __init__(self, console: Console, directory: Path, page: str | None):
        self._console = console
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        if page == "none":
            return
        words = ["watch", str(directory)]
        if page is not None:
            host, port = split_address(page)
            words += ["--host", host, "--port", str(port)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "500"},
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
        self._thread = threading.Thread(target=self._listen, args=(self._process,), name="page", daemon=True)
        self._thread.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith(("the page: ", "port ")):
                self._console.print(Text(f"  {line.strip()}", style="bold"), soft_wrap=True)
            if line.startswith("the page: "):
                return
        if not self._closed:
            why = process.stderr.read().strip().removeprefix("error: ")
            self._console.print(Text(f"  no page: {why}", style="yellow"), soft_wrap=True)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._closed = True
            self._process.terminate()
            self._process.wait()
            self._thread.join()
            with self._process:
                pass  # closes its pipes


# ---- the result


def _show(console: Console, demo: demos.Demo) -> None:
    result, path = demo.result, demo.run.path
    assert result is not None
    first, last = _percent(result.intervention_rates[0]), _percent(result.intervention_rates[-1])
    table = Table.grid(padding=(0, 2))
    doubt = _doubt(result, path, demo.config.seed)
    learned_colour = "red" if doubt else "green"
    for name, score, colour in (("cloning", result.cloned, "yellow"), ("RLPD", result.learned, learned_colour)):
        low, high = score.interval
        interval = f"[dim]95 %: {100 * low:.0f} to {100 * high:.0f}[/]"
        table.add_row(f"  {name}", _bar(score, colour), f"[bold {colour}]{_percent(score.rate)}[/]", interval)
    console.print(
        f"\n[bold]success rate on {result.learned.num_episodes} held-out starts[/], from the same "
        f"{demos.DEMONSTRATIONS} demonstrations",
        table,
        f"  the intervention rate went from {first} to {last} of the steps "
        f"[cyan]{_sparks(result.intervention_rates)}[/]; {result.num_steps:,} steps, {result.num_updates:,} updates",
        sep="\n",
        soft_wrap=True,
    )
    if doubt:
        console.print(Text(f"\n{doubt}", style="red"), soft_wrap=True)
    console.print("\n[bold]videos[/]")
    videos = {
        demos.DEMONSTRATION: "a demonstration",
        demos.CORRECTION: "the human takes over (orange)",
        demos.BOTH: "behaviour cloning (left) and RLPD (right) from the same start",
    }
    listed = Table.grid(padding=(0, 2))
    for name, about in videos.items():
        if (path / name).exists():
            listed.add_row(Text(f"  {path / name}", no_wrap=True), f"[dim]{about}[/]")
    console.print(listed)
    console.print("\n[bold]next[/]")
    for words, why in _next(path):
        console.print(f"  [cyan]{words}[/]\n      [dim]{why}[/]", soft_wrap=True)


def _doubt(result: demos.DemoResult, path: Path, seed: int) -> str | None:
    """That RLPD is no better than cloning, or not surely, and what to do; None if it is."""
    rates = f"{_percent(result.learned.rate)} after {_percent(result.cloned.rate)} by cloning"
    if result.learned.rate <= result.cloned.rate:
        worse = "is worse than" if result.learned.rate < result.cloned.rate else "is no better than"
        what = f"RLPD did not learn: its policy {worse} the cloned one ({rates})."
    elif result.learned.interval[0] <= result.cloned.interval[1]:
        what = f"RLPD may not have learned: the 95 % intervals of the two policies overlap ({rates})."
    else:
        return None
    other = path.with_name(f"{path.name}-2")
    if result.num_steps < demos.STEPS:
        return f"{what} It had {result.num_steps:,} steps and needs about {demos.STEPS:,}: `{_words('demo', other)}`"
    if result.learned.num_episodes < demos.EPISODES:
        more = _words("evaluate", path, "--episodes", demos.EPISODES)
        return f"{what} {result.learned.num_episodes} episodes say little: `{more}`"
    again = _words("demo", other, "--seed", seed + 1)
    return (
        f"{what} One run in many goes wrong; try another: `{again}`. If that fails as well, something differs from "
        f"where this was tested: please report both, with what `understudy doctor --json` prints."
    )


def _next(path: Path) -> list[tuple[str, str]]:
    """Three commands to try next, and what each does."""
    return [
        (_words("watch", path), "show curves and every episode on a web page"),
        (_words("evaluate", path, "--videos", "3"), "evaluate it again, with videos of its worst episodes"),
        (
            _words("record", "my-demos", "--env", demos.ENV, "--human", "browser", "--successes", "3"),
            "record demonstrations yourself with the keyboard",
        ),
    ]


def _words(*words: object) -> str:
    return shlex.join(["understudy", *map(str, words)])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _bar(score: SuccessRate, colour: str) -> Text:
    full = round(score.rate * BAR)
    return Text.assemble(("━" * full, colour), ("━" * (BAR - full), "bright_black"))


def _sparks(shares: tuple[float, ...]) -> str:
    """One character for each share; the largest is the highest."""
    most = max(1e-9, *shares)
    return "".join(LEVELS[round(share / most * (len(LEVELS) - 1))] for share in shares)


def in_terminal(images: list[Image]) -> Group:
    """Images side by side as text: a character is two pixels, the upper its colour, the lower its background."""
    small = [_shrunk(image, IMAGE_COLUMNS) for image in images]
    lines = []
    for row in range(0, IMAGE_COLUMNS - 1, 2):
        line = Text("  ")
        for image in small:
            for upper, lower in zip(image[row], image[row + 1], strict=True):
                line.append("▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
            line.append("  ")
        lines.append(line)
    return Group(*lines)


def _shrunk(image: Image, columns: int) -> Image:
    """The mean of each square of pixels."""
    side = len(image) // columns
    used = image[: side * columns, : side * columns]
    means: Image = used.reshape(columns, side, columns, side, 3).mean(axis=(1, 3)).astype(int)
    return means
