"""The progress line of long commands: in terminals of 60 and 80 columns, and one line each 30 s in a file."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from io import StringIO

import pytest
from rich.console import Console

from understudy.cli import progress as module
from understudy.cli.progress import ProgressLine, log_line, terminal_line

STATUS = ("success 40 %", "interventions 27 %", "123 updates/s", "evaluation: 96 % of 100 (95 %: 90 to 98)")


def line(width: int, *, done: int = 437, total: int | None = 10_000, left_s: float | None = 15_050) -> str:
    return terminal_line("train", "steps", done, total, left_s, STATUS, width=width, elapsed_s=3_723)


@pytest.mark.parametrize("width", range(60, 200))
def test_a_line_fits_its_terminal_and_cuts_no_number(width: int) -> None:
    text = line(width)
    assert len(text) < width
    assert "train: 437/10,000 steps, 1:02:03, left 4:10:50" in text
    assert "…" not in text


def test_a_wider_terminal_shows_more() -> None:
    assert line(60) == "━─────────── train: 437/10,000 steps, 1:02:03, left 4:10:50"
    assert line(80).endswith("left 4:10:50; success 40 %")
    assert line(180).endswith("(95 %: 90 to 98)")
    assert line(180).startswith("━─────")


def test_what_is_not_known_is_not_made_up() -> None:
    assert "left -; success" in line(80, left_s=None)
    assert "left" not in line(80, total=None)
    assert terminal_line("videos", "", 0, None, None, (), width=80, elapsed_s=4) == "videos: at work, 0:00:04"


def test_no_time_is_left_for_what_follows_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    out = StringIO()
    with ProgressLine(Console(file=out), "imitate", "updates", threaded=False) as progress:
        for done in (0, 5, 10):
            time.sleep(0.02)
            progress(done, 10, "imitating")
        time.sleep(0.02)
        progress.say("evaluating: 3 of 256 episodes")
    *_, during, last, evaluating = out.getvalue().splitlines()
    assert " left; imitating" in during
    assert "left" not in last
    assert evaluating.endswith("so far; evaluating: 3 of 256 episodes")
    assert "left" not in line(80, done=10_000, left_s=None)


def test_a_line_of_a_file_has_everything_in_words() -> None:
    assert log_line("train", "steps", 437, 10_000, 15_050, STATUS[:2], elapsed_s=3_723) == (
        "train: 437 of 10,000 steps (4 %), 1:02:03 so far, about 4:10:50 left; success 40 %; interventions 27 %"
    )
    assert log_line("libero", "", 0, None, None, ("numpy, " * 99,), elapsed_s=31).endswith("numpy, nu…")
    assert log_line("import x", "episodes", 12, None, None, (), elapsed_s=31) == (
        "import x: 12 episodes, 0:00:31 so far"
    )


def test_a_file_gets_a_line_each_time_even_while_a_step_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)

    class File(StringIO):
        def flush(self) -> None:
            if self.getvalue().count("a long one") >= 2:
                enough.set()

    enough, file = threading.Event(), File()
    with ProgressLine(Console(file=file), "verify", "segments") as progress:
        progress(1, 4)
        progress(2, 4, "a long one")
        assert enough.wait(60)
    assert re.fullmatch(
        r"verify: 2 of 4 segments \(50 %\), 0:00:0\d so far, about 0:00:0\d left; a long one",
        file.getvalue().splitlines()[-1],
    )


def test_without_a_thread_a_file_gets_lines_only_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    file = StringIO()
    before = threading.active_count()
    with ProgressLine(Console(file=file), "bench store", "turns", threaded=False) as progress:
        assert threading.active_count() <= before  # one of an earlier test may end meanwhile
        progress.advance(2)
        progress.say("cold")
        progress.advance(2)
    assert [text.partition(",")[0] for text in file.getvalue().splitlines()] == [
        "bench store: 1 of 2 turns (50 %)",
        "bench store: 1 of 2 turns (50 %)",
        "bench store: 2 of 2 turns (100 %)",
    ]


CODE = """
from rich.console import Console
from understudy.cli.progress import ProgressLine
with ProgressLine(Console(), "train", "steps", threaded=False) as line:
    for done in (0, 437, 3999):
        line(done, 4000, ("success 40 %", "interventions 27 %", "evaluation: 96 % of 100 (95 %: 90 to 98)"))
    line.note("step 4,000, evaluation: 96 % of 100 (95 %: 90 to 98) succeed")
"""


@pytest.mark.parametrize("columns", [60, 80])
def test_in_a_terminal_the_line_stays_one_line_and_goes_away(columns: int) -> None:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=slave, stdout=slave, stderr=slave, env={**env, "TERM": "xterm"}
    )
    os.close(slave)
    shown = b""
    with os.fdopen(master, "rb", buffering=0) as terminal:
        while True:
            try:
                read = terminal.read(4096)
            except OSError:  # Linux: the other end is closed
                break
            if not read:
                break
            shown += read
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", shown.decode())
    lines = [text for text in re.split(r"[\r\n]+", plain) if text.strip()]
    drawn = [text for text in lines if "/4,000 steps" in text]
    assert any("437/4,000 steps, 0:00:0" in text and "left 0:00:" in text for text in drawn)
    assert all(len(text) < columns and "…" not in text for text in drawn)
    assert shown.decode().rstrip().count("\x1b[2K") >= 1  # the line is removed at the end
    assert "step 4,000, evaluation: 96 % of 100 (95 %: 90 to 98) succeed" in plain.replace("\n", "")
