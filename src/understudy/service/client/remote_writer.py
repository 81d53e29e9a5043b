"""RemoteWriter: a Writer whose store is behind a server. `append` copies the step into memory and returns.

    with connect("127.0.0.1:7447").writer("arm-1", spec, spool="spool/arm-1") as writer:
        writer.begin(task="pick")
        writer.append(step)
        ...
        writer.end(last_observation)

Steps are recorded in the spool on the robot's own disk (`flush` waits for that) and delivered when the server can be
reached (`wait_delivered` waits for that). Without a spool they stay in memory until the server has them.
"""

from __future__ import annotations

from understudy.core import DeliveryError, StepSpec
from understudy.core.closeable import Closeable
from understudy.replay.format.layout import row_bytes_of
from understudy.replay.write.writer import Writer
from understudy.service.client.outbox import Delivery, Outbox

MAX_CHUNK_BYTES = 8 * 2**20
CLOSE_TIMEOUT_S = 10.0


def _encoded_bytes(spec: StepSpec) -> int:
    """About the most that the encoded frames of a row take."""
    return sum(spec.columns[path].row_bytes // (8 if codec.lossy else 1) for path, codec in spec.encoded.items())


class RemoteWriter(Writer, Closeable):
    """One stream of episodes to a server. Not for several threads at once."""

    def __init__(
        self,
        outbox: Outbox,
        name: str,
        incarnation: str,
        spec: StepSpec,
        *,
        commit_steps: int = 50,
        flush_each_episode: bool = True,
    ):
        self._outbox = outbox
        max_steps = max(MAX_CHUNK_BYTES // (row_bytes_of(spec) + _encoded_bytes(spec)), 1)
        super().__init__(
            outbox,
            name,
            incarnation,
            spec,
            commit_steps=min(commit_steps, max_steps),
            flush_each_episode=flush_each_episode,
        )

    @property
    def num_uncommitted(self) -> int:
        """Rows that a crash of this process would lose now."""
        return len(self._buffer) + self._outbox.num_unrecorded

    @property
    def delivery(self) -> Delivery:
        """How many rows are queued, recorded, delivered and dropped, and whether the server can be reached."""
        return self._outbox.delivery()

    def flush(self) -> int:
        """Record all appended steps; returns when the spool, which survives this process, has them."""
        self.wait_recorded()
        return self._last_commit

    def wait_recorded(self, timeout_s: float | None = None) -> bool:
        """As `flush`, but returns False after the timeout."""
        self._commit()
        return self._outbox.wait_recorded(timeout_s)

    def wait_delivered(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has all appended steps on disk; False after the timeout."""
        self._commit()
        return self._outbox.wait_delivered(timeout_s)

    def close(self, timeout_s: float | None = CLOSE_TIMEOUT_S) -> None:
        """Record what is left and try to deliver it. The next writer with this spool delivers what remains in it."""
        try:
            self._commit()
        finally:
            self._outbox.close(timeout_s)
        left = self.delivery
        if left.queued or (left.recorded and not self._outbox.durable):
            raise DeliveryError(
                f"writer {self.name!r}: closed with {left.queued + left.recorded} rows that the server does not have "
                f"({left.problem or 'it is slow'}); wait longer, or use a spool"
            )
