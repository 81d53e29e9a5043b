"""SimpleVLA-RL's options: every one has its effect, or says why it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.compat.launch import simplevla_rl
from understudy.compat.launch.simplevla_rl import ACTOR, MODEL, RENAMED, ROLLOUT, UNUSED, translate, world_of
from understudy.compat.launch.train_command import TrainCommand
from understudy.core import UnderstudyError
from understudy.recipes.libero_openvla_grpo import CONFIG
from understudy.training.onpolicy.config import OnPolicyConfig, default_config
from understudy.training.runs.config import to_json

NEEDED = {f"{MODEL}.path": "policy.safetensors", "data.task_suite_name": "toy"}


def translated(given: dict[str, Any], *, gpu: bool = True) -> TrainCommand:
    return translate({**NEEDED, **given}, gpu=gpu, count_tasks=lambda world: 10)


def known_paths(config: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in config.items():
        found |= known_paths(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return found


def test_all_of_ours_exist() -> None:
    ours = known_paths(to_json(default_config("grpo", policy="p")))
    assert {*RENAMED.values(), *simplevla_rl.DEFAULTS} <= ours


@pytest.mark.parametrize(("theirs", "ours"), RENAMED.items(), ids=lambda name: str(name))
def test_a_renamed_option_has_its_value(theirs: str, ours: str) -> None:
    assert translated({theirs: 3}).options[ours] == 3


@pytest.mark.parametrize("name", UNUSED)
def test_an_option_without_effect_says_why(name: str) -> None:
    plain, given = translated({}), translated({name: 1})
    assert given.options == plain.options
    assert [note for note in given.notes if note not in plain.notes] == [
        f"{name}=1 changes nothing here: {UNUSED[name]}"
    ]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"data.train_batch_size": 64, "data.n_samples": 8}, {"plan.data_batch_size": 512}),
        (
            {f"{ACTOR}.ppo_micro_batch_size": 8, f"{ACTOR}.traj_mini_batch_size": 16},
            {"algorithm.ppo_micro_batch_size": 128},
        ),
        (
            {f"{ACTOR}.ppo_micro_batch_size": 8, f"{ACTOR}.traj_mini_batch_size": 16, "trainer.n_gpus_per_node": 8},
            {"algorithm.ppo_micro_batch_size": 16, "engine.parallel": "fsdp"},
        ),
        (
            {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 20480},
            {"algorithm.max_tokens": 20480, "algorithm.ppo_micro_batch_size": None},
        ),
        ({"algorithm.kl_ctrl.kl_coef": 0.001}, {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.001}),
        (
            {
                "algorithm.kl_ctrl.kl_coef": 0.1,
                "algorithm.kl_ctrl.type": "adaptive",
                "algorithm.kl_ctrl.target_kl": 0.2,
            },
            {"algorithm.kl_controller": "adaptive", "algorithm.kl_target": 0.2},
        ),
        (
            {
                "algorithm.kl_ctrl.kl_coef": 0.1,
                "algorithm.kl_ctrl.type": "adaptive",
                "algorithm.kl_ctrl.horizon": 500,
            },
            {"algorithm.kl_horizon": 500.0},
        ),
        ({f"{ACTOR}.fsdp_config.optimizer_offload": True}, {"engine.offload_optimizer": True}),
        (
            {f"{ACTOR}.fsdp_config.param_offload": True, "trainer.n_gpus_per_node": 2},
            {"engine.offload_parameters": True},
        ),
        (
            {f"{MODEL}.lora_rank": 32, f"{MODEL}.lora_alpha": 16, f"{MODEL}.target_modules": ["q_proj", "v_proj"]},
            {"lora.rank": 32, "lora.alpha": 16.0, "lora.targets": ("q_proj", "v_proj")},
        ),
        ({"trainer.logger": ["console", "wandb"]}, {"sinks": ("wandb",)}),
        ({"trainer.save_freq": 25}, {"save_policy_every": 25, "checkpoint_every": 5}),
        ({"trainer.save_freq": 2}, {"checkpoint_every": 2}),
        ({"trainer.total_training_steps": 7, "trainer.total_epochs": 100}, {"iterations": 7}),
        ({"trainer.total_epochs": 2, "data.num_trials_per_task": 50, "data.train_batch_size": 64}, {"iterations": 14}),
        ({"trainer.total_epochs": 2, "data.num_trials_per_task": 1}, {"iterations": 2}),
    ],
    ids=str,
)
def test_options_that_go_together(given: dict[str, Any], ours: dict[str, Any]) -> None:
    found = translated(given).options
    assert {name: found[name] for name in ours} == ours


def test_without_a_gpu_nothing_is_moved_to_host_memory() -> None:
    names = [f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"]
    command = translated({**dict.fromkeys(names, True), "trainer.n_gpus_per_node": 2}, gpu=False)
    assert not [name for name in command.options if "offload" in name]
    assert [note for note in command.notes if "there is no GPU" in note] == [
        f"{name}=True changes nothing here: there is no GPU" for name in names
    ]


def test_what_a_policy_file_says_itself_is_noted() -> None:
    given = {f"{ROLLOUT}.center_crop": True, f"{MODEL}.action_chunks_len": 8}
    assert translated(given).options == translated({}).options
    assert translated(given).notes == tuple(
        f"{name}={given[name]} changes nothing here: the policy file says it"
        for name in (f"{MODEL}.action_chunks_len", f"{ROLLOUT}.center_crop")
    )


def test_metrics_that_are_switched_off_go_nowhere() -> None:
    given = {"trainer.logger": ["console", "wandb"], "trainer.wandb_mode": "disabled"}
    assert "sinks" not in translated(given).options
    assert translated(given).notes == ()


def test_what_is_off_is_left_out() -> None:
    found = translated(
        {"algorithm.kl_ctrl.kl_coef": 0.0, f"{MODEL}.lora_rank": 0, "trainer.logger": ["console"]}
    ).options
    assert not [
        name for name in found if name.startswith(("algorithm.kl", "lora", "sinks", "openvla", "engine.parallel"))
    ]


@pytest.mark.parametrize(("theirs", "kind"), simplevla_rl.KINDS.items())
def test_the_estimator_is_the_kind(theirs: str, kind: str) -> None:
    assert translated({"algorithm.adv_estimator": theirs}).words({})[:2] == ["train", kind]


def test_the_run_and_its_ranks() -> None:
    command = translated({"trainer.default_local_dir": "/ckpt/it", "trainer.n_gpus_per_node": 4})
    assert command.words({})[2] == "/ckpt/it"
    assert command.words({})[-2:] == ["--ranks", "4"]


def test_a_checkpoint_of_openvla_is_read_as_published_ones_are(tmp_path: Path) -> None:
    given = {
        f"{MODEL}.path": str(tmp_path),
        f"{MODEL}.action_chunks_len": 8,
        f"{ROLLOUT}.num_images_in_input": 2,
        f"{ROLLOUT}.use_proprio": True,
        f"{ROLLOUT}.unnorm_key": "libero_10",
        f"{ROLLOUT}.center_crop": True,
        "data.task_suite_name": "libero_10",
    }
    command = translated(given)
    assert command.options["env"] == "libero:libero_10?stock=true&size=256&state=axis_angle"
    assert {name: value for name, value in command.options.items() if name.startswith("openvla.")} == {
        "openvla.decoding": "parallel",
        "openvla.block_steps": 8,
        "openvla.cameras": ("agentview", "wrist"),
        "openvla.center_crop": True,
        "openvla.mirror": True,
        "openvla.libero_gripper": True,
        "openvla.resize": "jpeg_lanczos",
        "openvla.unnorm_key": "libero_10",
        "openvla.use_proprio": ("state",),
    }
    plain = translated({**given, f"{MODEL}.vla": "openvla", f"{MODEL}.action_chunks_len": 1}).options
    assert plain["openvla.decoding"] == "autoregressive"
    scored = translated({**given, "trainer.val_only": True}).words({})
    assert scored[:2] == ["evaluate", str(tmp_path)]
    assert "--openvla.center-crop" in scored
    assert not [word for word in scored if word.startswith(("--plan", "--engine"))]


def test_published_sizes_are_those_of_the_recipe(tmp_path: Path) -> None:
    given = {
        f"{MODEL}.path": str(tmp_path),
        "data.task_suite_name": "libero_10",
        "data.n_samples": 8,
        "data.train_batch_size": 64,
        "data.accuracy_lower_bound": 0.1,
        "data.accuracy_upper_bound": 0.9,
        f"{ACTOR}.optim.lr": 5e-6,
        f"{ACTOR}.ppo_mini_batch_size": 128,
        f"{ACTOR}.ppo_micro_batch_size": 8,
        f"{ACTOR}.traj_mini_batch_size": 8,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ROLLOUT}.temperature": 1.6,
        f"{ROLLOUT}.center_crop": True,
        "trainer.n_gpus_per_node": 8,
    }
    found = translated(given).options
    recipe: OnPolicyConfig = CONFIG
    assert found["plan.data_batch_size"] == recipe.plan.data_batch_size
    assert found["algorithm.ppo_micro_batch_size"] == recipe.algorithm.ppo_micro_batch_size
    assert found["algorithm.mini_batch_unit"] == recipe.algorithm.mini_batch_unit
    assert found["algorithm.loss_aggregation"] == recipe.algorithm.loss_aggregation
    assert found["algorithm.ppo_epochs"] == recipe.algorithm.ppo_epochs
    assert found["engine.parallel"] == recipe.engine.parallel
    assert found["engine.precision"] == recipe.engine.precision
    assert found["sampling.temperature"] == recipe.sampling.temperature


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"data.n_sample": 8}, "there is no option 'data.n_sample' here; did you mean 'data.n_samples'?"),
        ({"vla_ttrl.enable": True}, "there is no option 'vla_ttrl.enable' here; docs/guides"),
        ({"data.task_suite_name": "robotwin_all"}, "RoboTwin is not here; put it behind a world"),
        ({f"{MODEL}.path": None}, "model.path: expected a value, got none; set it in the script"),
        ({"algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator: expected one of grpo, .* got 'remax'"),
        ({"trainer.nnodes": 2}, "trainer.nnodes: a script starts the ranks of one machine here, got 2"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UnderstudyError, match=text):
        translated(given)


def test_images_that_libero_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnderstudyError, match="num_images_in_input: expected 1 or 2 with LIBERO, got 3"):
        translated({f"{MODEL}.path": str(tmp_path), f"{ROLLOUT}.num_images_in_input": 3})


def test_worlds() -> None:
    assert world_of("toy?cameras=false") == "toy?cameras=false"
    assert world_of("libero_goal", tasks=["a", "b"]) == 'libero:libero_goal?stock=true&size=256&tasks=["a","b"]'
