"""The first day of a new user, as one program: every command is run as it would be typed, in an empty directory.

    python -m tests.first_day                # with small numbers: minutes
    python -m tests.first_day --whole        # with the numbers of the docs
    python -m tests.first_day --wheel FILE --torch torch==2.13.0   # with both installed in a clean environment

It prints each part with its seconds and stops at the first command that fails. Commands print what they print to a
user, to a log file beside the data.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.request import urlopen

from tests.release import clean_environment, install_wheel

EXAMPLES = Path(__file__).parents[1] / "examples"
ENV = "toy:press_button?cameras=false&state=task"
FORMATS = ("lerobot:data/lerobot", "rlds:data/rlds/1.0.0", "robomimic:data/demos.hdf5", "hil_serl:data/hil_serl")
EXTRAS = "train,vla,remote,plot,web,formats,gym"
TIMEOUT_S = 1800.0


class DayError(Exception):
    """A command did not do what it should."""


@dataclass(kw_only=True)
class Day:
    """A directory, a Python, and how much is done with it. What is installed there is used, and no checkout."""

    directory: Path
    python: Path
    whole: bool
    installed: bool

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        variables = clean_environment() if self.installed else os.environ
        return {**variables, "PATH": path, "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}

    def number(self, whole: int, short: int) -> str:
        return str(whole if self.whole else short)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A command that goes on beside the others."""
        return subprocess.Popen(
            [*self._program(words[0]), *words[1:]],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command to its end; returns what it printed."""
        with (self.directory / "log.txt").open("a") as log:
            log.write(f"$ {' '.join(words)}\n")
            command = self.start(*words)
            try:
                text, _ = command.communicate(timeout=TIMEOUT_S)
            except BaseException:
                command.kill()
                raise
            log.write(text)
        if command.returncode != code:
            raise DayError(f"{' '.join(words)}: expected exit code {code}, got {command.returncode}:\n{text}")
        return text

    def _program(self, name: str) -> list[str]:
        if name == "understudy":
            return [str(self.python), "-m", "understudy"]
        return [str(self.python)] if name == "python" else [name]


# ---- the parts


def look_around(day: Day) -> None:
    day.run("understudy", "--help")
    assert "torch" in day.run("understudy", "doctor")


def try_the_demo(day: Day) -> None:
    small = () if day.whole else ("--steps", "200", "--episodes", "4")
    text = day.run("understudy", "demo", "try", "--page", "none", *small)
    assert re.search(r"\d+ %", text), text


def record_and_look(day: Day) -> None:
    day.run("understudy", "record", "pictures", "--env", "toy:pick_red", "--successes", "2")
    day.run("understudy", "film", "pictures", "1")
    assert list(day.directory.glob("**/*.mp4")) or list(day.directory.glob("**/*.gif"))
    day.run("understudy", "info", "pictures", "--episodes")
    day.run("understudy", "verify", "pictures")
    with serving(day, "understudy", "watch", "pictures", "--port", "0") as page, urlopen(page) as answer:
        assert b"<html" in answer.read()


def train_stop_and_resume(day: Day) -> None:
    steps = day.number(3000, 150)
    day.run("understudy", "record", "runs/press/store", "--env", ENV, "--successes", "5")
    options = ("--intervention.source", "script", "--evaluation.episodes", day.number(50, 2))
    training = day.start("understudy", "train", "rlpd", "runs/press", "--steps", steps, *options)
    metrics = day.directory / "runs" / "press" / "metrics.jsonl"
    wait_for(lambda: training.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0))
    training.send_signal(signal.SIGINT)
    text, _ = training.communicate(timeout=TIMEOUT_S)
    if training.returncode != 0:  # else it was faster than the signal
        assert training.returncode == 128 + signal.SIGINT, text
        assert "understudy resume runs/press" in " ".join(text.split()), text
    day.run("understudy", "resume", "runs/press")
    day.run("understudy", "evaluate", "runs/press", "--episodes", day.number(100, 2))
    day.run("understudy", "report", "runs/press")
    assert (day.directory / "runs" / "press" / "report" / "report.html").stat().st_size > 50_000
    day.run(
        "understudy", "train", "clone", "runs/clone", "--demos", "runs/press/store", "--updates", day.number(2000, 20)
    )


def take_data_in_and_out(day: Day) -> None:
    for dataset in FORMATS:
        day.run("understudy", "export", "pictures", dataset)
        day.run("understudy", "import", dataset, f"back-{dataset.partition(':')[0]}")
    for dataset in FORMATS:
        again = day.run("understudy", "import", dataset, f"back-{dataset.partition(':')[0]}")
        assert "were in the store already" in again, again


def bring_your_own(day: Day) -> None:
    run_example(day, "own_env", "demos=2, updates=5, steps=10, episodes=1")
    run_example(day, "own_policy", "demos=1, updates=5, episodes=1")
    run_example(day, "own_learner", "demos=1, epochs=1, batches=4, workers=1")


def serve_an_actor_and_a_learner(day: Day) -> None:
    day.run("understudy", "record", "runs/arm/store", "--env", ENV, "--successes", "5")
    (day.directory / "token").write_text("a token of at least 16 letters")
    steps = ("--steps", day.number(1000, 60), "--evaluation.episodes", "2", "--intervention.source", "script")
    day.run("understudy", "init", "rlpd", "runs/arm", *steps)
    token = ("--token-file", "token")
    serve = ("understudy", "serve", "runs/arm/store", "--port", "0", *token)
    with serving(day, *serve) as address:
        refused = day.run("understudy", "actor", "runs/arm", address, code=1)
        assert "token" in refused, refused
        learner = day.start("understudy", "learner", "runs/arm", address, *token)
        try:
            day.run("understudy", "actor", "runs/arm", address, "--spool", "spool", *token)
            text, _ = learner.communicate(timeout=TIMEOUT_S)
            assert learner.returncode == 0, text
        finally:
            learner.kill()
    day.run("understudy", "verify", "runs/arm/store")


def fine_tune_a_vla(day: Day) -> None:
    run_example(day, "vla_grpo", "demos=1, updates=2, iterations=1, groups=1, group_size=2, episodes=1")


Part: TypeAlias = Callable[[Day], None]
PARTS: tuple[Part, ...] = (
    look_around,
    try_the_demo,
    record_and_look,
    train_stop_and_resume,
    take_data_in_and_out,
    bring_your_own,
    serve_an_actor_and_a_learner,
    fine_tune_a_vla,
)


# ---- what they share


def run_example(day: Day, name: str, small: str) -> None:
    """A copy of a script of examples/, as it stands or with small numbers."""
    text = (EXAMPLES / f"{name}.py").read_text()
    if not day.whole:
        text = text.replace("    main()\n", f"    main({small})\n")
    (day.directory / f"{name}.py").write_text(text)
    day.run("python", f"{name}.py")


@contextmanager
def serving(day: Day, *words: str) -> Iterator[str]:
    """The address that a command prints when it serves something; it is stopped with Ctrl-C at the end."""
    server = day.start(*words)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            found = re.search(r"(http://\S+|(?<= at )\S+:\d+)", line)
            if found:
                yield found.group()
                break
        else:
            raise DayError(f"{' '.join(words)}: printed no address")
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=TIMEOUT_S)
    finally:
        server.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise DayError("nothing happened for half an hour")
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="Use the numbers of the docs instead of small ones.")
    parser.add_argument("--wheel", type=Path, help="Install this wheel in a clean environment and use only that.")
    parser.add_argument(
        "--torch", default="torch", help="What pip installs as torch beside the wheel, with its options."
    )
    parser.add_argument(
        "--only", help="Run only the part of this name; some need what those before them made.", default=""
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-day-") as name:
        python = Path(sys.executable)
        if asked.wheel is not None:
            wheel, here = asked.wheel.resolve(), Path(name, "venv")
            python = install_wheel(sys.executable, wheel, here, torch=asked.torch, extras=EXTRAS)
        day = Day(directory=Path(name), python=python, whole=asked.whole, installed=asked.wheel is not None)
        for part in PARTS:
            if asked.only in ("", part.__name__):
                begin = time.monotonic()
                part(day)
                print(f"{time.monotonic() - begin:7.1f} s  {part.__name__.replace('_', ' ')}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
