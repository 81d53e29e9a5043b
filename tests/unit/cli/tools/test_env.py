"""`understudy env`: what there is, how it is installed, and whether one's own world is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.envs.registry import INSTALLED_FILE, WORLD_REGISTRY


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


def test_all_worlds_are_listed_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    out = capsys.readouterr().out
    for name in WORLD_REGISTRY:
        assert name in out
    assert "`understudy env setup metaworld`" in out


def test_the_tasks_of_a_world_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "--tasks", "toy"]) == 0
    assert "put the red block on the green plate" in capsys.readouterr().out


def test_a_world_is_checked_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "toy:pick_red?cameras=false", "--episodes", "1"]) == 0
    assert "checks passed" in capsys.readouterr().out
    assert main(["env", "check", "toy", "--episodes", "0"]) == 1
    assert "expected at least 1" in capsys.readouterr().err


@pytest.mark.nightly  # .ci/run sets up two environments in every run
def test_setup_makes_an_environment_tries_it_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(WORLD_REGISTRY["toy"], name="small", packages=("numpy",), example="small:pick_red")
    monkeypatch.setitem(WORLD_REGISTRY, "small", small)
    assert main(["env", "setup", "small"]) == 0
    out = capsys.readouterr().out
    assert "ready after" in out
    assert "it shows 'pick_red': front [64, 64, 3]" in out
    made = (small.venv / INSTALLED_FILE).stat().st_mtime_ns
    assert main(["env", "setup", "small"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (small.venv / INSTALLED_FILE).stat().st_mtime_ns == made
    (small.venv / INSTALLED_FILE).write_text(json.dumps({"packages": ["older"]}))
    assert main(["env", "check", "small:pick_red"]) == 1
    assert "run `understudy env setup small`" in capsys.readouterr().err
    assert main(["env", "setup", "small", "--again"]) == 0
    assert small.ready


def test_what_cannot_be_set_up_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "setup", "metaword"]) == 1
    assert "no world 'metaword' to set up; there are metaworld, libero" in capsys.readouterr().err
    assert main(["env", "setup", "toy"]) == 0
    assert "nothing to do" in capsys.readouterr().out
