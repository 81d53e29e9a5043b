"""What `understudy demo` shows; tests/system/test_demo.py runs it."""

from __future__ import annotations

import io
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from understudy.cli import main
from understudy.cli.tools.demo_stages import IMAGE_COLUMNS, Page, _doubt, _next, _sparks, in_terminal
from understudy.envs.registry import open_world
from understudy.envs.toy.world import start_state
from understudy.training.demo import CORNER, DEMONSTRATIONS, ENV, TASK, Demo, DemoResult
from understudy.training.runs.wilson_interval import SuccessRate


def test_a_picture_is_drawn_with_two_pixels_to_a_letter() -> None:
    picture = np.zeros((2 * IMAGE_COLUMNS, 2 * IMAGE_COLUMNS, 3), np.uint8)
    picture[: 2 * 5, :2] = (250, 10, 20)  # the first five pixels of the first column of the small one
    console = Console(width=100, color_system="truecolor", force_terminal=True)
    with console.capture() as captured:
        console.print(in_terminal([picture, picture]))
    lines = captured.get().splitlines()
    assert len(lines) == IMAGE_COLUMNS // 2
    assert all(line.count("▀") == 2 * IMAGE_COLUMNS for line in lines)
    both, half = "38;2;250;10;20;48;2;250;10;20", "38;2;250;10;20;48;2;0;0;0"
    assert [line.count(both) for line in lines[:4]] == [2, 2, 0, 0]
    assert [line.count(half) for line in lines[:4]] == [0, 0, 2, 0]


def test_shares_are_drawn_against_the_greatest() -> None:
    assert _sparks((0.3, 0.15, 0.0)) == "█▅▁"
    assert _sparks((0.0, 0.0)) == "▁▁"


@pytest.mark.parametrize(
    ("cloned", "learned", "episodes", "steps", "said"),
    [
        (48, 96, 100, 4000, None),
        (
            48,
            40,
            100,
            4000,
            "RLPD did not learn: its policy is worse than the cloned one (40 % after 48 % by cloning). One run in many "
            "goes wrong; try another: `understudy demo a/here-2 --seed 4`. If that fails as well, something differs "
            "from where this was tested: please report both, with what `understudy doctor --json` prints.",
        ),
        (
            1,
            1,
            2,
            120,
            "RLPD did not learn: its policy is no better than the cloned one (50 % after 50 % by cloning). It had 120 "
            "steps and needs about 4,000: `understudy demo a/here-2`",
        ),
        (
            5,
            6,
            10,
            4000,
            "RLPD may not have learned: the 95 % intervals of the two policies overlap (60 % after 50 % by cloning). "
            "10 episodes say little: `understudy evaluate a/here --episodes 100`",
        ),
    ],
)
def test_what_has_not_learned_is_said_to_have_not(
    cloned: int, learned: int, episodes: int, steps: int, said: str | None
) -> None:
    result = DemoResult(
        cloned=SuccessRate(num_successes=cloned, num_episodes=episodes),
        learned=SuccessRate(num_successes=learned, num_episodes=episodes),
        intervention_rates=(0.3, 0.1),
        num_steps=steps,
        num_updates=10,
    )
    assert _doubt(result, Path("a/here"), seed=3) == said


def test_a_directory_with_a_space_can_be_copied_from_the_screen() -> None:
    assert _next(Path("my demo"))[0][0] == "understudy watch 'my demo'"


def test_a_page_that_cannot_be_says_why(tmp_path: Path) -> None:
    said = io.StringIO()
    console = Console(width=200, file=said)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Page(console, tmp_path, f"127.0.0.1:{port}") as page:
            assert page._process is not None
            page._process.wait(timeout=120)
            page._thread.join(timeout=60)
    assert f"no page: 127.0.0.1:{port}: cannot listen there" in said.getvalue()


def test_no_page_is_no_process(tmp_path: Path) -> None:
    with Page(Console(), tmp_path, "none") as page:
        assert page._process is None


def test_its_demonstrations_are_of_one_corner_and_of_training(tmp_path: Path) -> None:
    demo = Demo(tmp_path / "demo", seed=3)
    with open_world(ENV) as world:
        starts = demo._corner(world)
        assert set(starts) <= set(world.suite.starts(world.task, "train"))
        assert not set(starts) & set(world.suite.starts(world.task, "eval"))
    assert len(set(starts)) == DEMONSTRATIONS
    for start in starts:
        x, y = start_state(TASK, start).button
        assert x < CORNER[0]
        assert y < CORNER[1]
    other = Demo(tmp_path / "other", seed=4)
    with open_world(ENV) as world:
        assert other._corner(world) != starts


@pytest.mark.parametrize(("option", "begun"), [("seed", 3), ("steps", 40), ("episodes", 2)])
def test_a_demo_goes_on_as_it_was_begun(option: str, begun: int, tmp_path: Path) -> None:
    demo = Demo(tmp_path / "demo", seed=3, steps=40, episodes=2)
    assert Demo(tmp_path / "demo").config == demo.config
    with pytest.raises(Exception, match=rf"{option}: .* was started with {begun}, got 7; leave it out"):
        Demo(tmp_path / "demo", **{option: 7})


def test_another_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from understudy.training.offpolicy.rlpd import RLPDConfig
    from understudy.training.runs.run import Run

    Run.create(tmp_path / "run", "rlpd", RLPDConfig())
    assert main(["demo", str(tmp_path / "run")]) == 1
    assert "is a run, but not a demo of this version; choose another directory" in capsys.readouterr().err


def test_without_pillow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "understudy.cli.tools.demo")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["demo", str(tmp_path / "demo")]) == 1
    assert "pip install 'understudy-robotics[train]'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
