"""Launcher file descriptors: the socket and the lifeline that launch.py hands to its ranks. Does not import torch."""

from __future__ import annotations

import os

from understudy.processes.child_main import die_with_parent

LISTEN_FD = "UNDERSTUDY_RANKS_LISTEN_FD"  # of the socket where the ranks meet; rank 0 only
LIFELINE_FD = "UNDERSTUDY_RANKS_LIFELINE_FD"  # of a pipe that closes when the launcher dies


def take_listener() -> int | None:
    """The descriptor of the listening socket, for rank 0, which hosts the rendezvous store; None without a launcher."""
    given = os.environ.pop(LISTEN_FD, None)
    return None if given is None else int(given)


def die_with_launcher() -> None:
    """Have the kernel kill this rank and its children when its launcher dies; does nothing without a launcher."""
    given = os.environ.pop(LIFELINE_FD, None)
    if given is not None:
        os.set_inheritable(int(given), False)
        die_with_parent(int(given))
