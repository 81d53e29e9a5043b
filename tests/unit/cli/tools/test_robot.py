"""`understudy robot` as a person runs it: an arm, simulated or of one's own, until Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import main

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

ARM = """
from tests.unit.robots.point_arm import PointArm

class MyArm(PointArm):
    def close(self) -> None:
        print("let go", flush=True)

class NoArm:
    pass
"""
ROOT = str(Path(__file__).parents[4])
CODE = f"import sys; sys.path.append({ROOT!r}); from understudy.cli import main; sys.exit(main())"


@contextmanager
def robot(place: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command, and the address of its arm."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "robot", *words, "--port", "0"],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = re.fullmatch(r"arm at (http://\S+)\n", process.stdout.readline())
        assert found is not None, process.communicate()
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


def ask(url: str, token: str | None = None) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, data=b"", headers=headers), timeout=60) as answer:
        return json.loads(answer.read())


def stop(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stderr is not None
    out = process.stdout.read()  # and not `communicate`, which forgets what was read ahead with the first line
    assert (process.wait(60), process.stderr.read()) == (0, "")
    return out


def test_an_arm_of_ones_own_is_served_and_let_go(tmp_path: Path) -> None:
    (tmp_path / "my_arm.py").write_text(ARM)
    with robot(tmp_path, "serve", "my_arm:MyArm", "--rate-hz", "50") as (url, process):
        assert ask(f"{url}/getpos")["pose"][:3] == [0.5, 0.0, 0.3]
        out = stop(process)
    assert "box [0.2, -0.3, 0.0] to [0.8, 0.3, 0.5] m" in out
    assert re.search(r"stopped; control ran at \d+ of 50 Hz", out)
    assert out.rstrip().endswith("let go")


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "my_arm.py").write_text(ARM)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    with robot(tmp_path, "serve", "my_arm:MyArm", "--token-file", "token") as (url, process):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{url}/getpos")
        assert refused.value.code == 401
        refused.value.close()
        assert ask(f"{url}/getpos", "0123456789abcdef")
        stop(process)


def test_a_simulated_arm_has_cameras(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    with robot(tmp_path, "simulate", "--scene-port", "0", "--rate-hz", "100", "--image-size", "64") as (url, process):
        assert len(ask(f"{url}/getpos")["pose"]) == 7
        assert process.stdout is not None
        assert re.fullmatch(r"cameras and cube at http://127\.0\.0\.1:\d+\n", process.stdout.readline())
        assert re.search(r"control ran at \d+ of 100 Hz", stop(process))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "nothing"], "backend: expected module:Class, got 'nothing'"),
        (["serve", "my_arm:MyLeg"], "/my_arm.py has no 'MyLeg'"),
        (["serve", "my_arm:NoArm"], "to be a subclass of understudy.robots.Arm"),
        (["serve", "my_arm:MyArm", "--token-file", "nowhere"], "nowhere: cannot be read"),
        (["serve", "my_arm:MyArm", "--host", "0.0.0.0"], "token"),
    ],
)
def test_what_is_no_arm_or_not_safe_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_arm.py").write_text(ARM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_arm", raising=False)
    before = list(sys.path)
    assert main(["robot", *words, "--port", "0"]) == 1
    assert said in capsys.readouterr().err
    sys.path[:] = before
    sys.modules.pop("my_arm", None)
