"""RemoteWriter: a Writer whose store is elsewhere. `append` copies the step into memory and returns.

    with connect("127.0.0.1:7447").writer("arm-1", spec, spool="spool/arm-1") as writer:
        writer.begin(task="pick")
        writer.append(step)
        ...
        writer.end(last_observation)

Steps are recorded on the robot's own disk (`flush` waits for that) and delivered when the server can be reached
(`wait_delivered` waits for that). Without a spool they are in memory until the server has them.
"""

from __future__ import annotations

from understudy.core import DeliveryError, StepSpec
from understudy.core.closing import Closes
from understudy.replay.format.layout import row_bytes_of
from understudy.replay.write.writer import Writer
from understudy.service.client.outbox import Delivery, Outbox

CHUNK_BYTES = 8 * 2**20
CLOSE_TIMEOUT_S = 10.0


class RemoteWriter(Writer, Closes):
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
        most = max(CHUNK_BYTES // row_bytes_of(spec), 1)
        super().__init__(
            outbox, name, incarnation, spec, commit_steps=min(commit_steps, most), flush_each_episode=flush_each_episode
        )

    @property
    def num_uncommitted(self) -> int:
        """Rows that a crash of this process would lose now."""
        return len(self._buffer) + self._outbox.num_unrecorded

    @property
    def delivery(self) -> Delivery:
        """Where the rows are: queued, recorded, delivered, dropped; and whether the server is there."""
        return self._outbox.delivery()

    def flush(self) -> int:
        """Record all that was appended; returns when it is in the spool, which survives this process."""
        self.wait_recorded()
        return self._last_commit

    def wait_recorded(self, timeout_s: float | None = None) -> bool:
        """As `flush`, but False if the time is over before."""
        self._commit()
        return self._outbox.wait_recorded(timeout_s)

    def wait_delivered(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has on disk all that was appended; False if the time is over before."""
        self._commit()
        return self._outbox.wait_delivered(timeout_s)

    def close(self, timeout_s: float | None = CLOSE_TIMEOUT_S) -> None:
        """Record what is left and try to deliver it. What a spool still holds, the next writer with it delivers."""
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
