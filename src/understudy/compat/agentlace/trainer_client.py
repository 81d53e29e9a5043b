"""The actor's side of agentlace's trainer: sends transitions to the learner and receives weights.

    client = TrainerClient("actor_env", ip, make_trainer_config(), data_stores={"actor_env": queue}, timeout_ms=3000)
    client.recv_network_callback(update_params)
    queue.insert(transition)
    client.update()

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `update` | the queues | the server's acknowledgement, `timeout_ms` | the outbox's threads |
| periodic update | as `update` | its interval | `stop` |
| network thread | the Subscription | a newer version | the Subscription's thread; `stop` |
| the threads of each outbox, of the Subscription | - | see outbox.py, subscription.py in service/client | - |
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from understudy.compat.agentlace.data_store import QueuedDataStore
from understudy.compat.agentlace.message_pieces import send_in_pieces
from understudy.compat.agentlace.trainer import INTERVENED, LOGGING, STORES, TrainerConfig, to_json_value
from understudy.compat.agentlace.weights import unpack_weights
from understudy.compat.hil_serl.transitions import FIELDS, step_of
from understudy.compat.options import accept_options
from understudy.compat.stitch_episodes import Stitcher
from understudy.core import (
    BacklogError,
    EpisodeInfo,
    RefusedError,
    StepSpec,
    StoreError,
    UnavailableError,
    UnderstudyError,
    WireError,
)
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.step import NO_VERSION
from understudy.core.suggestion import did_you_mean
from understudy.replay.format.segment import digest
from understudy.service import OutboxConfig, Remote, Subscription, connect
from understudy.web.tokens import read_token

logger = logging.getLogger(__name__)

COMMIT_STEPS = 50
QUEUE_STEPS = 8 * COMMIT_STEPS  # in the writer and not yet recorded
MEMORY_BYTES = 128 * 2**20  # in the writer and not yet delivered, without a spool; the rest stays queued
POLL_S = 0.002
LOG_EVERY_S = 10.0
JOIN_TIMEOUT_S = 10.0  # for a callback that does not return

_OPTIONS = (
    "name",
    "server_ip",
    "config",
    "data_store",
    "data_stores",
    "wait_for_server",
    "timeout_ms",
    "token",
    "token_file",
    "spool",
)
_NO_EFFECT = {"log_level": LOGGING}


class TrainerClient:
    """Sends the transitions of an actor to a TrainerServer and receives its weights.

    Several clients may have the same name. With `spool`, a directory for this client alone, what `update` took over
    survives a crash of this process, and the next client with this spool delivers it.
    """

    def __init__(
        self,
        name: str,
        server_ip: str,
        config: Any,
        data_store: QueuedDataStore | None = None,
        data_stores: Mapping[str, QueuedDataStore] | None = None,
        *,
        wait_for_server: bool = False,
        timeout_ms: float = 800,
        token: str | None = None,
        token_file: str | Path | None = None,
        spool: str | Path | None = None,
        **others: Any,
    ):
        accept_options("TrainerClient", others, _NO_EFFECT, _OPTIONS)
        self.name = name
        self.config = TrainerConfig.parse(config)
        self.policy_version = NO_VERSION  # of the last weights that the callback received without an error
        self._ip = server_ip
        self._token = token if token_file is None else read_token(Path(token_file))
        self._timeout_s = timeout_ms / 1000
        self._spool = None if spool is None else Path(spool)
        self._remote = connect(f"{server_ip}:{self.config.port_number}", token=self._token)
        self._lock = threading.Lock()  # one update at a time
        self._stopped = threading.Event()
        self._failure: UnderstudyError | None = None  # of the network thread
        self._subscription: Subscription | None = None
        self._threads: list[threading.Thread] = []
        self._senders: dict[str, _StoreSender] = {}
        self._queues = dict(data_stores or {})
        if data_store is not None:
            self._queues.setdefault(name, data_store)
        if not self._queues:
            raise StoreError(f"client {name!r}: pass data_stores={{name: QueuedDataStore(capacity)}}")
        for store, queue in self._queues.items():
            if not isinstance(queue, QueuedDataStore):
                raise StoreError(
                    f"data store {store!r}: expected a QueuedDataStore of understudy.compat, got {describe(queue)}"
                )
        with ExitStack() as undo:
            for queue in self._queues.values():
                queue.attach(self, lambda: self.policy_version)
                undo.callback(queue.detach)
            undo.callback(self._remote.close)
            if wait_for_server:
                self._wait_for_server()
            undo.pop_all()

    # ---- transitions

    def update(self) -> bool:
        """Send all inserted transitions; True if the server has all of them on disk within `timeout_ms`.

        After False nothing is lost: sending continues in the background and with the next call. An open episode is cut
        here, so its next frame is stored twice.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            self._check_running()
            if not self._senders and not self._connect(self._timeout_s):
                return False
            senders = sorted(self._senders.values(), key=lambda sender: sender.base is not None)
            handed = [sender.send_queued(deadline) for sender in senders]  # all of them, before waiting for the first
            return all(handed) and all(sender.wait_delivered(deadline) for sender in senders)

    def start_async_update(self, interval: float = 10) -> None:
        """Call `update` every `interval` seconds, in a thread."""

        def update_often() -> None:
            while not self._stopped.wait(interval):
                try:
                    self.update()
                except Exception:  # the outermost loop of this thread; the next round tries again
                    if not self._stopped.is_set():
                        logger.exception("client %r: an update failed", self.name)

        self._start_thread(update_often, "update")

    @property
    def num_waiting(self) -> int:
        """Queued transitions plus rows that the server has not acknowledged."""
        return sum(len(queue) for queue in self._queues.values()) + sum(
            sender.num_undelivered for sender in self._senders.values()
        )

    def _connect(self, timeout_s: float) -> bool:
        """Ask the server for the port and the spec of each data store; False if it cannot be reached."""
        try:
            stores = self._remote.request(STORES, timeout_s=max(timeout_s, 0.001))
        except UnavailableError:
            return False
        for name in self._queues:
            if name not in stores:
                advice = did_you_mean(name, stores, "register it there")
                raise RefusedError(f"data store {name!r}: the server has {', '.join(stores)}; {advice}")
        # A unique writer name: a second actor of the same name must not replace the first.
        actor = f"{self.name}-{uuid.uuid4().hex[:12]}"
        senders: dict[str, _StoreSender] = {}
        try:
            for name, queue in self._queues.items():
                remote = connect(f"{self._ip}:{stores[name]['port']}", token=self._token)
                spool = None if self._spool is None else self._spool / quote(name, safe="")
                spec = StepSpec.from_json(stores[name]["spec"])
                senders[name] = _StoreSender(name, queue, remote, actor, spec, spool, stores[name]["capacity"])
            for name, sender in senders.items():
                base = senders.get(str(stores[name].get("human_steps_of")))
                if base is not None:
                    sender.base, base.twin = base, sender
        except BaseException:  # another process has the spool
            for sender in senders.values():
                sender.close()
            raise
        self._senders = senders
        return True

    def _wait_for_server(self) -> None:
        while not self._connect(LOG_EVERY_S):
            logger.warning(
                "client %r: waiting for a server at %s:%d (to be reached from another machine, it needs host=)",
                self.name,
                self._ip,
                self.config.port_number,
            )

    def _check_running(self) -> None:
        if self._stopped.is_set():
            raise StoreError(f"client {self.name!r} was stopped; make a new one")
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    # ---- requests

    def request(self, type: str, payload: Any = None) -> Any:
        """The answer of the server's callback; None, and a warning in the log, if it failed or was too slow."""
        try:
            return send_in_pieces(
                lambda kind, piece: self._remote.request(kind, piece, timeout_s=self._timeout_s),
                type,
                to_json_value(payload, type),
            )
        except (UnavailableError, StoreError, WireError) as error:
            logger.warning("client %r: request %r: %s", self.name, type, error)
            return None

    # ---- weights

    def recv_network_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` in a thread with the newest weights, if there are any, and with each newer version.

        If it raises, the error is logged and the next version is delivered as usual. `policy_version` is the last
        version that it took without an error; transitions that are inserted from then on carry it.
        """
        if self._subscription is not None:
            raise StoreError("recv_network_callback: there is a callback already; call it once")
        self._subscription = subscription = self._remote.parameters()

        def receive() -> None:
            known = None
            while not self._stopped.is_set():
                try:
                    found = subscription.wait(newer_than=known)
                except UnderstudyError as error:
                    logger.error("client %r: weights cannot be received: %s", self.name, error)
                    self._failure = error
                    return
                if found is None:  # closed
                    return
                known = found
                try:
                    callback(unpack_weights(found.tree, found.metadata))
                except Exception:  # the callback is not ours: its error is logged, and the next version follows
                    logger.exception("client %r: the callback failed on version %d", self.name, found.version)
                else:
                    self.policy_version = found.version

        self._start_thread(receive, "network")

    def _start_thread(self, loop: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=loop, name=f"{name}:{self.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> bool:
        """Send what is left and end all threads; False, and an error in the log, if the server lacks some of it."""
        if self._stopped.is_set():
            return self.num_waiting == 0
        try:
            if self.num_waiting:
                self.update()
        except UnderstudyError as error:
            logger.error("client %r: the last update failed: %s", self.name, error)
        self._stopped.set()
        if self._subscription is not None:
            self._subscription.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)
        with self._lock:
            for sender in self._senders.values():
                sender.close()
            self._remote.close()
            for queue in self._queues.values():
                queue.detach()
        if self.num_waiting:
            logger.error(
                "client %r: stopped with %d rows that the server does not have%s",
                self.name,
                self.num_waiting,
                "" if self._spool is None else f"; those that update() took over are in {self._spool}",
            )
        return self.num_waiting == 0


class _StoreSender:
    """Sends the transitions of one queue to one data store of the server.

    A step that a human took stands in two queues, as HIL-SERL's actor inserts it. It is sent once, with the first queue
    and marked; the second data store shows it from there. What stands only in the second is sent to its own store.
    """

    def __init__(
        self,
        name: str,
        queue: QueuedDataStore,
        remote: Remote,
        actor: str,
        spec: StepSpec,
        spool: Path | None,
        capacity: int,
    ):
        self.base: _StoreSender | None = None  # the sender of the steps of which this one's queue has some again
        self.twin: _StoreSender | None = None  # the sender of those
        self._human = name.endswith(INTERVENED)
        self._held: deque[tuple[int, dict[str, Any], int]] = deque()  # with `base`: content, transition, version
        self._all_handed = True
        self._queue = queue
        self._remote = remote
        self._spec = spec
        self._info = EpisodeInfo(actor=actor)
        # A restarted learner has a new store if its buffer was temporary; its port and name are the same.
        config = OutboxConfig(queue_steps=QUEUE_STEPS, block_timeout_s=0.0, accept_any_store=True)
        if spool is None:
            config = replace(config, spool_bytes=MEMORY_BYTES)
        self._writer = remote.writer(
            f"{name}/{actor}", spec, spool=spool, commit_steps=COMMIT_STEPS, flush_each_episode=False, config=config
        )
        self._stitcher = Stitcher(self._writer, max_steps=capacity)
        queue.check_with(lambda transition: step_of(spec, transition))

    def send_queued(self, deadline: float) -> bool:
        """Give the writer all queued transitions; False if it did not accept all of them in time."""
        if self.base is not None and not self.base._all_handed:  # a copy of what is held may still be queued there
            return False
        until = self._queue.latest_data_id()
        if self.twin is not None:
            self.twin._hold_queued()
        self._all_handed = False
        while self._wait_for_space(deadline):
            queued = self._next(until)
            if queued is None:
                self._stitcher.cut()
                self._all_handed = True
                return True
            transition, version = queued
            human = self._human or (self.twin is not None and self.twin._drop_held(transition))
            step, next_observation, succeed = step_of(self._spec, transition, human=human, policy_version=version)
            self._stitcher.add(step, next_observation, self._info, success=succeed)
        return False

    def _next(self, until: int) -> tuple[dict[str, Any], int] | None:
        if self.base is None:
            return self._queue.take(until)
        return self._held.popleft()[1:] if self._held else None

    def _hold_queued(self) -> None:
        """Take what is queued now, to be compared with the steps that the first queue sends."""
        while (queued := self._queue.take()) is not None:
            self._held.append((_content(queued[0]), *queued))

    def _drop_held(self, transition: Mapping[str, Any]) -> bool:
        """Whether a copy of this transition is held here; it is let go then."""
        if not self._held:
            return False
        content = _content(transition)
        for index, (held, _, _) in enumerate(self._held):
            if held == content:
                del self._held[index]
                return True
        return False

    def wait_delivered(self, deadline: float) -> bool:
        """Wait until the server has on disk all that the writer got."""
        return self._wait_for_space(deadline) and self._writer.wait_delivered(_remaining_s(deadline))

    def _wait_for_space(self, deadline: float) -> bool:
        """Wait until the writer accepts a transition: one may cause two commits, before a cut and after it."""
        while self._writer.delivery.queued + 2 * (COMMIT_STEPS + 1) > QUEUE_STEPS:
            if _remaining_s(deadline) == 0:
                with suppress(BacklogError):
                    self._writer.wait_delivered(0)  # raises if the writer has failed for good
                return False
            time.sleep(POLL_S)
        return True

    @property
    def num_undelivered(self) -> int:
        """Rows that the server has not acknowledged."""
        return len(self._held) + self._writer.num_uncommitted + self._writer.delivery.recorded

    def close(self) -> None:
        try:
            self._writer.close(0.0)
        except UnderstudyError as error:
            logger.error("%s", error)
        self._remote.close()


def _content(transition: Mapping[str, Any]) -> int:
    """A number for what a transition holds, equal for equal ones."""
    flat = trees.flatten({name: transition[name] for name in FIELDS if name in transition})
    return digest(np.array([digest(np.ascontiguousarray(leaf)) for leaf in flat.values()], np.uint64))


def _remaining_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
