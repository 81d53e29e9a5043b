"""The code of docs/robots.md is run as it stands, against a real server in front of the page's own arm."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "robots.md"
NAME = re.compile(r"`(/[a-z_]+)`")
BLOCKS = blocks(PAGE.read_text())


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arm, client = BLOCKS
    (tmp_path / "my_arm.py").write_text(arm)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("understudy.envs.robot_client.TIMEOUT_S", 60.0)  # the machine may be busy
    monkeypatch.delitem(sys.modules, "my_arm", raising=False)
    from understudy.cli.tools.robot import _build
    from understudy.robots.server import ArmServer

    built = _build("my_arm:MyArm")
    with ArmServer(built, port=0) as server:
        exec(compile(client.replace("http://127.0.0.1:5000", server.url), PAGE.name, "exec"), {})
    built.close()
    sys.modules.pop("my_arm")
    if "" in sys.path:
        sys.path.remove("")
    assert capsys.readouterr().out == "reached: True\n"


def test_every_endpoint_is_in_the_table() -> None:
    from tests.unit.robots.point_arm import PointArm

    from understudy.robots.app import make_app
    from understudy.robots.control import Control

    app = make_app(Control(PointArm()))
    served = {route.path for route in app.routes}  # type: ignore[attr-defined]
    named = {name for line in PAGE.read_text().splitlines() if line.startswith("| `/") for name in NAME.findall(line)}
    assert served == named
