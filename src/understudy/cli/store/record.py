"""`understudy record`: records demonstrations of a task into a store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console

from understudy.cli.operator import open_operator_input, open_pace, open_page
from understudy.cli.progress import ProgressLine
from understudy.core import UnderstudyError
from understudy.core.cameras import CodecName
from understudy.envs.registry import open_world
from understudy.envs.teleop.takeover import AlwaysScript, Device, Takeover
from understudy.envs.world import World
from understudy.processes.stop import stop_on_signals
from understudy.training import EpisodeResult, RecordConfig, RecordReport, open_target
from understudy.training.data.record import check_target_options, record
from understudy.training.data.run_episode import Show

SIMULATED_NOISE = 0.1  # of the script's actions in a simulated world


def command(
    target: Annotated[str, tyro.conf.Positional],
    *,
    env: str = "toy:pick_red",
    human: Literal["script", "browser", "spacemouse"] = "script",
    successes: int = 20,
    noise: float | None = None,
    operator: str | None = None,
    max_episodes: int | None = None,
    seed: int = 0,
    hz: float | None = None,
    codec: CodecName = "auto",
    page: str | None = None,
    spool: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Record demonstrations of a task, by a script or a human, until enough of them have succeeded.

    Failed episodes are stored with their outcome, and are not in the view `DEMO`. Earlier successes in the store count,
    so an interrupted recording continues where it stopped. The exit code is 1 if there are too few successes.

    Args:
        target: Directory of a store, which is created if needed, or the address of a server (HOST:PORT).
        env: Name of the world and its task, such as metaworld:push-v3; `understudy env list` lists the worlds.
        human: Who demonstrates: the world's script, or a human at a browser page or a SpaceMouse.
        successes: Number of successful demonstrations that the store should have in the end.
        noise: Standard deviation of the noise on the script's actions, so that demonstrations differ; by default 0.1
            in a simulated world, and 0 on a real robot.
        operator: Name of the human operator, which is stored with each episode.
        max_episodes: Number of episodes after which to give up; by default three times the successes.
        seed: Seed of the starts and of the noise.
        hz: Control rate in steps per second; by default 10 for a human, and no limit for a script.
        codec: How camera frames are stored: raw, jpeg, h264 or png; auto continues as the store has begun, and in a
            new one stores frames above 128x128 pixels as h264 and smaller ones raw. jpeg and h264 lose detail.
        page: Address (HOST:PORT) of the page with camera images; by default 127.0.0.1:7448 with a browser, else none.
        spool: Directory on a local disk that keeps steps through a crash until the server has them.
        token_file: File with the server's token, if it needs one.
        tls_cert: File with the server's TLS certificate in PEM format, if it uses one.
    """
    console = Console(highlight=False)
    check_target_options(target, spool=spool, token_file=token_file, tls_cert=tls_cert)
    with ExitStack() as stack:
        with ProgressLine(console, f"starting {env}"):
            world = stack.enter_context(open_world(env))
        task = world.task.name
        config = RecordConfig(
            task=task, successes=successes, max_episodes=max_episodes or 3 * successes, seed=seed, env=env, codec=codec
        )
        if human == "script":
            device: Device = _script(world, noise, seed)
            screen = None if page is None else open_page(stack, console, world, page, watch_only=True)
        else:
            device, screen = open_operator_input(stack, console, world, human, page, to_the_end=True)
        pace = open_pace(world, hz, human=human != "script")
        takeover = Takeover(device, operator=operator)
        opened = stack.enter_context(open_target(target, spool=spool, token_file=token_file, tls_cert=tls_cert))
        line = stack.enter_context(ProgressLine(console, f"record {task}", "successes"))

        def progress(report: RecordReport, episode: EpisodeResult) -> None:
            last = f"last: {'success' if episode.success else 'failure'} in {episode.num_steps} steps"
            line(min(report.num_successes, successes), successes, last)

        show: Show | None = None if screen is None else screen.show
        stop = stack.enter_context(stop_on_signals())
        report = record(world, opened, takeover, config, progress, pace=pace, show=show, stop=stop)
        reached = report.num_successes >= successes
        if screen is not None:
            screen.finish(_farewell(report, successes))
    discarded = f", {report.num_discarded} discarded" if report.num_discarded else ""
    broken = f", {report.num_broken} of them cut because the simulator failed" if report.num_broken else ""
    console.print(
        f"{report.num_successes} successes in {report.num_episodes} episodes of {task}{broken}{discarded} "
        f"({report.num_steps} new steps)",
        style="green" if reached else "red",
        soft_wrap=True,
    )
    kept = pace or getattr(world, "pace", None)  # a real-time world has its own
    if kept is not None and kept.report.num_ticks:
        console.print(str(kept.report), soft_wrap=True)
    return 0 if reached else 1


def _farewell(report: RecordReport, successes: int) -> str:
    """What the page says when the recording is over."""
    if report.num_successes < successes:
        return f"Recording has stopped: {report.num_successes} of {successes} demonstrations have succeeded"
    return "The demonstration is recorded" if successes == 1 else f"All {successes} demonstrations are recorded"


def _script(world: World, noise: float | None, seed: int) -> Device:
    if not world.has_expert:
        raise UnderstudyError(f"human: {world.suite.name} has no scripted expert; demonstrate with --human browser")
    rng = np.random.default_rng(seed)
    chosen = SIMULATED_NOISE * world.simulated if noise is None else noise
    return AlwaysScript(lambda: world.expert_action(noise=chosen, rng=rng).action)
