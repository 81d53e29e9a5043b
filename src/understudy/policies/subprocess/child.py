"""PolicyChild: one life of a policy's process, and messages to it and from it, each with a deadline."""

from __future__ import annotations

import select
import time
from typing import Any

from understudy.policies.subprocess.child_main import Arrays, receive
from understudy.policies.subprocess.policy_factory import PolicySource
from understudy.processes.child import Child

STACK_WAIT_S = 5.0  # for a hung process to say where it is


class Late(Exception):
    """The deadline is over."""


class Ended(Exception):
    """The process closed its end of the socket."""


class PolicyChild(Child):
    """A process that builds nothing until it is asked to."""

    def __init__(self, source: PolicySource):
        super().__init__("policies/subprocess/child_main.py", source)
        self.socket.setblocking(False)
        self._poll = select.poll()

    def send(self, parts: list[memoryview], deadline: float) -> None:
        """Hand over a message that `encode` made; `Late` if it is not read in time."""
        for part in parts:
            while len(part):
                try:
                    part = part[self.socket.send(part) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                except OSError:
                    raise Ended from None

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        """The next whole message; `Late` if it does not come in time."""

        def fill(buffer: memoryview) -> None:
            while len(buffer):
                try:
                    got = self.socket.recv_into(buffer)
                except BlockingIOError:
                    self._wait(select.POLLIN, deadline)
                    continue
                except OSError:
                    raise Ended from None
                if not got:
                    raise Ended
                buffer = buffer[got:]

        return receive(fill)

    def _wait(self, event: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise Late
        self._poll.register(self.socket, event)
        self._poll.poll(max(1.0, left_s * 1000))

    def where(self) -> str:
        """Where a process that does not answer is, by itself; the end of its log if it does not say."""
        place, stack = self.request_stack(), ""
        deadline = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < deadline and not self.exited():
            time.sleep(0.05)
            before, stack = stack, self.stack(place)
            if stack and stack == before:  # it is written line by line
                break
        return stack or self.log_tail()
