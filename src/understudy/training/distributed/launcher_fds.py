"""What launch.py gives to the ranks, beside the environment variables that torchrun sets; no torch in here."""

from __future__ import annotations

import os

from understudy.processes.child_main import die_with_caller

LISTEN_FD = "UNDERSTUDY_RANKS_LISTEN_FD"  # of the socket where the ranks meet; rank 0 only
LIFELINE_FD = "UNDERSTUDY_RANKS_LIFELINE_FD"  # of a pipe that closes when the launcher dies


def take_listener() -> int | None:
    """The descriptor of a socket that listens already, for the rank that keeps the store."""
    given = os.environ.pop(LISTEN_FD, None)
    return None if given is None else int(given)


def die_with_launcher() -> None:
    """Have the kernel kill this rank and all that it started when its launcher dies; nothing without one."""
    given = os.environ.pop(LIFELINE_FD, None)
    if given is not None:
        os.set_inheritable(int(given), False)
        die_with_caller(int(given))
