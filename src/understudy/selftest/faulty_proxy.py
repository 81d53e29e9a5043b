"""Faulty proxy: a TCP link with faults that a test injects.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| accepting thread | the port | `accept`; a pause while the port is shut | a client; time |
| two pumps for each link, one each way | one end of the link | `recv`, `send`; a freeze | either end; `cut`, `heal` |

Bytes keep their order. A freeze and a delay hold them back, `silence` discards all bytes of the links that are open
now, `drop` and `repeat` change one run of bytes without notice to either end.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Literal, TypeAlias

from understudy.core.closeable import Closeable

Corruption: TypeAlias = Literal["drop", "repeat"]

READ_BYTES = 1 << 16
MAX_RUN_BYTES = 2000  # of bytes that are dropped or repeated
CONNECT_TIMEOUT_S = 5.0
POLL_S = 0.02  # how often the accepting thread checks whether the port is to be closed


class Proxy(Closeable):
    """Forwards `host:port` to `target_port` on the same host. Use as a context manager."""

    def __init__(self, target_port: int, *, port: int = 0, host: str = "127.0.0.1", seed: int = 0):
        self._target = (host, target_port)
        self._rng = random.Random(seed)
        self._changed = threading.Condition()  # guards all below
        self._links: set[_Link] = set()
        self._delay_s = 0.0
        self._frozen = False
        self._refusing = False
        self._corruptions: dict[bool, list[Corruption]] = {
            True: [],
            False: [],
        }  # waiting for bytes, by direction: to the target?
        self._closed = False
        self.num_faults: Counter[str] = Counter()  # runs of bytes that were changed, links that were cut or silenced
        self._listener: socket.socket | None = self._listen((host, port))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._accept, name=f"proxy:{self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all links, and end the threads."""
        with self._changed:
            self._closed = True
        self.heal()
        self._thread.join()
        for link in self._cut_links():
            link.join()

    # ---- faults

    def cut(self) -> None:
        """Close all connections."""
        self.num_faults["cut"] += len(self._cut_links())

    def refuse(self, *, on: bool) -> None:
        """Close the port, so that connecting fails at once; open connections stay."""
        with self._changed:
            self._refusing = on

    def delay(self, seconds: float) -> None:
        """Hold back each run of bytes for this long."""
        with self._changed:
            self._delay_s = seconds

    def freeze(self, *, on: bool) -> None:
        """Forward nothing until it is switched off; then forward all that came meanwhile."""
        with self._changed:
            self._frozen = on
            self._changed.notify_all()

    def silence(self) -> None:
        """Discard from now on all bytes of the connections that are open now, and leave them open."""
        with self._changed:
            for link in self._links:
                link.silent = True
                self.num_faults["silence"] += 1

    def corrupt(self, what: Corruption, *, to_target: bool) -> None:
        """Drop, or send twice, a run of the next bytes in this direction."""
        with self._changed:
            self._corruptions[to_target].append(what)

    def heal(self) -> None:
        """End all lasting faults; what was cut, silenced, dropped or repeated stays so."""
        with self._changed:
            self._delay_s, self._frozen, self._refusing = 0.0, False, False
            self._corruptions = {True: [], False: []}
            self._changed.notify_all()

    @property
    def num_links(self) -> int:
        with self._changed:
            return len(self._links)

    def _cut_links(self) -> list[_Link]:
        with self._changed:
            links = list(self._links)
        for link in links:
            link.close()
        with self._changed:
            self._changed.notify_all()  # the pumps that wait for the end of a freeze
        return links

    # ---- the accepting thread

    @staticmethod
    def _listen(address: tuple[str, int]) -> socket.socket:
        listener = socket.create_server(address, backlog=64)  # with SO_REUSEADDR
        listener.settimeout(POLL_S)
        return listener

    def _accept(self) -> None:
        while not self._closed:
            self._open_or_close()
            if self._listener is None:
                time.sleep(POLL_S)
                continue
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._connect(client)
        if self._listener is not None:
            self._listener.close()

    def _open_or_close(self) -> None:
        if self._refusing and self._listener is not None:
            self._listener.close()
            self._listener = None
        elif not self._refusing and self._listener is None:
            self._listener = self._listen((self._target[0], self.port))

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=CONNECT_TIMEOUT_S)
        except OSError:  # the target does not listen, so the proxy closes too
            client.close()
            return
        for end in (client, server):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server)
        with self._changed:
            self._links.add(link)
        link.start(self)

    # ---- the pumps

    def pump(self, link: _Link, source: socket.socket, sink: socket.socket) -> None:
        """Forward in one direction until either end is closed; then close the other."""
        to_target = sink is link.server
        try:
            while data := source.recv(READ_BYTES):
                data = self._through(link, data, to_target=to_target)
                if data:
                    sink.sendall(data)
        except OSError:  # it was cut, or reset
            pass
        link.close()
        with self._changed:
            self._links.discard(link)

    def _through(self, link: _Link, data: bytes, *, to_target: bool) -> bytes:
        """The bytes to forward instead of `data`."""
        if self._delay_s:
            time.sleep(self._delay_s)
        with self._changed:
            self._changed.wait_for(lambda: not self._frozen or link.closed)
            if link.silent:
                return b""
            if not self._corruptions[to_target]:
                return data
            corruption = self._corruptions[to_target].pop(0)
            self.num_faults[corruption] += 1
        start = self._rng.randrange(len(data))
        run = data[start : start + self._rng.randint(1, MAX_RUN_BYTES)]
        rest = data[start + len(run) :]
        return data[:start] + rest if corruption == "drop" else data[:start] + run + run + rest


class _Link:
    """A client, the connection to the target that was made for it, and the two threads between them."""

    def __init__(self, client: socket.socket, server: socket.socket):
        self.client = client
        self.server = server
        self.silent = False
        self.closed = False
        self._lock = threading.Lock()
        self._ended = 0  # pumps
        self._threads: list[threading.Thread] = []

    def start(self, proxy: Proxy) -> None:
        for source, sink in ((self.client, self.server), (self.server, self.client)):
            thread = threading.Thread(target=self._run, args=(proxy, source, sink), name="pump", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _run(self, proxy: Proxy, source: socket.socket, sink: socket.socket) -> None:
        proxy.pump(self, source, sink)
        with self._lock:
            self._ended += 1
            last = self._ended == 2
        if last:  # not before: a pump still uses the file descriptors
            self.client.close()
            self.server.close()

    def close(self) -> None:
        """Shut down both ends, and wake the pumps."""
        self.closed = True
        for end in (self.client, self.server):
            with suppress(OSError):  # already closed
                end.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def free_port(host: str = "127.0.0.1", count: int = 1) -> int:
    """The first of `count` free ports in a row.

    They are outside the range of outgoing connections, so that none of those takes a port before it is opened, or
    between two openings; and two processes that run side by side choose in different parts of it.
    """
    lowest = 20_000 + os.getpid() % 12 * 1_000
    for first in random.Random().sample(range(lowest, lowest + 1_000 - count), 100):
        try:
            for port in range(first, first + count):
                socket.create_server((host, port)).close()
        except OSError:
            continue
        return first
    raise OSError(f"{host}: none of 100 ports from {lowest} on is free; end what listens there")
