"""`understudy demo`: demonstrations, behaviour cloning and RLPD in a few minutes on a laptop's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from understudy.cli.console import needs_extra

DIRECTORY = Path("understudy-demo")


def command(
    directory: Annotated[Path, tyro.conf.Positional] = DIRECTORY,
    *,
    seed: int | None = None,
    steps: int | None = None,
    episodes: int | None = None,
    page: str | None = None,
) -> int:
    """Train a gripper on a small task: demonstrations, behaviour cloning, then RLPD with fewer and fewer interventions.

    Needs no account, network, GPU or graphics driver. Stop it at any time with Ctrl-C: the same command continues, to
    the same result.

    Args:
        directory: Directory of the demo, which becomes an ordinary run.
        seed: Seed of all random numbers; by default 0, or that of the demo in the directory.
        steps: Number of environment steps of RLPD; by default enough for the task, or as in the directory.
        episodes: Number of held-out episodes of each evaluation; by default 100, or as in the directory.
        page: Address (HOST:PORT) of the page that shows the run while it trains, on this machine only; or `none`. By
            default 127.0.0.1:7449, or any free port if that one is taken.
    """
    with needs_extra("train"):
        import PIL  # noqa: F401  # for the videos: fail now instead of at the end

        from understudy.cli.tools.demo_stages import run_demo

    return run_demo(directory, seed=seed, steps=steps, episodes=episodes, page=page)
