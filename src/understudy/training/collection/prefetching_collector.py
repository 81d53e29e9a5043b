"""PrefetchingCollector: a Collector that runs tickets in a thread while its caller learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from understudy.policies.protocol import BlockPolicy, Sampling
from understudy.training.collection.collector import Collector, MoreTickets
from understudy.training.collection.prefetch import Prefetch
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.shared_tickets import Sharing
from understudy.training.collection.task_start_plan import Ticket


class PrefetchingCollector(Collector):
    """As a Collector; `stream` of tickets that were prefetched yields their rollouts."""

    _prefetch: Prefetch | None = None  # made when it is first needed

    def prefetch(self, tickets: Sequence[Ticket], policy: BlockPolicy, sampling: Sampling) -> None:
        """Begin with tickets that will be asked for, with a policy that nobody changes or uses meanwhile."""
        if tickets:
            self._prefetch = self._prefetch or Prefetch()
            self._prefetch.begin(tickets, super().stream(tickets, policy, sampling))

    def wait_for_prefetched(self) -> None:
        if self._prefetch is not None:
            self._prefetch.wait()

    def stream(
        self,
        tickets: Sequence[Ticket],
        policy: BlockPolicy,
        sampling: Sampling,
        *,
        sharing: Sharing | None = None,
        more: MoreTickets | None = None,
    ) -> Iterator[Rollout]:
        """As `Collector.stream`, after what was prefetched is finished."""
        prefetched = None if self._prefetch is None else self._prefetch.take(tickets)
        if prefetched is not None:
            yield from prefetched
        else:
            yield from super().stream(tickets, policy, sampling, sharing=sharing, more=more)

    def close(self) -> None:
        self.end_streams()
        if self._prefetch is not None:
            self._prefetch.close()
        super().close()
