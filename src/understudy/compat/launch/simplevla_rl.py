"""The options of SimpleVLA-RL's `verl.trainer.main_ppo`, as those of `understudy train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from understudy.compat.launch.train_command import TrainCommand, evaluation, is_openvla
from understudy.core import UnderstudyError
from understudy.core.suggestion import did_you_mean

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KINDS = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce", "gae": "ppo"}
PARAM_OFFLOAD, OPTIMIZER_OFFLOAD = f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"
LIBERO_CAMERAS = ("agentview", "wrist")
TRIALS_PER_TASK = 50  # starts of each task in an epoch, unless the script says otherwise

# What its scripts rely on without saying it.
DEFAULTS: Mapping[str, Any] = {
    "algorithm.mini_batch_unit": "episodes",
    "algorithm.loss_aggregation": "episode-mean",
    "algorithm.ppo_epochs": 1,
    "evaluation.sampling": "sampled",
}

# Options with another name and the same meaning.
RENAMED: Mapping[str, str] = {
    "data.n_samples": "plan.n_samples",
    "data.filter_accuracy": "filters.filter_accuracy",
    "data.accuracy_lower_bound": "filters.accuracy_lower_bound",
    "data.accuracy_upper_bound": "filters.accuracy_upper_bound",
    "data.filter_truncated": "filters.filter_truncated",
    "data.filter_format": "filters.filter_format",
    f"{MODEL}.path": "policy",
    f"{MODEL}.enable_gradient_checkpointing": "engine.gradient_checkpointing",
    f"{MODEL}.lora_rank": "lora.rank",
    f"{ACTOR}.optim.lr": "engine.learning_rate",
    f"{ACTOR}.optim.weight_decay": "engine.weight_decay",
    f"{ACTOR}.optim.lr_warmup_steps": "engine.warmup_updates",
    f"{ACTOR}.ppo_mini_batch_size": "algorithm.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs": "algorithm.ppo_epochs",
    f"{ACTOR}.shuffle": "algorithm.shuffle",
    f"{ACTOR}.grad_clip": "engine.gradient_clip",
    f"{ACTOR}.clip_ratio_high": "algorithm.clip_ratio_high",
    f"{ACTOR}.clip_ratio_low": "algorithm.clip_ratio_low",
    f"{ACTOR}.entropy_coeff": "algorithm.entropy_coeff",
    f"{ROLLOUT}.temperature": "sampling.temperature",
    "algorithm.gamma": "algorithm.discount",
    "algorithm.lam": "algorithm.gae_lambda",
    "trainer.test_freq": "eval_every",
    "trainer.save_freq": "save_policy_every",
}

# Options that ask for nothing that can be chosen here, and why.
_CHECKPOINT = "the checkpoint says it"
_NOT_SPLIT = "it has no effect on the result, and memory is set with ppo_micro_batch_size"
UNUSED: Mapping[str, str] = {
    "data.oversample_factor": "a further wave asks for exactly the groups that the filter took away",
    "data.val_batch_size": "evaluation.episodes says how many episodes are evaluated; all workers run them",
    "data.max_prompt_length": "prompts are padded to the longest of a batch",
    "data.max_response_length": "the number of action tokens comes from the checkpoint",
    f"{MODEL}.action_token_len": _CHECKPOINT,
    f"{MODEL}.use_remove_padding": "padding is not attended to",
    f"{ACTOR}.optim.warmup_style": "the learning rate stays constant after the warmup",
    f"{ACTOR}.fsdp_config.grad_offload": "gradients are sharded, and go with the weights if these are offloaded",
    f"{ACTOR}.num_images_in_input": "that of the rollout is used",
    f"{ROLLOUT}.micro_batch_size": "each worker's observation is served when it arrives",
    f"{ROLLOUT}.val_micro_batch_size": "each worker's observation is served when it arrives",
    f"{ROLLOUT}.experiment_name": "the run's directory names it",
    f"{ROLLOUT}.model_family": _CHECKPOINT,
    f"{ROLLOUT}.vla": "that of the model is used",
    f"{ROLLOUT}.action_chunks_len": "that of the model is used",
    f"{ROLLOUT}.task_suite_name": "data.task_suite_name is used",
    f"{ROLLOUT}.pretrained_checkpoint": "actor_rollout_ref.model.path is used",
    f"{ROLLOUT}.num_steps_wait": "LIBERO's world lets objects settle before each episode",
    f"{ROLLOUT}.max_prompt_length": "prompts are padded to the longest of a batch",
    f"{ROLLOUT}.log_prob_micro_batch_size": _NOT_SPLIT,
    f"{ROLLOUT}.tensor_model_parallel_size": "weights are sharded over the ranks",
    f"{ROLLOUT}.name": "the policy acts by itself",
    f"{ROLLOUT}.gpu_memory_utilization": "no memory is set aside; `understudy plan` tells what a run takes",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _NOT_SPLIT,
    "actor_rollout_ref.ref.fsdp_config.param_offload": "the reference is only there with a KL, and goes as the weights",
    "critic.model.path": "a value head on the policy's network is the critic",
    "critic.optim.lr": "the value head has the learning rate of the policy",
    "algorithm.adv_params.verifier_gamma": "one reward at the end of an episode",
    "algorithm.adv_params.reward_model_gamma": "there is no reward model",
    "verifier.reward_coef": "advantages are normalized, so a factor would change nothing",
    "reward_model.enable": "success is the reward",
    "trainer.project_name": "the run's directory names it",
    "trainer.experiment_name": "the run's directory names it",
    "trainer.default_hdfs_dir": "the run's directory has everything",
    "trainer.val_before_train": "the first policy is always evaluated",
    "trainer.runtime_env": "no processes of Ray are started; `--cluster` does that",
}
_COMBINED = (
    "data.task_suite_name",
    "data.train_batch_size",
    "data.num_trials_per_task",
    f"{MODEL}.vla",
    f"{MODEL}.action_chunks_len",
    f"{MODEL}.lora_alpha",
    f"{MODEL}.target_modules",
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ACTOR}.traj_mini_batch_size",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    PARAM_OFFLOAD,
    OPTIMIZER_OFFLOAD,
    f"{ROLLOUT}.num_images_in_input",
    f"{ROLLOUT}.use_proprio",
    f"{ROLLOUT}.unnorm_key",
    f"{ROLLOUT}.center_crop",
    "algorithm.adv_estimator",
    "algorithm.kl_ctrl.type",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.target_kl",
    "algorithm.kl_ctrl.horizon",
    "trainer.default_local_dir",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_only",
    "trainer.logger",
    "trainer.wandb_mode",
)
# Those of them that only an OpenVLA checkpoint needs.
_OF_OPENVLA = (
    f"{MODEL}.vla",
    f"{MODEL}.action_chunks_len",
    f"{ROLLOUT}.num_images_in_input",
    f"{ROLLOUT}.unnorm_key",
    f"{ROLLOUT}.center_crop",
)


def translate(given: Mapping[str, Any], *, gpu: bool, count_tasks: Callable[[str], int]) -> TrainCommand:
    """The command for the options of a script. `count_tasks` tells how many tasks a world has, by its name.

    Without a `gpu`, nothing is moved to host memory.
    """
    for name in given:
        if name not in RENAMED and name not in UNUSED and name not in _COMBINED:
            known = [*RENAMED, *UNUSED, *_COMBINED]
            advice = did_you_mean(name, known, "docs/guides/from-simplevla-rl.md lists those that are known")
            raise UnderstudyError(f"verl.trainer.main_ppo: there is no option {name!r} here; {advice}")
    kind = _choice(given, "algorithm.adv_estimator", KINDS, "grpo")
    ranks = _ranks(given)
    options: dict[str, Any] = {
        "policy": _needed(given, f"{MODEL}.path"),
        "env": world_of(_needed(given, "data.task_suite_name"), proprio=bool(given.get(f"{ROLLOUT}.use_proprio"))),
        **DEFAULTS,
        **{ours: given[theirs] for theirs, ours in RENAMED.items() if theirs in given},
    }
    openvla = is_openvla(options["policy"])
    if openvla:
        options |= _openvla(given)
    notes = _notes(given, openvla=openvla, gpu=gpu)
    if given.get("trainer.val_only"):
        return evaluation(options, notes)
    options |= _batches(given, ranks)
    options |= _kl(given)
    options |= _engine(given, ranks, gpu)
    options["iterations"] = _iterations(given, options["env"], count_tasks)
    if "save_policy_every" in options:
        options["checkpoint_every"] = min(options["save_policy_every"], 5)
    if "wandb" in (given.get("trainer.logger") or ()) and given.get("trainer.wandb_mode") != "disabled":
        options["sinks"] = ("wandb",)
    if options.get("lora.rank") == 0:
        del options["lora.rank"]
    run = Path(str(given.get("trainer.default_local_dir") or "runs/simplevla-rl"))
    return TrainCommand(kind=kind, run=run, options=options, ranks=ranks, notes=notes)


def world_of(suite: str, *, proprio: bool = False, tasks: list[str] | None = None) -> str:
    """The world of a suite of tasks: LIBERO as published checkpoints saw it, or a world by its name here."""
    if suite.startswith("robotwin"):
        raise UnderstudyError(f"task suite {suite!r}: RoboTwin is not here; put it behind a world (docs/worlds.md)")
    if not suite.startswith("libero_"):
        return suite
    state = "&state=axis_angle" if proprio else ""
    chosen = "&tasks=[" + ",".join(f'"{task}"' for task in tasks) + "]" if tasks else ""
    return f"libero:{suite}?stock=true&size=256{state}{chosen}"


def _openvla(given: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint of OpenVLA or OpenVLA-OFT is read."""
    kind = _choice(given, f"{MODEL}.vla", {"openvla-oft": "parallel", "openvla": "autoregressive"}, "openvla-oft")
    images = int(given.get(f"{ROLLOUT}.num_images_in_input", 1))
    if not 1 <= images <= len(LIBERO_CAMERAS):
        raise UnderstudyError(f"{ROLLOUT}.num_images_in_input: expected 1 or 2 with LIBERO, got {images}")
    found = {
        "openvla.decoding": kind,
        "openvla.block_steps": int(given.get(f"{MODEL}.action_chunks_len", 8 if kind == "parallel" else 1)),
        "openvla.cameras": LIBERO_CAMERAS[:images],
        "openvla.center_crop": bool(given.get(f"{ROLLOUT}.center_crop", False)),
        "openvla.mirror": True,
        "openvla.libero_gripper": True,
        "openvla.resize": "jpeg_lanczos",
        "engine.precision": "bfloat16",
    }
    if given.get(f"{ROLLOUT}.unnorm_key"):
        found["openvla.unnorm_key"] = given[f"{ROLLOUT}.unnorm_key"]
    if given.get(f"{ROLLOUT}.use_proprio"):
        found["openvla.use_proprio"] = ("state",)
    return found


def _batches(given: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "data.train_batch_size" in given:  # there it counts starts, here episodes
        found["plan.data_batch_size"] = int(given["data.train_batch_size"]) * int(given.get("data.n_samples", 8))
    if given.get(f"{ACTOR}.use_dynamic_bsz") and given.get(f"{ACTOR}.ppo_max_token_len_per_gpu"):
        found["algorithm.ppo_micro_batch_size"] = None
        found["algorithm.max_tokens"] = int(given[f"{ACTOR}.ppo_max_token_len_per_gpu"])
    elif f"{ACTOR}.ppo_micro_batch_size" in given:  # there it counts trajectories of all ranks, each cut in pieces
        trajectories = max(int(given[f"{ACTOR}.ppo_micro_batch_size"]) // ranks, 1)
        found["algorithm.ppo_micro_batch_size"] = trajectories * int(given.get(f"{ACTOR}.traj_mini_batch_size", 8))
    return found


def _kl(given: Mapping[str, Any]) -> dict[str, Any]:
    coefficient = float(given.get("algorithm.kl_ctrl.kl_coef") or 0.0)
    if coefficient == 0.0:
        return {}
    found: dict[str, Any] = {"algorithm.kl_in": "reward", "algorithm.kl_coef": coefficient}
    controller = _choice(given, "algorithm.kl_ctrl.type", {"fixed": "fixed", "adaptive": "adaptive"}, "fixed")
    if controller == "adaptive":
        found["algorithm.kl_controller"] = controller
        for theirs, ours in (("target_kl", "kl_target"), ("horizon", "kl_horizon")):
            if f"algorithm.kl_ctrl.{theirs}" in given:
                found[f"algorithm.{ours}"] = float(given[f"algorithm.kl_ctrl.{theirs}"])
    return found


def _engine(given: Mapping[str, Any], ranks: int, gpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if ranks > 1:
        found["engine.parallel"] = "fsdp"
    if gpu and ranks > 1 and given.get(PARAM_OFFLOAD):
        found["engine.offload_parameters"] = True
    if gpu and given.get(OPTIMIZER_OFFLOAD):
        found["engine.offload_optimizer"] = True
    if given.get(f"{MODEL}.lora_rank"):
        if f"{MODEL}.lora_alpha" in given:
            found["lora.alpha"] = float(given[f"{MODEL}.lora_alpha"])
        targets = given.get(f"{MODEL}.target_modules", "all-linear")
        if targets != "all-linear":
            found["lora.targets"] = tuple(targets) if isinstance(targets, list) else (str(targets),)
    return found


def _iterations(given: Mapping[str, Any], world: str, count_tasks: Callable[[str], int]) -> int:
    """An epoch there uses each start of each task once, before groups are filtered."""
    if given.get("trainer.total_training_steps"):
        return int(given["trainer.total_training_steps"])
    trials = int(given.get("data.num_trials_per_task", TRIALS_PER_TASK))
    starts = count_tasks(world) * trials
    per_epoch = max(starts // int(given.get("data.train_batch_size", 64)), 1)
    return int(given.get("trainer.total_epochs", 1)) * per_epoch


def _ranks(given: Mapping[str, Any]) -> int:
    if int(given.get("trainer.nnodes", 1)) > 1:
        raise UnderstudyError(
            "trainer.nnodes: a script starts the ranks of one machine here, got "
            f"{given['trainer.nnodes']}; run the printed command with torchrun on each machine (docs/ranks.md)"
        )
    return int(given.get("trainer.n_gpus_per_node", 1))


def _notes(given: Mapping[str, Any], *, openvla: bool, gpu: bool) -> tuple[str, ...]:
    notes = [f"{name}={given[name]} changes nothing here: {UNUSED[name]}" for name in given if name in UNUSED]
    if not openvla:
        named = [name for name in _OF_OPENVLA if name in given]
        notes += [f"{name}={given[name]} changes nothing here: the policy file says it" for name in named]
    if not gpu:
        offloaded = [name for name in (PARAM_OFFLOAD, OPTIMIZER_OFFLOAD) if given.get(name)]
        notes += [f"{name}=True changes nothing here: there is no GPU" for name in offloaded]
    return tuple(notes)


def _needed(given: Mapping[str, Any], name: str) -> str:
    if given.get(name) in (None, ""):
        raise UnderstudyError(f"{name}: expected a value, got none; set it in the script")
    return str(given[name])


def _choice(given: Mapping[str, Any], name: str, choices: Mapping[str, str], default: str) -> str:
    value = given.get(name, default)
    if value not in choices:
        raise UnderstudyError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return choices[value]
