"""`understudy evaluate`: the success rate of a policy on held-out starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from understudy.cli.console import needs_extra
from understudy.policies.lerobot.config import LeRobotConfig
from understudy.policies.openvla.config import OpenVLAConfig
from understudy.policies.rtc.config import RTCConfig

DEFAULT_LEROBOT = LeRobotConfig()
DEFAULT_OPENVLA = OpenVLAConfig()
DEFAULT_RTC = RTCConfig()


def command(
    policy: Annotated[Path, tyro.conf.Positional],
    *,
    env: str | None = None,
    episodes: int = 100,
    split: Literal["eval", "train", "all"] = "eval",
    sampled: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
    workers: int | None = None,
    threads: int | None = None,
    videos: int = 0,
    out: Path | None = None,
    async_inference: bool = False,
    hz: float | None = None,
    rtc: RTCConfig = DEFAULT_RTC,
    openvla: OpenVLAConfig = DEFAULT_OPENVLA,
    lerobot: LeRobotConfig = DEFAULT_LEROBOT,
) -> int:
    """Evaluate a policy on held-out episodes; prints its success rate with a 95 % interval and a fingerprint.

    Args:
        policy: Directory of a run, what a run kept of an iteration, a file policy.safetensors, the directory of an
            OpenVLA checkpoint, the directory pretrained_model of a policy of lerobot, or a function of your own from an
            observation to an action, as module:function.
        env: Name of the world and its task; by default that of the run. A VLA is evaluated on all tasks of the world.
        episodes: Number of episodes; above the number of starts, starts are used again.
        split: Starts to evaluate on: eval (never used in training), train, or all (a benchmark's protocol, for VLAs).
        sampled: Sample actions as in training, instead of the most likely action.
        temperature: Temperature at which a VLA samples its actions.
        seed: Seed of the world's random numbers and of the sampled actions.
        workers: Number of simulator processes for a VLA; by default the number of CPU cores.
        threads: Number of CPU threads of torch; by default OMP_NUM_THREADS if it is set, else one, or for a VLA one per
            core, up to 8.
        videos: Number of the worst episodes to write as videos, if the world has cameras.
        out: Directory for the result and the videos; by default evaluations/ in the run.
        async_inference: Compute the next block of a block policy while the current one is executed: in a thread if the
            world runs in real time, else as if so many steps passed meanwhile (--rtc.inference-delay).
        hz: Control rate in steps per second, to run a simulated world in real time; only with --async-inference.
        rtc: How a block continues the one before; only with --async-inference.
        openvla: How an OpenVLA checkpoint is used; a run has its own options.
        lerobot: How a policy of lerobot is used, which runs in an interpreter of its own.
    """
    with needs_extra("train"):
        from understudy.cli.training.run_evaluation import run_evaluation

    return run_evaluation(
        policy,
        env=env,
        episodes=episodes,
        split=split,
        sampled=sampled,
        temperature=temperature,
        seed=seed,
        workers=workers,
        threads=threads,
        videos=videos,
        out=out,
        async_inference=async_inference,
        hz=hz,
        rtc=rtc,
        openvla=openvla,
        lerobot=lerobot,
    )
