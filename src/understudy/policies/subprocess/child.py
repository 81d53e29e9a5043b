"""PolicyChild: a policy's process, and messages to it and from it, each with a deadline."""

from __future__ import annotations

import select
import time
from typing import Any

from understudy.policies.subprocess.child_main import Arrays, receive
from understudy.policies.subprocess.policy_factory import PolicyFactory
from understudy.processes.child import Child

STACK_WAIT_S = 5.0  # for a hung process to write its stack


class Late(Exception):
    """The deadline has passed."""


class Ended(Exception):
    """The process closed its end of the socket."""


class PolicyChild(Child):
    """A process that builds the policy when it gets the request to."""

    def __init__(self, factory: PolicyFactory):
        super().__init__("policies/subprocess/child_main.py", factory)
        self.socket.setblocking(False)
        self._poll = select.poll()

    def send(self, parts: list[memoryview], deadline: float) -> None:
        """Send a message that `encode` made; raises Late if it is not read in time."""
        for part in parts:
            while len(part):
                try:
                    part = part[self.socket.send(part) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                except OSError:
                    raise Ended from None

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        """The next whole message; raises Late if it does not come in time."""

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
        """The stack of a process that does not answer; the end of its log if it writes no stack."""
        offset, stack = self.request_stack(), ""
        deadline = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < deadline and not self.exited():
            time.sleep(0.05)
            before, stack = stack, self.stack(offset)
            if stack and stack == before:  # it is written line by line
                break
        return stack or self.log_tail()
