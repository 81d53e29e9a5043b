"""The actor's side of the trainer: transitions to the learner, and weights back.

    client = TrainerClient("actor_env", ip, make_trainer_config(), data_stores={"actor_env": queue}, timeout_ms=3000)
    client.recv_network_callback(update_params)
    queue.insert(transition)
    client.update()

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `update` | the queues | the server's acknowledgement, `timeout_ms` | the outbox's threads |
| periodic update | as `update` | its interval | `stop` |
| network thread | the Subscription | a newer version | the Subscription's thread; `stop` |
| the threads of each outbox, of the Subscription | - | see service/client/outbox.py, parameters.py | - |
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from understudy.compat.data_store import QueuedDataStore
from understudy.compat.hil_serl import step_of
from understudy.compat.options import refuse
from understudy.compat.stitch import Stitcher
from understudy.compat.trainer import LOGGING, STORES, TrainerConfig, plain
from understudy.core import (
    BacklogError,
    EpisodeInfo,
    RefusedError,
    StepSpec,
    StoreError,
    UnavailableError,
    UnderstudyError,
)
from understudy.core.spec import describe
from understudy.core.step import NO_VERSION
from understudy.service import OutboxConfig, Remote, Subscription, connect
from understudy.web.tokens import read_token

logger = logging.getLogger(__name__)

COMMIT_STEPS = 50
QUEUE_STEPS = 8 * COMMIT_STEPS  # handed over and not yet recorded
MEMORY_BYTES = 128 * 2**20  # handed over and not yet delivered, without a spool; the rest waits in the QueuedDataStore
LOOK_AGAIN_S = 0.002
TELL_AGAIN_S = 10.0
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
_THEIRS = {"log_level": LOGGING}


class TrainerClient:
    """Brings the transitions of an actor to a TrainerServer, and its weights back.

    Any number of clients may have one name. With `spool`, a directory of this client's own, what `update` has handed
    over survives a crash of this process too, and the next client with it delivers it.
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
        refuse("TrainerClient", others, _THEIRS, _OPTIONS)
        self.name = name
        self.config = TrainerConfig.of(config)
        self.policy_version = NO_VERSION  # of the weights that the callback has taken last
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
        self._lines: dict[str, _Line] = {}
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
        """Hand over all that was inserted. True: the server has all of it on disk, every outcome included.

        False: `timeout_ms` were not enough. Nothing is lost; it goes on by itself and with the next call. An episode in
        progress is cut here, so that its next frame is stored twice.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            self._check_running()
            if not self._lines and not self._connect(self._timeout_s):
                return False
            lines = self._lines.values()
            handed = [line.hand_over(deadline) for line in lines]  # all of them, before the first is waited for
            return all(handed) and all(line.wait_delivered(deadline) for line in lines)

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
        """Transitions that no update has handed over, and rows that the server has not acknowledged."""
        return sum(len(queue) for queue in self._queues.values()) + sum(
            line.num_undelivered for line in self._lines.values()
        )

    def _connect(self, timeout_s: float) -> bool:
        """Learn from the server where each data store is and what it holds; False if the server is not there."""
        try:
            stores = self._remote.request(STORES, timeout_s=max(timeout_s, 0.001))
        except UnavailableError:
            return False
        for name in self._queues:
            if name not in stores:
                near = difflib.get_close_matches(name, stores, 1)
                raise RefusedError(
                    f"data store {name!r}: the server has {', '.join(stores)}; "
                    + (f"did you mean {near[0]!r}?" if near else "register it there")
                )
        # Unlike any other writer's: a second actor of the same name must not push the first one aside.
        actor = f"{self.name}-{uuid.uuid4().hex[:12]}"
        lines: dict[str, _Line] = {}
        try:
            for name, queue in self._queues.items():
                remote = connect(f"{self._ip}:{stores[name]['port']}", token=self._token)
                spool = None if self._spool is None else self._spool / quote(name, safe="")
                spec = StepSpec.from_json(stores[name]["spec"])
                lines[name] = _Line(name, queue, remote, actor, spec, spool, stores[name]["capacity"])
        except BaseException:  # another process has the spool
            for line in lines.values():
                line.close()
            raise
        self._lines = lines
        return True

    def _wait_for_server(self) -> None:
        while not self._connect(TELL_AGAIN_S):
            logger.warning(
                "client %r: waiting for a server at %s:%d (it listens off its machine only with host=)",
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
        """What the server's callback answers; None if it failed or `timeout_ms` are over, and the log says which."""
        asked = plain(payload, type)
        try:
            return self._remote.request(type, asked, timeout_s=self._timeout_s)
        except (UnavailableError, StoreError) as error:
            logger.warning("client %r: request %r: %s", self.name, type, error)
            return None

    # ---- weights

    def recv_network_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with each newer version of the weights, in a thread, and with the newest now if there is one.

        What it raises is logged, and the next version comes all the same. `policy_version` is the last that it took;
        transitions that are inserted from then on carry it.
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
                    callback(found.tree)
                except Exception:  # the callback is not ours: its error is told, and the next version still comes
                    logger.exception("client %r: the callback failed on version %d", self.name, found.version)
                else:
                    self.policy_version = found.version

        self._start_thread(receive, "network")

    def _start_thread(self, loop: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=loop, name=f"{name}:{self.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> bool:
        """Hand over what is left and end all threads; False, and a line in the log, if the server does not have it."""
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
            for line in self._lines.values():
                line.close()
            self._remote.close()
            for queue in self._queues.values():
                queue.detach()
        if self.num_waiting:
            logger.error(
                "client %r: stopped with %d rows that the server does not have%s",
                self.name,
                self.num_waiting,
                "" if self._spool is None else f"; what was handed over is in {self._spool}",
            )
        return self.num_waiting == 0


class _Line:
    """From one queue to one store of the server."""

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
        self._queue = queue
        self._remote = remote
        self._spec = spec
        self._info = EpisodeInfo(actor=actor)
        # A learner that starts again has another store, if its buffer was in memory; its port and name are the same.
        config = OutboxConfig(queue_steps=QUEUE_STEPS, block_timeout_s=0.0, accept_any_store=True)
        if spool is None:
            config = replace(config, spool_bytes=MEMORY_BYTES)
        self._writer = remote.writer(
            f"{name}/{actor}", spec, spool=spool, commit_steps=COMMIT_STEPS, flush_each_episode=False, config=config
        )
        self._stitcher = Stitcher(self._writer, max_steps=capacity)
        queue.check_with(lambda transition: step_of(spec, transition))

    def hand_over(self, deadline: float) -> bool:
        """Give the writer all that waits; False if it had no room for all of it in time."""
        while self._wait_for_room(deadline):
            waiting = self._queue.take()
            if waiting is None:
                self._stitcher.cut()
                return True
            transition, version = waiting
            step, next_observation, succeed = step_of(self._spec, transition, policy_version=version)
            self._stitcher.add(step, next_observation, self._info, success=succeed)
        return False

    def wait_delivered(self, deadline: float) -> bool:
        """Wait until the server has on disk all that was handed over."""
        return self._wait_for_room(deadline) and self._writer.wait_delivered(_left(deadline))

    def _wait_for_room(self, deadline: float) -> bool:
        """Wait until the writer takes a transition without complaint: it may commit twice, before a cut and after."""
        while self._writer.delivery.queued + 2 * (COMMIT_STEPS + 1) > QUEUE_STEPS:
            if _left(deadline) == 0:
                with suppress(BacklogError):
                    self._writer.wait_delivered(0)  # if the writer has failed for good, this raises why
                return False
            time.sleep(LOOK_AGAIN_S)
        return True

    @property
    def num_undelivered(self) -> int:
        """Rows that are here and not known to be on the server's disk."""
        return self._writer.num_uncommitted + self._writer.delivery.recorded

    def close(self) -> None:
        try:
            self._writer.close(0.0)
        except UnderstudyError as error:
            logger.error("%s", error)
        self._remote.close()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
