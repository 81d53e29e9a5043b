"""`understudy actor`: the half of a run that acts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.operator import open_hands, open_pace, open_page
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import Takeover
from understudy.envs.world import World
from understudy.training.data.run_episode import Rolled, Show
from understudy.training.runs.health import HEALTH, Health

with needs_extra("train"):
    from understudy.training.offpolicy.actor import run_actor
    from understudy.training.offpolicy.rlpd import RLPDConfig, make_takeover
    from understudy.training.runs.run import Run


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
    """Act with the newest policy and write each step to a server, until the learner says that it is enough.

    Args:
        run: Directory with the run's config.json; on another machine a copy of that file is enough.
        server: Address of the server (host:port), or of several shards (shard-0=host:port,shard-1=host:port).
        name: Its name; each actor of a run needs another.
        human: Who may take over: the script that the config names, or a person at a browser page or a SpaceMouse.
        operator: Name of the person, kept with each episode.
        hz: Steps a second; by default 10 with a person, and as fast as it goes without.
        page: Address (host:port) of the page with live pictures; 127.0.0.1:7448 with a browser, else none.
        spool: Directory on this machine in which steps survive a crash.
        token_file: File with the server's token.
        tls_cert: The server's certificate.
    """
    console = Console(highlight=False)
    config = Run(run).config(RLPDConfig)
    health = Health(run / HEALTH, role="actor", name=name)
    with ExitStack() as undo:

        def hands(world: World) -> tuple[Takeover | None, Pace | None, Show | None]:
            if human == "config":
                show = None if page is None else open_page(undo, console, world, page, watch_only=True).show
                health.page = page_of(show)
                return make_takeover(config, world), open_pace(world, hz, person=False), show
            device, show = open_hands(undo, console, world, human, page, to_the_end=False)
            health.page = page_of(show)
            return Takeover(device, operator=operator), open_pace(world, hz, person=True), show

        def watch(number: int, rolled: Rolled, version: int | None) -> None:
            how = "success" if rolled.success else "failure"
            console.print(
                f"episode {number}: {how} in {rolled.num_steps} steps, {rolled.num_human} by a human; "
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
            hands=hands,
            watch=watch,
            health=health,
        )
    console.print(f"done; {number} episodes", style="green")
    return 0


def page_of(show: Show | None) -> str | None:
    """Where the page is, for whoever watches the run; without the token, so that they cannot drive."""
    device = getattr(show, "__self__", None)
    return None if device is None else str(device.url).partition("#")[0]
