"""`understudy actor`: the process of an RLPD run that acts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.processes.stop import stop_on_signals

if TYPE_CHECKING:
    from understudy.envs.pace import Pace
    from understudy.envs.teleop.takeover import Takeover
    from understudy.envs.world import World
    from understudy.training.data.run_episode import EpisodeResult, Show


def command(
    run: Annotated[Path, tyro.conf.Positional],
    server: Annotated[str, tyro.conf.Positional],
    *,
    name: str = "actor-0",
    human: Literal["config", "browser", "spacemouse"] = "config",
    operator: str | None = None,
    hz: float | None = None,
    page: str | None = None,
    spool: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Run episodes with the newest policy and write each step to a server, until the learner ends the run.

    Args:
        run: Directory with the run's config.json; on another machine a copy of that file is enough.
        server: Address of the server as HOST:PORT, or of several shards as shard-0=HOST:PORT,shard-1=HOST:PORT.
        name: Name of this actor, which must be unique within the run.
        human: Who may take over: the source in the run's config, or a human at a browser page or a SpaceMouse.
        operator: Name of the human operator, which is stored with each episode.
        hz: Control rate in steps per second; by default 10 with a human, and no limit without.
        page: Address (HOST:PORT) of the page with camera images; by default 127.0.0.1:7448 with a browser, else none.
        spool: Directory on a local disk that keeps steps through a crash until the server has them.
        token_file: File with the server's token, if it needs one.
        tls_cert: File with the server's TLS certificate in PEM format, if it uses one.
    """
    with needs_extra("train"):
        from understudy.cli.operator import open_operator_input, open_pace, open_page
        from understudy.envs.teleop.takeover import Takeover
        from understudy.training.offpolicy.actor import run_actor
        from understudy.training.offpolicy.rlpd import RLPDConfig, make_takeover
        from understudy.training.runs.health import HEALTH, Health
        from understudy.training.runs.run import Run

    console = Console(highlight=False)
    config = Run(run).config(RLPDConfig)
    health = Health(run / HEALTH, role="actor", name=name)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())

        def teleop(world: World) -> tuple[Takeover | None, Pace | None, Show | None]:
            if human == "config":
                show = None if page is None else open_page(stack, console, world, page, watch_only=True).show
                health.page = page_of(show)
                return make_takeover(config, world), open_pace(world, hz, human=False), show
            device, screen = open_operator_input(stack, console, world, human, page, to_the_end=False)
            show = None if screen is None else screen.show
            health.page = page_of(show)
            return Takeover(device, operator=operator), open_pace(world, hz, human=True), show

        newest: int | None = None  # version of the policy in the last episode

        def watch(number: int, episode: EpisodeResult, version: int | None) -> None:
            nonlocal newest
            newest = version
            outcome = "success" if episode.success else "failure"
            console.print(
                f"episode {number}: {outcome} in {episode.num_steps} steps, {episode.num_human} by a human; "
                f"policy {'none yet' if version is None else version}",
                soft_wrap=True,
            )

        number = run_actor(
            config,
            server,
            name=name,
            spool=spool,
            token_file=token_file,
            tls_cert=tls_cert,
            teleop=teleop,
            watch=watch,
            health=health,
            stop=stop,
        )
    console.print(f"finished; {number} episodes", style="green")
    if number and newest is None:
        console.print(
            "no policy arrived before the run had all its steps; start `understudy learner` first, or raise --steps",
            style="yellow",
            soft_wrap=True,
        )
    return 0


def page_of(show: Show | None) -> str | None:
    """The address of the page for the run's health file; without the token, so that readers of it cannot drive."""
    device = getattr(show, "__self__", None)
    return None if device is None else str(device.url).partition("#")[0]
