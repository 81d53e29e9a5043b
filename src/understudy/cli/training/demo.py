"""`understudy demo`: from nothing to a policy that does more than copy, in minutes, on a laptop's CPU.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the demo's stages (training/demo.py) | nothing | - |
| a process, `understudy watch` | the run's files | requests | sockets; it ends with this process |
| page, a thread | what that process prints | its first line | that line, or its end |
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from understudy.cli.console import needs_extra
from understudy.cli.operator import split_address
from understudy.cli.training.progress import run_line

with needs_extra("train"):
    import PIL  # noqa: F401  # for the films: better to know now than at the end

    from understudy.training import demo as demos

if TYPE_CHECKING:
    from understudy.training.runs.score import Score

DIRECTORY = Path("understudy-demo")
PAGE = "127.0.0.1:7449"
NICE = 10  # of the page's process: training goes first
PICTURE = 32  # columns of each picture in the terminal
BAR = 30  # columns of a score of 100 %
LEVELS = "▁▂▃▄▅▆▇█"


def command(
    directory: Annotated[Path, tyro.conf.Positional] = DIRECTORY,
    *,
    seed: int | None = None,
    steps: int | None = None,
    episodes: int | None = None,
    page: str = PAGE,
) -> int:
    """Teach a gripper a task in a few minutes: demonstrations, cloning them, then practice with a human who withdraws.

    Needs no account, no network, no GPU and no graphics driver. Stop it at any moment with Ctrl-C: the same command
    goes on, to the same result.

    Args:
        directory: Where everything goes: a run like any other.
        seed: Of all chance; by default 0, or that of the demo that is there.
        steps: Environment steps of practice; by default as many as it takes, or those of the demo that is there.
        episodes: Held-out starts of each score; by default 100, or as many as the demo that is there has.
        page: Address (host:port) of the page to watch it on while it runs, on this machine only; or none.
    """
    console = Console(highlight=False)
    address = None if page == "none" else split_address(page)
    try:
        demo = demos.Demo(directory, seed=seed, steps=steps, episodes=episodes)
        if demo.result is not None:
            console.print(f"[bold]{directory}[/]: the demo is done, and this came of it", soft_wrap=True)
        else:
            with Page(console, directory, address):
                _work(console, demo)
        _show(console, demo)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            Text(f"stopped; nothing is lost, and `{_words('demo', directory)}` goes on", style="yellow"), soft_wrap=True
        )
        return 130
    return 0


# ---- the stages


def _work(console: Console, demo: demos.Demo) -> None:
    verb = "teaches" if demo.is_new else "goes on and teaches"
    console.print(f"[bold]understudy demo[/] {verb} a gripper: {demos.ABOUT}\n", soft_wrap=True)
    _record(console, demo)
    _clone(console, demo)
    _practise(console, demo)
    with console.status("films"):
        demo.film_correction()
        demo.film_both()
        demo.conclude()


def _record(console: Console, demo: demos.Demo) -> None:
    columns = (TextColumn("demonstrations"), BarColumn(20), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("", total=demos.DEMONSTRATIONS)
        demo.record(lambda number: bar.update(line, completed=number))
        film, pictures = demo.film_demonstration()
    _stage(console, 1, f"{demos.DEMONSTRATIONS} demonstrations", f"by a script, all in one corner of the table: {film}")
    if console.color_system in ("truecolor", "256") and demo.is_new:
        console.print(in_terminal([pictures[0], pictures[-1]]))


def _clone(console: Console, demo: demos.Demo) -> None:
    with console.status("cloning") as status:
        score = demo.clone(lambda text: status.update(f"cloning: {text}"))
    _stage(
        console,
        2,
        "copying them",
        f"succeeds in {_percent(score.rate)} of {score.num_episodes} starts all over the table",
    )


def _practise(console: Console, demo: demos.Demo) -> None:
    _stage(console, 3, "practice", "a scripted human takes over when it stalls; Ctrl-C stops it, and nothing is lost")
    with run_line(console) as line:

        def told(restored: list[str]) -> None:
            if restored:
                console.print(f"  {restored[0]}", style="dim", soft_wrap=True)

        # Its evaluation is the last thing it does, and is shown below beside the other.
        demo.practise(lambda moment: line(replace(moment, evaluation=None)), told)


def _stage(console: Console, number: int, what: str, more: str) -> None:
    console.print(f"[bold cyan]{number}[/] [bold]{what}[/]  {more}", soft_wrap=True)


class Page:
    """`understudy watch` in a process of its own, which ends with this one; says where it is, or why it is not."""

    CODE = (
        "import ctypes, signal, sys; die = getattr(ctypes.CDLL(None), 'prctl', None); "  # Linux: die with the parent
        "die and die(1, signal.SIGTERM); from understudy.cli import main; sys.exit(main())"
    )

    def __init__(self, console: Console, directory: Path, address: tuple[str, int] | None):
        self._console = console
        self._process: subprocess.Popen[str] | None = None
        self._over = False
        if address is None:
            return
        words = ["watch", str(directory), "--host", address[0], "--port", str(address[1])]
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
            if line.startswith("the page: "):
                self._console.print(f"  {line.strip()}", style="bold", soft_wrap=True)
                return
        if not self._over:
            why = process.stderr.read().strip().removeprefix("error: ")
            self._console.print(Text(f"  no page: {why}", style="yellow"), soft_wrap=True)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._over = True
            self._process.terminate()
            self._process.wait()
            self._thread.join()
            with self._process:
                pass  # closes its pipes


# ---- what came of it


def _show(console: Console, demo: demos.Demo) -> None:
    result, path = demo.result, demo.run.path
    assert result is not None
    table = Table.grid(padding=(0, 2))
    for name, score, colour in (("copying", result.cloned, "yellow"), ("practice", result.learned, "green")):
        low, high = score.interval
        interval = f"[dim]95 %: {100 * low:.0f} to {100 * high:.0f}[/]"
        table.add_row(f"  {name}", _bar(score, colour), f"[bold {colour}]{_percent(score.rate)}[/]", interval)
    console.print(
        f"\n[bold]success alone, on {result.learned.num_episodes} starts that neither has seen[/], from the same "
        f"{demos.DEMONSTRATIONS} demonstrations",
        table,
        f"  the human acted in {_percent(result.human[0])} of steps at first, in {_percent(result.human[-1])} at last "
        f"[cyan]{_sparks(result.human)}[/]; {result.num_steps:,} steps, {result.num_updates:,} updates",
        "\n[bold]films[/]",
        sep="\n",
        soft_wrap=True,
    )
    films = {
        demos.DEMONSTRATION: "a demonstration",
        demos.CORRECTION: "the human takes over (orange)",
        demos.BOTH: "left the copy, right the one that practised, on the same start",
    }
    listed = Table.grid(padding=(0, 2))
    for name, about in films.items():
        if (path / name).exists():
            listed.add_row(Text(f"  {path / name}", no_wrap=True), f"[dim]{about}[/]")
    console.print(listed)
    console.print("\n[bold]next[/]")
    for words, why in _next(path):
        console.print(f"  [cyan]{words}[/]\n      [dim]{why}[/]", soft_wrap=True)


def _next(path: Path) -> list[tuple[str, str]]:
    """Three commands to copy, and what each does."""
    return [
        (_words("watch", path), "look at all of it on a page: curves, every episode, who acted"),
        (_words("evaluate", path, "--videos", "3"), "judge it again, with films of its worst episodes"),
        (
            _words("record", "my-demos", "--env", demos.ENV, "--human", "browser", "--successes", "3"),
            "demonstrate it yourself, with the keys, on a page",
        ),
    ]


def _words(*words: object) -> str:
    return shlex.join(["understudy", *map(str, words)])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _bar(score: Score, colour: str) -> Text:
    full = round(score.rate * BAR)
    return Text.assemble(("━" * full, colour), ("━" * (BAR - full), "bright_black"))


def _sparks(shares: tuple[float, ...]) -> str:
    """A column for each share, the greatest the highest."""
    most = max(1e-9, *shares)
    return "".join(LEVELS[round(share / most * (len(LEVELS) - 1))] for share in shares)


def in_terminal(pictures: list[Any]) -> Group:
    """Pictures [H, W, 3] side by side as text: a letter is two pixels, the upper its colour, the lower its ground."""
    small = [_shrunk(picture, PICTURE) for picture in pictures]
    lines = []
    for row in range(0, PICTURE - 1, 2):
        line = Text("  ")
        for picture in small:
            for upper, lower in zip(picture[row], picture[row + 1], strict=True):
                line.append("▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
            line.append("  ")
        lines.append(line)
    return Group(*lines)


def _shrunk(picture: Any, columns: int) -> Any:
    """The means of squares of pixels."""
    side = len(picture) // columns
    used = picture[: side * columns, : side * columns]
    return used.reshape(columns, side, columns, side, 3).mean(axis=(1, 3)).astype(int).tolist()
