"""What config.json of a policy of lerobot says, and which fields of a world are its inputs; lerobot is not needed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.unit.policies.lerobot.made import SPEC

from understudy.cli import main
from understudy.core import ArraySpec, Spec
from understudy.policies import PolicyError
from understudy.policies.lerobot.checkpoint import LeRobotCheckpoint, action_fields
from understudy.policies.lerobot.config import PYTHON_VARIABLE, LeRobotConfig
from understudy.policies.load import load_block_policy

PAGE = Path(__file__).parents[4] / "docs" / "lerobot-policies.md"
FILES = ("model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json")
IMAGE = {"type": "VISUAL", "shape": [3, 64, 64]}
CONTENT: dict[str, Any] = {
    "type": "act",
    "n_obs_steps": 1,
    "chunk_size": 6,
    "n_action_steps": 4,
    "input_features": {
        "observation.images.front": IMAGE,
        "observation.images.wrist": IMAGE,
        "observation.state": {"type": "STATE", "shape": [20]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [4]}},
}


def write_config(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONTENT, **changes}))
    for name in FILES:
        (path / name).touch()
    return path


def inputs(path: Path, observation: Any = None, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    checkpoint = LeRobotCheckpoint.read(write_config(path, **(changes or {})))
    return checkpoint.inputs(Spec(observation or SPEC.observation.tree), LeRobotConfig(**options))


def camera(side: int = 64) -> ArraySpec:
    return ArraySpec(shape=(side, side, 3), dtype="uint8")


def numbers(size: int) -> ArraySpec:
    return ArraySpec(shape=(size,), dtype="float32")


def features(**images: Any) -> dict[str, Any]:
    named = {f"observation.images.{name}": image for name, image in images.items()}
    return {"input_features": {**named, "observation.state": {"type": "STATE", "shape": [20]}}}


def test_fields_have_the_names_of_data_sets(tmp_path: Path) -> None:
    assert inputs(tmp_path) == {
        "observation.images.front": ["front"],
        "observation.images.wrist": ["wrist"],
        "observation.state": ["state"],
    }
    deep = {"arm": {"top": camera()}, "state": numbers(20)}
    named = {"observation.images.arm.top": ["arm/top"], "observation.state": ["state"]}
    assert inputs(tmp_path, deep, features(**{"arm.top": IMAGE})) == named
    assert LeRobotCheckpoint.read(tmp_path).block_steps == 4


def test_what_there_is_only_one_of_needs_no_name(tmp_path: Path) -> None:
    one = {"eye": camera(), "joints": numbers(20)}
    found = {"observation.images.top": ["eye"], "observation.state": ["joints"]}
    assert inputs(tmp_path, one, features(top=IMAGE)) == found


def test_options_name_fields_in_order(tmp_path: Path) -> None:
    world = {"a": camera(), "b": camera(), "arm": numbers(14), "hand": numbers(6)}
    assert inputs(tmp_path, world, cameras=("b", "a"), state=("hand", "arm")) == {
        "observation.images.front": ["b"],
        "observation.images.wrist": ["a"],
        "observation.state": ["hand", "arm"],
    }


def test_images_of_any_size_for_those_that_resize_them(tmp_path: Path) -> None:
    world = {"front": camera(32), "wrist": camera(48), "state": numbers(20)}
    assert inputs(tmp_path, world, {"type": "smolvla"})["observation.images.front"] == ["front"]
    with pytest.raises(PolicyError, match=r"observation/front: .*front was trained on uint8 \[64, 64, 3\].*render it"):
        inputs(tmp_path, world)


def test_images_that_the_policy_makes_up_are_no_inputs(tmp_path: Path) -> None:
    made_up = features(front=IMAGE, empty_camera_0=IMAGE)
    assert list(inputs(tmp_path, None, made_up)) == ["observation.images.front", "observation.state"]


@pytest.mark.parametrize(
    ("world", "options", "said"),
    [
        (
            {"left": camera(), "wrist": camera(), "state": numbers(20)},
            {},
            r"the world has no camera 'front' for observation\.images\.front \(it has left, wrist\); name one for each",
        ),
        (None, {"cameras": ("front",)}, r"cameras: expected 2, since the policy sees .*front, .*wrist, got 1; name"),
        (
            {"front": camera(), "wrist": camera(), "arm": numbers(14), "hand": numbers(6)},
            {},
            r"observation\.state: the policy takes 20 numbers, and the world has no field 'state' .*--lerobot\.state",
        ),
        (
            {"front": camera(), "wrist": camera(), "state": numbers(19)},
            {},
            r"observation\.state: the policy takes 20 numbers, state has 19; name its fields",
        ),
        (None, {"tokenizer": "/here"}, "tokenizer: a policy of type act takes no instruction; leave the option out"),
    ],
)
def test_a_world_that_does_not_fit_is_refused(tmp_path: Path, world: Any, options: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        inputs(tmp_path, world, **options)


def test_actions_and_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    checkpoint = LeRobotCheckpoint.read(write_config(tmp_path))
    checkpoint.check_action(SPEC.action)
    with pytest.raises(PolicyError, match="action: the policy gives 4 numbers, the world takes 7; use the world"):
        checkpoint.check_action(Spec(numbers(7)))
    assert checkpoint.executed_steps(LeRobotConfig(block_steps=6)) == 6
    with pytest.raises(PolicyError, match="block_steps: expected up to 6, which it decides on, got 7"):
        checkpoint.executed_steps(LeRobotConfig(block_steps=7))


def test_fields_of_an_action_with_their_bounds() -> None:
    arm = ArraySpec(shape=(2,), dtype="float32", low=(-1.0, -2.0), high=3.0)
    assert action_fields(Spec({"arm": arm, "grip": ArraySpec(shape=(), dtype="float64")})) == [
        {"path": "arm", "shape": [2], "dtype": "float32", "low": [-1.0, -2.0], "high": 3.0},
        {"path": "grip", "shape": [], "dtype": "float64", "low": -float("inf"), "high": float("inf")},
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "tdmpc"}, "type: expected act, diffusion, smolvla, pi0 or pi05, got 'tdmpc'"),
        ({"temporal_ensemble_coeff": 0.01}, "temporal_ensemble_coeff: expected null, got 0.01, which decides anew"),
        ({"output_features": {}}, "expected the config of a act policy, got KeyError: 'action'; write it with"),
    ],
)
def test_policies_that_cannot_be_used_are_refused(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        LeRobotCheckpoint.read(write_config(tmp_path, **changes))
    assert LeRobotCheckpoint.is_at(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_missing_are_named(tmp_path: Path, name: str) -> None:
    (write_config(tmp_path) / name).unlink()
    with pytest.raises(PolicyError, match=rf"expected {name}, got no such file; copy the whole directory, and bring"):
        LeRobotCheckpoint.read(tmp_path)


def test_directories_of_others_are_none(tmp_path: Path) -> None:
    assert not LeRobotCheckpoint.is_at(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not LeRobotCheckpoint.is_at(tmp_path)
    with pytest.raises(PolicyError, match=r"config.json: expected the config of a policy of lerobot, got KeyError"):
        LeRobotCheckpoint.read(tmp_path)


def test_options_that_make_no_sense() -> None:
    for options, said in (
        ({"block_steps": 0}, "block_steps: expected a number from 1, got 0"),
        ({"cameras": ("a", "a")}, "cameras: expected different paths of fields, at least one"),
        ({"state": ()}, "state: expected different paths of fields, at least one"),
    ):
        with pytest.raises(PolicyError, match=said):
            LeRobotConfig(**options)


def test_the_interpreter_is_named_by_the_option_or_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/of/the/variable")
    assert LeRobotConfig().interpreter == "/of/the/variable"
    assert LeRobotConfig(python="/of/the/option").interpreter == "/of/the/option"
    monkeypatch.delenv(PYTHON_VARIABLE)
    with pytest.raises(PolicyError, match="python: expected the path of an interpreter that has lerobot, got none"):
        load_block_policy(write_config(tmp_path), SPEC)


def test_the_page_lists_every_option() -> None:
    listed = {row.split("`")[1] for row in PAGE.read_text().splitlines() if row.startswith("| `")}
    assert {field.name for field in fields(LeRobotConfig)} - listed == set()


def test_what_decides_on_actions_is_in_the_fingerprint() -> None:
    options = {"cameras": ("a",), "state": ("b",), "block_steps": 2, "tokenizer": "/t"}
    assert LeRobotConfig(python="/p", **options).to_json() == options


def test_options_of_lerobot_are_for_its_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = ["evaluate", str(tmp_path), "--env", "toy:pick_red"]
    assert main([*given, "--lerobot.block-steps", "2"]) == 1
    assert "is no policy of lerobot; omit these options" in capsys.readouterr().err
    assert main(["evaluate", str(write_config(tmp_path)), "--env", "toy:pick_red", "--openvla.center-crop"]) == 1
    assert "is no OpenVLA checkpoint" in capsys.readouterr().err
