"""WorldChild: one life of a worker: its process, the channel to it, and the memory they share."""

from __future__ import annotations

import contextlib
import os

from understudy.core import StepSpec
from understudy.envs.workers.channel import Channel, ChannelClosed
from understudy.envs.workers.shared_memory import Layout, SharedArrays, create_memory, size_memory
from understudy.envs.world_factory import WorldFactory
from understudy.processes.child import Child

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# A simulator per core is faster than simulators that each want all cores. Variables that are set win.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorldChild(Child):
    """A process that builds the world of `source`; it says hello on the channel when it has."""

    arena: SharedArrays  # once `open_shared_memory` was called

    def __init__(self, source: WorldFactory, *, block_steps: int):
        self._memory: int | None = create_memory()
        self._statm: int | None = None
        try:
            super().__init__("envs/workers/child_main.py", source, given=(self._memory,), defaults=_ONE_THREAD)
        except BaseException:
            os.close(self._memory)
            raise
        self.channel = Channel(self.socket)
        with contextlib.suppress(ChannelClosed):  # it is dead already; whoever looks after it will see
            request = {"factory": source.factory, "options": source.options, "block_steps": block_steps}
            self.channel.send(request, timeout_s=1.0)

    def open_shared_memory(self, spec: StepSpec, block_steps: int) -> None:
        """Lay out the shared memory, and let the child begin."""
        assert self._memory is not None
        layout = Layout(spec, block_steps)
        size_memory(self._memory, layout.size_bytes)
        self.arena = SharedArrays(layout, self._memory)
        os.close(self._memory)
        self._memory = None
        self.channel.send({"do": "go"}, timeout_s=1.0)

    def close(self) -> None:
        super().close()
        for descriptor in (self._memory, self._statm):
            if descriptor is not None:
                os.close(descriptor)
        self._memory = self._statm = None

    def rss_bytes(self) -> int:
        """Memory of the process; not of those that it started. 0 if it has ended."""
        try:
            if self._statm is None:
                self._statm = os.open(f"/proc/{self.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._statm, 200, 0).split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0
