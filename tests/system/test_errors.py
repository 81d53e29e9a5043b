"""What goes wrong, in real processes: an error is one sentence that says what to do, an interrupt leaves all sane."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.replay import Reader, verify

STATE = "toy:press_button?cameras=false&state=task"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "UNDERSTUDY_DEBUG")}


def start(*words: str, cwd: Path, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "understudy", *words],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def run(*words: str, cwd: Path, **options: object) -> tuple[int, str, str]:
    """The exit code, and what was said and complained about."""
    process = start(*words, cwd=cwd, **options)
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


Asked = Callable[..., tuple[int, str]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asked:
    """The exit code of a command in this process, and what it complained about: another takes seconds to start."""
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "UNDERSTUDY_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def ask(*words: str) -> tuple[int, str]:
        try:
            code = main(list(words))
        except SystemExit as exit:
            code = int(exit.code or 0)
        return code, capsys.readouterr().err

    return ask


def one_sentence(error: str) -> str:
    """The complaint, if it is one line and no traceback."""
    (line,) = error.strip().splitlines()
    assert "Traceback" not in error
    return line


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("demos")
    code, _, error = run("record", "demos", "--env", STATE, "--successes", "3", cwd=place)
    assert code == 0, error
    return place / "demos"


# ---- what is asked for is not there, or makes no sense


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["record", "x", "--env", "toi:pick_red"], "toi:pick_red: no world 'toi', did you mean 'toy'?"),
        (["record", "x", "--env", "toy:pik_red"], "did you mean 'pick_red'?"),
        (["record", "127.0.0.1:1", "--successes", "1"], "127.0.0.1:1"),
        (["evaluate", "nowhere", "--env", "toy"], "nowhere: there is no such run or policy file; check the path"),
        (["resume", "nowhere"], "nowhere: is not a run, there is no such directory; check the path"),
        (["train", "rlpd", "x", "--env", STATE, "--steps", "0"], "steps: expected a number from 1, got 0"),
        (
            ["train", "rlpd", "x"],
            "env: no world was given, and x/store has no demonstrations to take it from; pass --env",
        ),
        (["verify", "nowhere"], "not an Understudy store"),
        (["demo", "full"], "full: exists already and is not a demo; choose another directory"),
        (["demo", "x", "--page", "somewhere"], "page: expected host:port, such as 127.0.0.1:7448, got 'somewhere'"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], said: str, asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a file").touch()
    code, error = asked(*words)
    assert code == 1
    line = one_sentence(error)
    assert line.startswith("error: ")
    assert said in line
    assert not (tmp_path / "x" / "config.json").exists()  # nothing is half begun


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recrod", "x"], "did you mean 'record'?"),
        (["train", "rldp", "x"], "did you mean 'rlpd'?"),
        (["record", "x", "--succeses", "3"], "--successes"),
        (["train", "rlpd", "x", "--intervention.sourc", "script"], "--intervention.source"),
        (["record", "x", "--human", "scrpt"], "'script', 'browser', 'spacemouse'"),
        (["completion", "basch"], "'bash'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    words: list[str], said: str, asked: Asked, tmp_path: Path
) -> None:
    code, error = asked(*words)
    assert code == 2
    assert said in " ".join(error.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_field_in_a_config_is_named_with_the_nearest(tmp_path: Path, demos: Path, asked: Asked) -> None:
    def complaint(*words: str) -> str:
        code, error = asked(*words)
        assert code == 1
        return one_sentence(error)

    assert asked("init", "rlpd", "run", "--demos", str(demos), "--env", STATE)[0] == 0
    config = tmp_path / "run" / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"batch_size"', '"batch_sise"'))
    said = complaint("resume", "run")
    assert said == "error: run/config.json: batch_sise: no such option; did you mean 'batch_size'?"
    config.write_text(text.replace('"batch_size": 128', '"batch_size": "many"'))
    assert "run/config.json: batch_size: expected int, got" in complaint("resume", "run")
    config.write_text("{")
    assert "run/config.json: is not JSON" in complaint("resume", "run")


def test_a_wrong_token_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "wrong").write_text("fedcba9876543210")
    server = start("serve", "store", "--port", "0", "--token-file", "token", cwd=tmp_path)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split()[-1]
        for options in ([], ["--token-file", "wrong"]):
            code, _, error = run("record", address, "--env", STATE, "--successes", "1", *options, cwd=tmp_path)
            assert code == 1
            assert "the token is missing or wrong" in one_sentence(error)
        code, _, error = run("record", address, "--env", STATE, "--token-file", "nothing", cwd=tmp_path)
        assert code == 1
        assert "pass a file that holds the token" in one_sentence(error)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode == 0


# ---- the disk is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, if this user may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    words = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_while_recording(small_disk: Path) -> None:
    code, _, error = run("record", "store", "--successes", "20", cwd=small_disk)
    assert code == 1
    line = one_sentence(error)
    assert re.search("No space left on device|disk is full", line)
    assert "free some space" in line
    assert verify(small_disk / "store").problems == []


def test_a_full_disk_while_training(small_disk: Path, demos: Path) -> None:
    words = ["--demos", str(demos), "--env", STATE, "--checkpoint-every", "10", "--keep-checkpoints", "100"]
    code, _, error = run("train", "rlpd", "run", *words, cwd=small_disk)
    assert code == 1
    assert "Traceback" not in error
    last = error.strip().splitlines()[-1]  # before it, the run may have said that it goes on without this or that
    assert re.search("^error: .*(No space left on device|disk is full)", last)
    assert "free some space" in last


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    for path in ("/proc/understudy", "/dev/null/store"):
        code, _, error = run("record", path, "--successes", "1", cwd=tmp_path)
        assert code == 1
        assert one_sentence(error).startswith("error: /")


# ---- Ctrl-C


def interrupt(process: subprocess.Popen[str], when: Callable[[], bool]) -> tuple[int, str]:
    """Press Ctrl-C as soon as something is so; the exit code, and what was said then."""
    end_s = time.monotonic() + 240
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    return process.returncode, error


def num_episodes(store: Path) -> int:
    if not (store / "catalog.sqlite").exists():
        return 0
    with Reader(store) as reader:
        return len(list(reader.episodes()))


def test_interrupted_recording_goes_on(tmp_path: Path) -> None:
    words = ["record", "store", "--env", STATE, "--successes", "30", "--hz", "100"]
    store = tmp_path / "store"
    code, error = interrupt(start(*words, cwd=tmp_path), lambda: num_episodes(store) > 0)
    asked, said = error.splitlines()
    assert (code, asked) == (130, "stopping at the next safe moment; a second Ctrl-C quits at once")
    assert re.fullmatch(r"stopped; \d+ of 30 successes are recorded, and the same command continues", said)
    with Reader(store) as reader:
        assert all(record.state == "ended" for record in reader.episodes())
    before = num_episodes(store)
    assert verify(store).problems == []
    code, out, _ = run(*words[:-2], cwd=tmp_path)
    assert code == 0
    assert "30 successes" in out
    assert num_episodes(store) >= max(30, before)


@pytest.mark.nightly  # test_stop.py stops training in every run
def test_interrupted_training_resumes(tmp_path: Path, demos: Path) -> None:
    words = ["--demos", str(demos), "--env", STATE, "--evaluation.episodes", "1", "--checkpoint-every", "20"]
    process = start("train", "rlpd", "run", *words, "--steps", "60", cwd=tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    code, error = interrupt(process, lambda: len(list(checkpoints.glob("[0-9]*"))) > 1)
    assert code == 130
    assert re.search(r"stopped and saved at step \d+ and update \d+: no step will be run again; `understudy res", error)
    code, out, error = run("resume", "run", cwd=tmp_path)
    assert code == 0, error
    assert "restored checkpoint" in out
    assert "rolled back" not in out


def test_interrupted_evaluation_writes_nothing(tmp_path: Path, demos: Path) -> None:
    words = ["--demos", str(demos), "--env", STATE, "--updates", "2", "--evaluation.episodes", "1"]
    assert run("train", "clone", "run", *words, cwd=tmp_path)[0] == 0
    process = start("evaluate", "run", "--episodes", "100000", cwd=tmp_path)
    began = Path(f"/proc/{process.pid}/maps")
    code, error = interrupt(process, lambda: "libtorch_cpu" in began.read_text())
    assert (code, one_sentence(error)) == (130, "interrupted; nothing was written; run it again")
    assert not (tmp_path / "run" / "evaluations").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that takes a while to read, and a while to rewrite."""
    place = tmp_path_factory.mktemp("large")
    code = (
        "from understudy.core.examples import random_episode, robot_spec\n"
        "from understudy.replay import Store\n"
        "with Store.open('store', segment_bytes=4_000_000) as store:\n"
        "    spec = robot_spec(64)\n"
        "    episode = random_episode(spec, 100, 1)\n"
        "    writer = store.writer('arm', spec)\n"
        "    for _ in range(30):\n"
        "        writer.begin(episode.info)\n"
        "        for step in episode.steps():\n"
        "            writer.append(step)\n"
        "        writer.end(episode.last_observation)\n"
        "    store.delete(list(range(1, 30, 2)))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=place, check=True, timeout=300)
    return place / "store"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "store"], "interrupted; nothing was changed"),
        (
            ["compact", "store", "--yes", "--min-dead", "0"],
            "interrupted; the store is intact; run it again for the rest",
        ),
    ],
)
def test_interrupted_work_on_a_store_leaves_it_whole(words: list[str], said: str, large: Path, tmp_path: Path) -> None:
    """Interrupted at several moments, at some of which it may be done already."""
    seen = set()
    for after_s in (0.0, 0.02, 0.05, 0.1, 0.2):
        place = tmp_path / f"{after_s}"
        shutil.copytree(large, place / "store")
        process = start(*words, cwd=place)
        maps = Path(f"/proc/{process.pid}/maps")
        code, error = None, ""
        with contextlib.suppress(AssertionError, FileNotFoundError):  # it ended before it could be interrupted
            code, error = interrupt(process, lambda maps=maps: "_sqlite3" in maps.read_text())  # type: ignore[misc]
        seen.add(process.returncode)
        assert code != 130 or error.strip().splitlines()[-1] == said
        report = verify(place / "store")
        assert report.problems == []
        with Reader(place / "store") as reader:
            assert len(list(reader.episodes("deleted is null"))) == 15
    assert 130 in seen
