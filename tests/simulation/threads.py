"""Threads: simulated ones, of which one runs at a time and the seed decides which.

Product code uses `threading`, `queue`, executors and an event loop. Here they are greenlets that change places only
where a thread would block or take a lock. When nobody can go on, the simulated clock moves to the next timeout, so that
an hour of waiting costs nothing. A thread belongs to a process; `Process.kill` ends all threads of one.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import queue
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import greenlet

SWITCH_AT_LOCKS = 0.15  # how often a thread that takes a free lock lets others go first
LOCKS_PER_COLLECTION = 100  # how often garbage is collected: where Python would do it, a history would not repeat
MAX_SWITCHES = 2_000_000


class Killed(BaseException):
    """Raised in a thread of a killed process, wherever it blocks."""


class Hang(Exception):
    """Nobody can go on, and no timeout will change that; or the threads go round in circles."""


class Process:
    """A process of a simulated machine: what dies together."""

    def __init__(self, name: str):
        self.name = name
        self.alive = True
        self.errors: list[str] = []  # exceptions that ended a thread


class Task:
    """One simulated thread."""

    def __init__(self, name: str, process: Process, function: Callable[[], object], hub: greenlet.greenlet):
        self.name = name
        self.process = process
        self.ready: Callable[[], bool] | None = None  # None: it can go on
        self.deadline_ns: int | None = None
        self.finished = False
        self.event_loop: Any = None  # that runs in this thread
        self._function = function
        self.greenlet = greenlet.greenlet(self._run, parent=hub)

    def _run(self) -> None:
        try:
            if self.process.alive:
                self._function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 (a thread that dies is a finding of its own)
            if self.process.alive:
                self.process.errors.append(f"{self.name}: {error!r}\n{traceback.format_exc()}")
        finally:
            self.finished = True


class Scheduler:
    """Runs the tasks of one history."""

    def __init__(self, library: Any, rng: random.Random):
        self._library = library
        self.rng = rng
        self._hub = greenlet.getcurrent()
        self._tasks: list[Task] = []
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._num_timers = 0
        self.current: Task | None = None
        self.num_switches = 0
        self.num_locks = 0
        self.trace_digest = 0

    @property
    def now_ns(self) -> int:
        return int(self._library.sim_now())

    def spawn(self, name: str, process: Process, function: Callable[[], object]) -> Task:
        task = Task(name, process, function, self._hub)
        self._tasks.append(task)
        return task

    def call_at(self, when_ns: int, function: Callable[[], None]) -> None:
        """Call a function that does not block, at a time of the monotonic clock."""
        self._num_timers += 1
        heapq.heappush(self._timers, (when_ns, self._num_timers, function))

    def call_in(self, delay_s: float, function: Callable[[], None]) -> None:
        self.call_at(self.now_ns + int(delay_s * 1e9), function)

    # ---- in a task

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block the calling thread until `ready()`; False after the timeout."""
        task = self.current
        if task is None:
            raise Hang("the main thread would block")
        if not task.process.alive:
            raise Killed
        task.ready = ready
        task.deadline_ns = None if timeout_s is None else self.now_ns + int(max(timeout_s, 0) * 1e9)
        self._hub.switch()
        task.ready = task.deadline_ns = None
        if not task.process.alive:
            raise Killed
        return ready()

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def give_way(self) -> None:
        """Perhaps collect garbage; perhaps let other threads go first."""
        self.num_locks += 1
        if self.num_locks % LOCKS_PER_COLLECTION == 0:
            gc.collect()
        if self.current is not None and self.current.process.alive and self.rng.random() < SWITCH_AT_LOCKS:
            self.wait(lambda: True)

    # ---- in the main thread

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            now_ns = self.now_ns
            while self._timers and self._timers[0][0] <= now_ns:
                heapq.heappop(self._timers)[2]()
            ready = [
                task
                for task in self._tasks
                if task.ready is None
                or not task.process.alive
                or (task.deadline_ns is not None and now_ns >= task.deadline_ns)
                or task.ready()
            ]
            if ready:
                self._switch_to(ready[int(self.rng.random() * len(ready))])
            else:
                self._advance(now_ns)

    def _advance(self, now_ns: int) -> None:
        """Nobody can go on: let time pass until somebody can."""
        times = [task.deadline_ns for task in self._tasks if task.deadline_ns is not None]
        times += [self._timers[0][0]] if self._timers else []
        if not times:
            raise Hang(f"nobody can go on: {', '.join(task.name for task in self._tasks)}")
        self._library.sim_advance(max(min(times) - now_ns, 0))

    def _switch_to(self, task: Task) -> None:
        self.num_switches += 1
        if self.num_switches > MAX_SWITCHES:
            raise Hang("the threads go round in circles")
        self.trace_digest = hash((self.trace_digest, task.name, self._library.sim_num_calls()))
        self.current = task
        asyncio._set_running_loop(task.event_loop)
        try:
            task.greenlet.switch()
        finally:
            task.event_loop = asyncio._get_running_loop()
            asyncio._set_running_loop(None)
            self.current = None
        if task.finished:
            self._tasks.remove(task)

    def stacks(self) -> str:
        """Where each thread stands, for a report."""
        return "\n".join(
            f"{task.process.name}/{task.name}:\n{''.join(traceback.format_stack(task.greenlet.gr_frame)[-4:])}"
            for task in self._tasks
            if task.greenlet.gr_frame is not None
        )

    def tasks_of(self, process: Process) -> list[Task]:
        return [task for task in self._tasks if task.process is process]


scheduler: Scheduler = None  # type: ignore[assignment] # of the history that runs now


# ---- instead of `threading`


class Lock:
    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler.give_way()
        timeout_s = None if timeout < 0 else timeout
        if self._held and not (blocking and scheduler.wait(lambda: not self._held, timeout_s)):
            return False
        self._held = True
        return True

    def release(self) -> None:
        assert self._held
        self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        me = scheduler.current
        if self._owner is not me or not self._depth:
            scheduler.give_way()
            if self._depth and not blocking:
                return False
            if self._depth:
                scheduler.wait(lambda: not self._depth)
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._depth
        self._depth -= 1

    def release_all(self) -> int:
        depth, self._depth = self._depth, 0
        return depth

    def restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Event] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        notified = Event()
        self._waiting.append(notified)
        depth = self._lock.release_all()
        try:
            scheduler.wait(notified.is_set, timeout)
        finally:
            self._waiting.remove(notified)
            if scheduler.current is not None and scheduler.current.process.alive:
                self._lock.restore(depth)
            else:
                self._lock._depth = max(depth, 1)  # the thread is being killed: let it unwind
        return notified.is_set()

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (result := ready()):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return ready()
            self.wait(left)
        return result

    def notify_all(self) -> None:
        for notified in self._waiting:
            notified.set()

    def notify(self, n: int = 1) -> None:
        for notified in [one for one in self._waiting if not one.is_set()][:n]:
            notified.set()


class Event:
    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or scheduler.wait(lambda: self._set, timeout)


class Thread:
    def __init__(
        self,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "thread",
        daemon: bool = False,
    ):
        self.name = name
        self.daemon = daemon
        self._function = lambda: target(*args, **(kwargs or {}))
        self._task: Task | None = None

    def start(self) -> None:
        assert scheduler.current is not None
        self._task = scheduler.spawn(self.name, scheduler.current.process, self._function)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.finished

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            scheduler.wait(lambda: not self.is_alive(), timeout)


class Queue:
    def __init__(self, maxsize: int = 0):
        self._items: deque[Any] = deque()
        self._maxsize = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if not self._fits() and not (block and scheduler.wait(self._fits, timeout)):
            raise queue.Full
        self._items.append(item)

    def _fits(self) -> bool:
        return not self._maxsize or len(self._items) < self._maxsize

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and not (block and scheduler.wait(lambda: bool(self._items), timeout)):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


def get_ident() -> int:
    return id(scheduler.current)


THREADING = SimpleNamespace(
    **{
        **vars(threading),
        **{made.__name__: made for made in (Thread, Lock, RLock, Condition, Event, get_ident)},
    }
)
QUEUE = SimpleNamespace(**{**vars(queue), "Queue": Queue, "SimpleQueue": Queue})


# ---- executors and the event loop


class Executor:
    """A thread for each call."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "executor"):
        self._name = thread_name_prefix

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        assert scheduler.current is not None
        scheduler.spawn(self._name, scheduler.current.process, lambda: _run_into(future, function, args, kwargs))
        return future

    def map(self, function: Callable[[Any], Any], items: Any) -> Any:
        futures = [self.submit(function, item) for item in items]
        scheduler.wait(lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class InlineExecutor(Executor):
    """Runs each call at once: for threads that only read ahead."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        _run_into(future, function, args, kwargs)
        return future


def _run_into(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except Killed:
        raise
    except BaseException as error:  # noqa: BLE001 (as concurrent.futures does)
        future.set_exception(error)
    else:
        future.set_result(result)


class EventLoop(asyncio.BaseEventLoop):
    """An event loop without sockets, whose waiting is simulated."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._woken = False
        self.set_exception_handler(lambda *_: None)  # tasks of a killed process

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None or timeout > 0:
            scheduler.wait(lambda: self._woken, timeout)
        else:
            scheduler.give_way()
        self._woken = False
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._woken = True

    def wake(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop; from any thread, or from none."""
        if not self.is_closed():
            self.call_soon_threadsafe(function, *args)
