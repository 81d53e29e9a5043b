"""The options of RIPT-VLA's training scripts, as those of `understudy train rloo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.compat.launch.overrides import flatten, parse_overrides
from understudy.compat.launch.simplevla_rl import world_of
from understudy.compat.launch.train_command import TrainCommand, evaluation, is_openvla
from understudy.core import UnderstudyError

# Options with another name and the same meaning. The second names are those of its multi-task loop.
RENAMED: Mapping[str, str] = {
    "algo.rloo_batch_size": "plan.n_samples",
    "training.n_steps": "iterations",
    "training.num_train_steps": "iterations",
    "training.rollout_steps": "eval_every",
    "training.save_interval": "save_policy_every",
    "training.grad_clip": "engine.gradient_clip",
    "algo.grad_norm_clip_model": "engine.gradient_clip",
    "algo.lr": "engine.learning_rate",
    "algo.weight_decay": "engine.weight_decay",
    "algo.num_ppo_epochs": "algorithm.ppo_epochs",
    "algo.num_epochs": "algorithm.ppo_epochs",
    "algo.ppo_clip_range": "algorithm.clip_ratio_low",
    "algo.ppo_clip_high": "algorithm.clip_ratio_high",
    "algo.max_step_batch_size": "algorithm.ppo_micro_batch_size",
    "algo.max_episode_length": "max_steps",
    "task.max_episode_length": "max_steps",
    "algo.rollouts_per_env": "evaluation.episodes",
    "task.rollouts_per_env": "evaluation.episodes",
    "algo.lora_rank": "lora.rank",
    "seed": "seed",
}

# Options that are used together with others.
_COMBINED = (
    "algo.name",
    "algo.checkpoint_path",
    "algo.lora_adaptor_ckpt",
    "algo.data_batch_size",
    "algo.gradient_accumulation_steps",
    "algo.enable_dynamic_sampling",
    "algo.num_parallel_envs",
    "algo.env_runner.num_parallel_envs",
    "algo.rollout_training_task_names",
    "algo.eval_only",
    "algo.model_seed",
    "task.benchmark_name",
    "task.task_names_to_use",
    "task.num_parallel_envs",
    "train_dataloader.batch_size",
    "exp_name",
    "variant_name",
    "output_prefix",
)
_ENVS = ("algo.env_runner.num_parallel_envs", "algo.num_parallel_envs", "task.num_parallel_envs")

# Options that people set in its scripts and that ask for nothing that can be chosen here.
UNUSED: Mapping[str, str] = {
    "algo.use_laplace_sampling": "what an L1 head predicts is always drawn from a Laplace distribution",
    "logging.mode": "metrics are in the run; --sinks wandb sends them to Weights & Biases, too",
    "algo.scale_factor": "actions are drawn with the scale that they are weighed with",
    "algo.header_checkpoint": "the scale of the L1 head is one number, --openvla.l1-scale, and is trained",
    "algo.fix_scale_head": "the scale of the L1 head is trained",
    "algo.header_lr": "the scale has the learning rate of the policy",
    "algo.log_scale_clip": "the scale of the L1 head is not clipped",
    "algo.early_stop_percentage": "workers go on with other episodes while the last ones of a group are run",
    "algo.use_val_init": "starts of training and of evaluation are apart",
}


def compose(folder: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The options of a script by their paths: those of its config, with its defaults list, and the overrides."""
    if not folder.is_dir():
        raise UnderstudyError(f"{folder}: expected the folder with the configs of the script, got none")
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(folder.resolve()), version_base=None):
            config: Any = hydra_compose(name.removesuffix(".yaml"), list(overrides))
            content: Any = OmegaConf.to_container(config)
            return _resolved(config, list(flatten(content)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UnderstudyError(f"{folder / name}: {' '.join(str(error).split())}") from None


def _resolved(config: Any, paths: Sequence[str]) -> dict[str, Any]:
    """The values at the paths. Some refer to what only the running original knows; they are left out."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found: dict[str, Any] = {}
    for path in paths:
        try:
            value = OmegaConf.select(config, path)
        except OmegaConfBaseException:
            continue
        found[path] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


def translate(given: Mapping[str, Any], *, ranks: int = 1, overrides: Sequence[str] = ()) -> TrainCommand:
    """The command for the options of a script; `overrides` are those that stand in the script itself."""
    if given.get("algo.name", "openvla") not in ("openvla", "openvla_oft"):
        raise UnderstudyError(
            f"algo.name: expected openvla, got {given['algo.name']!r}, a policy that is not here; docs/originals.md"
        )
    if given.get("algo.lora_adaptor_ckpt"):
        raise UnderstudyError(
            "algo.lora_adaptor_ckpt: expected null; merge the adapter into its checkpoint, and train from that one"
        )
    policy = given.get("algo.checkpoint_path")
    if not policy:
        raise UnderstudyError("algo.checkpoint_path: expected a checkpoint or a policy file, got none; set it")
    suite = given.get("task.benchmark_name")
    if not suite:
        raise UnderstudyError("task.benchmark_name: expected a suite such as libero_spatial, got none; set it")
    options: dict[str, Any] = {
        "policy": str(policy),
        "env": world_of(str(suite), tasks=_tasks(given), proprio=is_openvla(policy)),
        "algorithm.mini_batch_unit": "episodes",
        "filters.filter_accuracy": bool(given.get("algo.enable_dynamic_sampling", False)),
        "evaluation.sampling": "sampled",
    }
    if options["filters.filter_accuracy"]:  # groups of one outcome teach nothing
        options |= {"filters.accuracy_lower_bound": 0.01, "filters.accuracy_upper_bound": 0.99}
    options |= {ours: given[theirs] for theirs, ours in RENAMED.items() if given.get(theirs) is not None}
    if given.get("algo.model_seed") is not None:
        options["seed"] = given["algo.model_seed"]
    if options.get("lora.rank") == 0 or not is_openvla(policy):
        options.pop("lora.rank", None)
    samples = int(options.get("plan.n_samples", 8))
    if "algo.data_batch_size" in given:
        options["plan.data_batch_size"] = int(given["algo.data_batch_size"]) * samples
    elif "train_dataloader.batch_size" in given:  # starts of each rank
        options["plan.data_batch_size"] = int(given["train_dataloader.batch_size"]) * samples * ranks
    if "algo.gradient_accumulation_steps" in given:  # episodes of each rank
        options["algorithm.ppo_mini_batch_size"] = int(given["algo.gradient_accumulation_steps"]) * ranks
    envs = next((given[name] for name in _ENVS if given.get(name) is not None), None)
    if envs is not None:
        options["workers.num_parallel_envs"] = int(envs) * ranks
    if is_openvla(policy):
        options |= _openvla(str(suite))
    if "save_policy_every" in options:
        options["checkpoint_every"] = min(int(options["save_policy_every"]), 5)
    if ranks > 1:
        options["engine.parallel"] = "ddp"
    notes = _notes(parse_overrides(overrides))
    if given.get("algo.eval_only"):
        return evaluation(options, notes)
    parts = [given.get(name) for name in ("output_prefix", "exp_name", "variant_name")]
    run = Path(*(str(part) for part in parts if part)) if any(parts) else Path("runs/ript-vla")
    return TrainCommand(kind="rloo", run=run, options=options, ranks=ranks, notes=notes)


def _openvla(suite: str) -> dict[str, Any]:
    """OpenVLA-OFT's published LIBERO checkpoints: two images, proprioception and an L1 head."""
    return {
        "openvla.unnorm_key": f"{suite}_no_noops",
        "openvla.cameras": ("agentview", "wrist"),
        "openvla.use_proprio": ("state",),
        "openvla.center_crop": True,
        "openvla.mirror": True,
        "openvla.libero_gripper": True,
        "openvla.resize": "jpeg_lanczos",
        "engine.precision": "bfloat16",
    }


def _tasks(given: Mapping[str, Any]) -> list[str] | None:
    names = given.get("algo.rollout_training_task_names") or given.get("task.task_names_to_use")
    if not names:
        return None
    if not all(isinstance(name, str) for name in names):
        raise UnderstudyError(
            f"task.task_names_to_use: expected names of tasks, got {names}; `understudy env list --tasks` has them"
        )
    return list(names)


def _notes(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    for name, value in overrides.items():
        if name in RENAMED or name in _COMBINED:
            continue
        reason = UNUSED.get(name, "it belongs to a part of RIPT-VLA that is another one here")
        notes.append(f"{name}={value} changes nothing here: {reason}")
    return tuple(notes)
