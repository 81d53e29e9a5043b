"""The first calls of every child process; child.py is the side of the parent.

If the parent dies, the kernel kills the child, even a busy one: the parent holds the other end of a pipe, the lifeline,
and when that closes, the whole process group gets SIGKILL. SIGUSR1 makes the child write the stacks of all threads to
its log, even while something holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any


def enter() -> tuple[socket.socket, list[int]]:
    """Set up the child; returns the socket to the parent, and the other descriptors that it passed."""
    descriptors = [int(argument) for argument in sys.argv[3:]]
    del sys.argv[1:]  # programs that parse arguments find none
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    socket_fd, lifeline_fd, *rest = descriptors
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent(lifeline_fd)
    return socket.socket(fileno=socket_fd), rest


def die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process group when the other end of the pipe closes (Linux; elsewhere EOF must do)."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
        watch = select.poll()
        watch.register(lifeline_fd, 0)
        if watch.poll(0):  # it closed before it was registered
            os._exit(1)


def find(factory: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = factory.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
