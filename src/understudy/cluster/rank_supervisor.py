"""Learners: the ranks of a run, as the driver keeps them going.

They stand or fall together. If one dies, hangs or cannot be reached, all are ended and started again from the last
checkpoint; if there is no room any more for as many, with fewer. What a rank refuses (a wrong option, a policy that
does not fit) ends the run: it would refuse it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import ClusterError, options, reserve, room
from understudy.cluster.roles.rank import LearnerRank, RankJob, RankLook
from understudy.cluster.status import Event, RoleNow
from understudy.cluster.supervisor import LOOK_S, Lost, idle_s, last_line
from understudy.core import UnderstudyError
from understudy.training.distributed.errors import RanksError
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress

logger = logging.getLogger(__name__)


class _Rank:
    """One of them, and the calls that are on their way to it."""

    def __init__(self, handle: Any):
        self.handle = handle
        self.node: str | None = None
        self.pid: int | None = None
        self.work: Any = None
        self.look: Any = None
        self.looked = time.monotonic()
        self.last: RankLook | None = None


class Learners:
    """`step` until `done`."""

    def __init__(
        self,
        make: Callable[[tuple[str, ...]], RankJob],
        place: ClusterConfig,
        watch: Callable[[OnPolicyProgress], None],
        told: Callable[[list[str]], None],
    ):
        self.events: list[Event] = []
        self.counts = {"reissued": 0, "fenced": 0, "restarts": 0}  # of ranks that are gone
        self.restarts = 0
        self.done = False
        self._make, self._place, self._watch, self._told = make, place, watch, told
        self._ranks: list[_Rank] = []
        self._group: PlacementGroup | None = None
        self._iteration = -1
        self._in_a_row = 0
        self._since_s = time.time()
        self._error: str | None = None

    # ---- for whoever watches

    def roles(self) -> list[RoleNow]:
        found: list[RoleNow] = []
        for number, rank in enumerate(self._ranks):
            health = rank.last.health if rank.last is not None else {}
            found.append(
                RoleNow(
                    role="learner",
                    name=f"rank-{number}",
                    state="up" if rank.last is not None else "starting",
                    node=rank.node,
                    pid=rank.pid,
                    doing=str(health.get("doing", "")),
                    since_s=self._since_s,
                    restarts=self.restarts,
                    error=self._error,
                    stack=health.get("stack"),
                )
            )
            found += rank.last.roles if rank.last is not None else []
        return found

    def totals(self) -> dict[str, int]:
        """Of all ranks there were."""
        live = [rank.last.counts for rank in self._ranks if rank.last is not None]
        return {name: value + sum(one.get(name, 0) for one in live) for name, value in self.counts.items()}

    # ---- what it does

    def start(self) -> None:
        """Find room and begin; with fewer ranks if there is no room for all."""
        place = self._place
        for num in range(place.learner.num, place.learner.least - 1, -1):
            self._group = reserve([place.learner.shape()] * num, wait_s=place.room_s)
            if self._group is not None:
                break
        if self._group is None:
            raise ClusterError(
                f"learner: no room for {place.learner.least} x {place.learner.shape()} within {place.room_s:g} s "
                f"({room()}); lower --place.learner.num, .cpus or .gpus, or add nodes"
            )
        num = self._group.bundle_count
        nodes = _nodes_of(self._group)
        job = self._make(nodes)
        self._ranks = [_Rank(self._actor(index, job)) for index in range(num)]
        host, port = ray.get(self._ranks[0].handle.meeting_point.remote(), timeout=place.room_s)
        for number, rank in enumerate(self._ranks):
            rank.node, rank.pid = ray.get(rank.handle.where.remote(), timeout=place.room_s)
            rank.work = rank.handle.work.remote(number, num, host, port)
        self._since_s = time.time()

    def step(self, addresses: Mapping[str, str]) -> None:
        """Look at all of them; returns soon."""
        try:
            if not self._ranks:
                self.start()
            self._check(addresses)
        except ClusterError as error:  # a node is gone, and another may come
            if not self.restarts:
                raise
            self._again(str(error), error)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UnderstudyError) and not isinstance(cause, RanksError):
                raise cause from None
            self._again(f"{type(cause or error).__name__}: {last_line(cause or error)}", cause)
        except (RayError, Lost) as error:
            self._again(str(error).strip().partition("\n")[0][:500], None)

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank.handle)
        self._ranks = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _actor(self, index: int, job: RankJob) -> Any:
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
        )
        shape = options(self._place.learner, threads=3, scheduling_strategy=strategy)
        return ray.remote(LearnerRank).options(**shape).remote(job)

    def _check(self, addresses: Mapping[str, str]) -> None:
        ready, _ = ray.wait([rank.work for rank in self._ranks], num_returns=len(self._ranks), timeout=0)
        for work in ready:
            ray.get(work)  # raises what ended it
        self.done = len(ready) == len(self._ranks)
        for number, rank in enumerate(self._ranks):
            if rank.look is None and (self.done or time.monotonic() - rank.looked > LOOK_S):
                rank.look, rank.looked = rank.handle.look.remote(dict(addresses)), time.monotonic()
            if rank.look is None:
                continue
            heard, _ = ray.wait([rank.look], timeout=self._place.silent_s if self.done else 0)
            if heard:
                look, rank.look = rank.look, None
                self._hear(number, rank, ray.get(look))
            elif time.monotonic() - rank.looked > self._place.silent_s:
                raise Lost(f"rank {number} did not answer for {self._place.silent_s:g} s")

    def _hear(self, number: int, rank: _Rank, look: RankLook) -> None:
        rank.last = look
        self.events += look.events
        if look.restored and number == 0:
            self._told(look.restored)
        for news in look.news if number == 0 else ():
            if news.iteration > self._iteration:
                self._iteration, self._in_a_row = news.iteration, 0
            self._watch(news)
        if idle_s(look.health) > self._place.stuck_s and not self.done:
            text = f"rank {number} got nothing done for {idle_s(look.health):.0f} s, {look.health['doing']}"
            self.events.append(Event(what="stuck", name=f"rank-{number}", text=text, stack=look.health["stack"]))
            raise Lost(text)

    def _again(self, why: str, cause: BaseException | None) -> None:
        """End all, and begin again from the last checkpoint."""
        self.counts = self.totals()
        self.close()
        self.restarts += 1
        self._in_a_row += 1
        self._error = why
        if self._in_a_row > self._place.max_restarts:
            raise ClusterError(
                f"learners: failed {self._in_a_row} times without an iteration between, the last time: {why}; mend "
                f"that, then `understudy resume`"
            ) from cause
        text = f"the learners are started again from the last checkpoint: {why}"
        logger.warning("%s", text)
        self.events.append(Event(what="learners restarted", name="learners", text=text))


def _nodes_of(group: PlacementGroup) -> tuple[str, ...]:
    found = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return tuple(sorted(set(found.values())))
