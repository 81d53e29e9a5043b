"""`understudy rollout`: a policy acts, a human may take over, and everything is recorded."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.operator import open_operator_input, open_pace, open_page
from understudy.cli.progress import ProgressLine
from understudy.core import UnderstudyError
from understudy.core.cameras import CodecName
from understudy.envs.registry import open_world
from understudy.envs.teleop.takeover import ScriptedHuman, Takeover
from understudy.envs.world import World
from understudy.policies.protocol import Sampling
from understudy.processes.stop import stop_on_signals
from understudy.training import EpisodeResult, open_target
from understudy.training.data.record import check_target_options
from understudy.training.data.rollouts import RolloutConfig, RolloutReport, rollout
from understudy.training.data.run_episode import Show

PATIENCE_STEPS = 15
FEW_TAKEOVERS = 4  # with fewer, nothing is said of how they ended


def command(
    target: Annotated[str, tyro.conf.Positional],
    *,
    policy: Path,
    env: str | None = None,
    episodes: int = 20,
    human: Literal["none", "script", "browser", "spacemouse"] = "none",
    takeover_every: int = 1,
    patience_steps: int = PATIENCE_STEPS,
    burst_steps: int | None = None,
    noise: float = 0.0,
    operator: str | None = None,
    greedy: bool = False,
    seed: int = 0,
    hz: float | None = None,
    codec: CodecName = "auto",
    page: str | None = None,
    spool: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Record episodes of a policy, in which a human may take over, as experience for `understudy improve`.

    Each step is stored with who chose its action and, during a takeover, with what the policy would have done. Earlier
    episodes in the store count, so an interrupted rollout continues where it stopped.

    Args:
        target: Directory of a store, which is created if needed, or the address of a server (HOST:PORT).
        policy: Run or file of a policy that decides on blocks of actions, such as one of `understudy sft`.
        env: Name of the world and its task; by default that of the policy's run.
        episodes: Number of episodes of the policy that the store should have in the end.
        human: Who may take over: nobody, the world's script where the task makes no progress, or a human at a browser
            page or a SpaceMouse.
        takeover_every: Number of episodes of which the human watches one; in the others the policy is alone.
        patience_steps: Number of steps without progress after which the script takes over.
        burst_steps: Number of steps of a takeover by the script; None lets it last to the end of the episode.
        noise: Standard deviation of the noise on the script's actions.
        operator: Name of the human operator, which is stored with each episode.
        greedy: Take the policy's most likely actions instead of sampling them.
        seed: Seed of the starts, of what the policy samples and of the noise.
        hz: Control rate in steps per second; by default 10 with a human, and no limit without.
        codec: How camera frames are stored: raw, jpeg, h264 or png; auto continues as the store has begun, and in a
            new one stores frames above 128x128 pixels as h264 and smaller ones raw. jpeg and h264 lose detail.
        page: Address (HOST:PORT) of the page with camera images; by default 127.0.0.1:7448 with a browser, else none.
        spool: Directory on a local disk that keeps steps through a crash until the server has them.
        token_file: File with the server's token, if it needs one.
        tls_cert: File with the server's TLS certificate in PEM format, if it uses one.
    """
    with needs_extra("train"):
        from understudy.policies.load import load_block_policy
        from understudy.training.runs.run import policy_path, run_of
        from understudy.training.runs.threads import use_threads

    console = Console(highlight=False)
    check_target_options(target, spool=spool, token_file=token_file, tls_cert=tls_cert)
    _refuse_without_effect(human, takeover_every, patience_steps, burst_steps, noise, operator)
    if env is None:
        run = run_of(policy)
        if run is None:
            raise UnderstudyError(
                "env: expected the name of a world, because a policy file does not name one; pass --env, such as "
                "--env toy:pick_red"
            )
        env = str(run.metadata["config"]["env"])
    with ExitStack() as stack:
        with ProgressLine(console, f"starting {env}"):
            world = stack.enter_context(open_world(env))
        use_threads(None, large=False)
        loaded = load_block_policy(policy_path(str(policy)), world.step_spec)
        config = RolloutConfig(
            task=world.task.name,
            episodes=episodes,
            seed=seed,
            sampling=Sampling(greedy=greedy),
            takeover_every=takeover_every,
            env=env,
            codec=codec,
        )
        is_person = human in ("browser", "spacemouse")
        takeover: Takeover | None = None
        if human == "browser" or human == "spacemouse":
            device, screen = open_operator_input(stack, console, world, human, page, to_the_end=False)
            takeover = Takeover(device, operator=operator)
        else:
            screen = None if page is None else open_page(stack, console, world, page, watch_only=True)
            if human == "script":
                takeover = Takeover(_script(world, patience_steps, burst_steps, noise, seed), operator="script")
        pace = open_pace(world, hz, human=is_person)
        opened = stack.enter_context(open_target(target, spool=spool, token_file=token_file, tls_cert=tls_cert))
        line = stack.enter_context(ProgressLine(console, f"rollout {config.task}", "episodes"))

        def progress(report: RolloutReport, episode: EpisodeResult) -> None:
            last = f"last: {'success' if episode.success else 'failure'} in {episode.num_steps} steps"
            line(report.num_episodes, episodes, f"{last}, {episode.num_human} by the human")

        show: Show | None = None if screen is None else screen.show
        stop = stack.enter_context(stop_on_signals())
        report = rollout(
            world, opened, loaded, config, takeover=takeover, progress=progress, pace=pace, show=show, stop=stop
        )
        if screen is not None:
            screen.finish(f"All {episodes} episodes are recorded")
    _print_summary(console, report, config.task, human)
    return 0


def _print_summary(console: Console, report: RolloutReport, task: str, human: str) -> None:
    broken = f", {report.num_broken} more cut because the simulator failed" if report.num_broken else ""
    corrected = f" ({report.num_corrected} of these succeeded)" if report.num_takeovers else ""
    console.print(
        f"{report.num_recorded} new episodes of {task}: {report.num_successes} successes, "
        f"{report.num_takeovers} with a takeover{corrected}{broken}; {report.num_steps} steps, {report.num_human} of "
        f"them by the human",
        style="green",
        soft_wrap=True,
    )
    if report.num_takeovers >= FEW_TAKEOVERS and 2 * report.num_corrected < report.num_takeovers:
        earlier = "a smaller --patience-steps" if human == "script" else "an earlier takeover"
        console.print(
            f"most takeovers did not end in success, so they teach how a correction begins and not how it ends: let "
            f"episodes last longer (such as max_steps in the name of the world), or try {earlier}",
            style="yellow",
            soft_wrap=True,
        )


def _refuse_without_effect(
    human: str, takeover_every: int, patience_steps: int, burst_steps: int | None, noise: float, operator: str | None
) -> None:
    """Options of the script, and of a human, that nobody would read."""
    of_script = {
        "patience_steps": patience_steps != PATIENCE_STEPS,
        "burst_steps": burst_steps is not None,
        "noise": noise != 0,
    }
    given = [name for name, was in of_script.items() if was and human != "script"]
    if takeover_every != 1 and human == "none":
        given.append("takeover_every")
    if operator is not None and human in ("none", "script"):
        given.append("operator")
    if given:
        raise UnderstudyError(
            f"{', '.join(given)}: has no effect with --human {human}; leave it out, or choose another --human"
        )


def _script(world: World, patience_steps: int, burst_steps: int | None, noise: float, seed: int) -> ScriptedHuman:
    if not world.has_expert:
        raise UnderstudyError(f"human: {world.suite.name} has no scripted expert; take over with --human browser")
    rng = np.random.default_rng(seed)
    return ScriptedHuman(
        lambda: world.expert_action(noise=noise, rng=rng).action,
        lambda: world.expert_action().progress,
        patience_steps=patience_steps,
        burst_steps=burst_steps,
    )
