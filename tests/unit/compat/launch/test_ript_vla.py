"""RIPT-VLA's options: composed by Hydra, each has its effect, or says why it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.compat.launch import ript_vla
from understudy.compat.launch.ript_vla import RENAMED, UNUSED, compose, translate
from understudy.core import UnderstudyError
from understudy.training.onpolicy.config import default_config
from understudy.training.runs.config import to_json

CONFIGS = Path(__file__).parents[3] / "system" / "scripts" / "ript_vla" / "config"
NEEDED: dict[str, Any] = {"algo.checkpoint_path": "policy.safetensors", "task.benchmark_name": "toy"}


def test_a_config_is_composed_with_its_defaults_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = compose(CONFIGS, "train_rl_sides.yaml", ["algo.lr=2e-3", "+algo.new=[a,b]"])
    assert found["algo.lr"] == found["algo.optimizer_factory.lr"] == 2e-3
    assert found["algo.rloo_batch_size"] == 4
    assert found["algo.max_episode_length"] is None
    assert found["algo.new"] == ["a", "b"]
    assert found["task.suite_name"] == "sides"
    assert found["output_prefix"] == "/home/me/experiments"


def test_what_only_the_original_knows_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text("a: 1\nb: ${hydra:runtime.cwd}\nc: ${a}\n")
    assert compose(tmp_path, "it", []) == {"a": 1, "c": 1}


@pytest.mark.parametrize(
    ("folder", "name", "overrides", "text"),
    [
        (CONFIGS.parent / "none", "it", [], "expected the folder with the configs of the script, got none"),
        (CONFIGS, "none", [], "Cannot find primary config 'none'"),
        (CONFIGS, "train_rl_sides", ["algo.none=1"], "Could not override 'algo.none'"),
    ],
)
def test_a_config_that_is_not_there_is_named(folder: Path, name: str, overrides: list[str], text: str) -> None:
    with pytest.raises(UnderstudyError, match=text):
        compose(folder, name, overrides)


def test_all_of_ours_exist() -> None:
    def paths(config: Any, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in config.items():
            found |= paths(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
        return found

    assert set(RENAMED.values()) <= paths(to_json(default_config("rloo", policy="p")))


@pytest.mark.parametrize(("theirs", "ours"), RENAMED.items(), ids=str)
def test_a_renamed_option_has_its_value(theirs: str, ours: str, tmp_path: Path) -> None:
    given = {**NEEDED, "algo.checkpoint_path": str(tmp_path), theirs: 3}  # a checkpoint, which may have an adapter
    assert translate(given).options[ours] == 3


@pytest.mark.parametrize("name", UNUSED)
def test_an_option_without_effect_says_why(name: str) -> None:
    assert translate({**NEEDED, name: 1}).options == translate(NEEDED).options
    assert translate(NEEDED, overrides=[f"{name}=1"]).notes == (f"{name}=1 changes nothing here: {UNUSED[name]}",)


@pytest.mark.parametrize(
    ("given", "ranks", "ours"),
    [
        ({"train_dataloader.batch_size": 6, "algo.rloo_batch_size": 8}, 4, {"plan.data_batch_size": 192}),
        ({"algo.data_batch_size": 4, "algo.rloo_batch_size": 2}, 2, {"plan.data_batch_size": 8}),
        ({"algo.gradient_accumulation_steps": 4}, 4, {"algorithm.ppo_mini_batch_size": 16}),
        ({"algo.num_parallel_envs": 2}, 4, {"workers.num_parallel_envs": 8, "engine.parallel": "ddp"}),
        ({"task.num_parallel_envs": 3}, 1, {"workers.num_parallel_envs": 3}),
        ({"algo.num_parallel_envs": 2, "algo.env_runner.num_parallel_envs": 5}, 1, {"workers.num_parallel_envs": 5}),
        (
            {"algo.enable_dynamic_sampling": True},
            1,
            {"filters.filter_accuracy": True, "filters.accuracy_lower_bound": 0.01},
        ),
        ({"algo.enable_dynamic_sampling": False}, 1, {"filters.filter_accuracy": False}),
        ({"algo.model_seed": 5, "seed": 10000}, 1, {"seed": 5}),
        ({"training.save_interval": 1}, 1, {"checkpoint_every": 1, "save_policy_every": 1}),
    ],
    ids=str,
)
def test_options_that_go_together(given: dict[str, Any], ranks: int, ours: dict[str, Any]) -> None:
    found = translate({**NEEDED, **given}, ranks=ranks).options
    assert {name: found[name] for name in ours} == ours


def test_a_published_checkpoint(tmp_path: Path) -> None:
    given = {
        "algo.checkpoint_path": str(tmp_path),
        "task.benchmark_name": "libero_object",
        "algo.rollout_training_task_names": ["one", "two"],
        "output_prefix": "/out",
        "exp_name": "it",
        "variant_name": "bz_24",
        "algo.lora_rank": 32,
    }
    command = translate(given)
    assert command.run == Path("/out/it/bz_24")
    assert command.options["env"] == 'libero:libero_object?stock=true&size=256&state=axis_angle&tasks=["one","two"]'
    assert command.options["openvla.unnorm_key"] == "libero_object_no_noops"
    assert command.options["lora.rank"] == 32
    scored = translate({**given, "algo.eval_only": True}).words({})
    assert scored[:2] == ["evaluate", str(tmp_path)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"algo.name": "quest"}, "algo.name: expected openvla, got 'quest', a policy that is not here"),
        ({"algo.lora_adaptor_ckpt": "a"}, "algo.lora_adaptor_ckpt: expected null; merge the adapter"),
        ({"algo.checkpoint_path": None}, "algo.checkpoint_path: expected a checkpoint or a policy file, got none"),
        ({"task.benchmark_name": None}, "task.benchmark_name: expected a suite"),
        ({"task.task_names_to_use": [0, 1]}, r"task.task_names_to_use: expected names of tasks, got \[0, 1\]"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UnderstudyError, match=text):
        translate({**NEEDED, **given})


def test_an_option_of_a_part_that_is_another_one_here_is_said() -> None:
    (note,) = translate(NEEDED, overrides=["logging.project=mine"]).notes
    assert note.startswith("logging.project=mine changes nothing here: it belongs to a part of RIPT-VLA")
    assert ript_vla.translate(NEEDED, overrides=["exp_name=a", "algo.lr=1"]).notes == ()
