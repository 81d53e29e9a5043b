"""PageServer: the page that people drive from, its files and its messages, in a thread of its own.

    loop             takes from                  blocks on               woken by
    control loop     OperatorInput                       nothing                 -
    server's thread  all below, one event loop   the selector            sockets, timers, `close`
      looking        the newest frame, OperatorInput     10 ms at a time         its own clock
      reading        a page's messages           its socket              the page
      sending        the newest frame, the state the page's event        looking, reading

Messages are JSON, but for frames: the length of a JSON header, the header, and the pixels as they are. A page says
which frame it has drawn, and gets the next when no more than two are on their way: a slow page sees fewer frames, not
older ones, and nobody waits for it.

Who may drive a robot is decided here. The Host must be one that this server is known by, so that no foreign name can be
made to point here. A socket is given only to a page that came from here (Origin), and the page lets no other site show
it in a frame. Off loopback, the page must know the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.envs.teleop.axes import DeviceError
from understudy.envs.teleop.browser_messages import RefusedMessage, held_in, number, parsed
from understudy.envs.teleop.clock import PageClock
from understudy.envs.teleop.key_bindings import Held, KeyBindings
from understudy.envs.teleop.operator_input import OperatorInput
from understudy.web.access import AllowedHosts, check_access, is_same_origin
from understudy.web.auth import page_headers
from understudy.web.listener import listen, page_url
from understudy.web.tokens import token_matches

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

logger = logging.getLogger(__name__)
logger.addFilter(lambda record: "handshake" not in record.getMessage())  # browsers open sockets that they never use

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
SOCKET = "/socket"
HEADERS = page_headers("default-src 'self'; connect-src 'self' ws: wss:; img-src data:; frame-ancestors 'none'")
MAX_MESSAGE_BYTES = 8192
MAX_VIEWERS = 16
MAX_ON_THE_WAY = 2  # frames that a page has not drawn yet
HELLO_S = 5.0
LOOK_S = 0.01
FIRST_PINGS, FIRST_PING_S, PING_S = 5, 0.1, 1.0
SILENT_S = 3.0  # after which a driver is thought to be gone, and somebody else may drive
TRY_AGAIN, REFUSED = 1013, 1008  # codes with which a socket is closed


@dataclass(frozen=True, kw_only=True)
class Image:
    """One camera's image."""

    name: str
    height: int
    width: int
    pixels: bytes  # [height, width, 3] uint8


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """What the page shows at one moment."""

    number: int
    life: int  # counts episodes, so that the page knows when one begins
    images: tuple[Image, ...]
    pushes: dict[str, float]  # what the person pushes, if one drives
    info: dict[str, Any]
    made_s: float = field(default_factory=time.monotonic)

    @cached_property
    def message(self) -> bytes:
        """Made once, in the server's thread, whoever looks on."""
        cameras = [{"name": p.name, "height": p.height, "width": p.width} for p in self.images]
        header = json.dumps(
            {"number": self.number, "life": self.life, "cameras": cameras, "pushes": self.pushes, "info": self.info}
        ).encode()
        return b"".join([struct.pack("<I", len(header)), header, *(p.pixels for p in self.images)])


class PageServer:
    """Serves the page from when it is made until `close`."""

    def __init__(
        self,
        bindings: KeyBindings,
        operator_input: OperatorInput,
        *,
        host: str,
        port: int,
        token: str | None,
        hosts: Sequence[str],
        speed: float,
        expiry_s: float,
    ):
        _import_websockets()
        check_access(host, token, in_url=True)
        self._bindings = bindings
        self._operator_input = operator_input
        self._expiry_s = expiry_s
        self._speed = speed
        self._token = token
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._allowed_hosts = AllowedHosts(host, hosts)
        self.url = page_url(host, self._socket, token)
        self._files = {path: (PAGE / name).read_bytes() for path, (name, _) in FILES.items()}
        self._viewers: list[_Viewer] = []
        self._driver: _Viewer | None = None
        self._frame: Frame | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="page-server", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def connected(self) -> bool:
        driver = self._driver
        return driver is not None and driver.clock.known and not driver.silent

    def publish(self, frame: Frame) -> None:
        """Show this frame from now on. Any thread may call.

        The server looks for it by itself: to wake its thread would be to hand it the interpreter's lock, and on a busy
        machine the control loop would wait for milliseconds to get that back.
        """
        self._frame = frame

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._operator_input.release()

    # --- the event loop, and everything below in its thread

    async def _serve(self) -> None:
        from websockets.asyncio.server import ServerConnection, serve

        opened: set[asyncio.Transport] = set()
        met: set[asyncio.Transport] = set()  # browsers open sockets ahead of time and never use some of them

        class Connection(ServerConnection):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                opened.add(self.transport)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                opened.discard(self.transport)
                met.discard(self.transport)

        async def meet(connection: ServerConnection) -> None:
            met.add(connection.transport)
            await self._meet(connection)

        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with serve(
            meet,
            sock=self._socket,
            process_request=self._answer,
            create_connection=Connection,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            ping_interval=None,
            close_timeout=0.5,
            open_timeout=HELLO_S,
            logger=logger,
            server_header=None,
        ):
            looking = asyncio.create_task(self._look())
            self._ready.set()
            await self._stop.wait()
            looking.cancel()
            for transport in opened - met:
                transport.abort()
        while opened:  # those that did not answer in time
            for transport in opened:
                transport.abort()
            await asyncio.sleep(0)

    async def _look(self) -> None:
        """Wake those who send when there is something new to see."""
        seen: tuple[Frame | None, bool] = (None, False)
        while True:
            await asyncio.sleep(LOOK_S)
            now = (self._frame, self._operator_input.driving)
            if now != seen:
                seen = now
                self._wake_all()

    def _wake_all(self) -> None:
        for viewer in self._viewers:
            viewer.wake.set()

    # --- HTTP

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to an HTTP request; None for the one that becomes a socket."""
        host = request.headers.get("Host", "")
        if host not in self._allowed_hosts:
            return self._refuse(connection, 421, f"This server is not known as {host!r}.")
        path = request.path.partition("?")[0]
        if path == SOCKET:
            origin = request.headers.get("Origin", "")
            if not is_same_origin(origin, host):
                return self._refuse(connection, 403, f"A page from {origin!r} may not drive here.")
            return None
        if path not in self._files:
            return self._refuse(connection, 404, "There is no such page.")
        return self._respond(connection, 200, self._files[path], FILES[path][1])

    def _refuse(self, connection: ServerConnection, status: int, why: str) -> Response:
        logger.info("%s: refused with %d: %s", connection.remote_address, status, why)
        return self._respond(connection, status, f"{why}\n".encode(), "text/plain; charset=utf-8")

    def _respond(self, connection: ServerConnection, status: int, body: bytes, kind: str) -> Response:
        response = connection.respond(status, "")
        response.body = body
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            response.headers.pop(name, None)
            response.headers[name] = value
        return response

    # --- pages

    async def _meet(self, connection: ServerConnection) -> None:
        """One page, from its first message to its last."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            try:
                viewer = await self._greet(connection)
            except (TimeoutError, RefusedMessage) as error:
                await connection.close(REFUSED, str(error) or "expected a hello")
                return
            if len(self._viewers) >= MAX_VIEWERS:
                await connection.close(TRY_AGAIN, f"{MAX_VIEWERS} pages look on already")
                return
            self._join(viewer)
            sending = asyncio.create_task(self._send(viewer))
            try:
                async for message in connection:
                    self._take(viewer, parsed(message))
            except RefusedMessage as error:
                await connection.close(REFUSED, str(error))
            finally:
                self._part(viewer)
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                    await sending

    async def _greet(self, connection: ServerConnection) -> _Viewer:
        hello = parsed(await asyncio.wait_for(connection.recv(), HELLO_S))
        page, token = hello.get("page"), hello.get("token")
        if hello.get("type") != "hello" or not isinstance(page, str) or not 8 <= len(page) <= 64:
            raise RefusedMessage("expected a hello with the page's name")
        if self._token is not None and not (isinstance(token, str) and token_matches(token, self._token)):
            raise RefusedMessage("the token is missing or wrong; open the address that the program printed")
        return _Viewer(connection=connection, page=page)

    def _join(self, viewer: _Viewer) -> None:
        before = next((other for other in self._viewers if other.page == viewer.page), None)
        if before is not None:  # the same page has lost its socket and made a new one
            self._part(before)
            closing = asyncio.create_task(before.connection.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._viewers.append(viewer)
        self._offer(viewer)
        self._wake_all()

    def _part(self, viewer: _Viewer) -> None:
        if viewer in self._viewers:
            self._viewers.remove(viewer)
        if self._driver is viewer:
            self._release()
        self._wake_all()

    def _offer(self, viewer: _Viewer) -> None:
        """Let a page drive if nobody does and there is something to drive."""
        if self._bindings.pairs and (self._driver is None or self._driver.silent):
            self._release()
            self._driver = viewer
            viewer.held, viewer.heard_s = Held(), time.monotonic()

    def _release(self) -> None:
        self._driver = None
        self._operator_input.release()

    # --- what a page says

    def _take(self, viewer: _Viewer, message: dict[str, Any]) -> None:
        now_s = time.monotonic()
        kind = message.get("type")
        if kind == "input":
            if viewer is self._driver and viewer.clock.known:
                viewer.heard_s = now_s
                self._act(viewer, held_in(message), min(viewer.clock.here(number(message, "made_ms") / 1e3), now_s))
        elif kind == "pong":
            asked_s, page_ms = number(message, "asked_s"), number(message, "page_ms")
            if asked_s in viewer.asked_s:  # only what was asked counts
                viewer.asked_s.clear()
                viewer.clock.answered(asked_s=asked_s, page_s=page_ms / 1e3, heard_s=now_s)
        elif kind == "drawn":
            made_s = viewer.on_the_way.pop(int(number(message, "number")), None)
            if made_s is not None:
                viewer.picture_s = now_s - made_s
                viewer.wake.set()
        elif kind == "drive":
            self._offer(viewer)
            self._wake_all()
        elif kind == "leave":
            if viewer is self._driver:
                self._release()
                self._wake_all()
        else:
            raise RefusedMessage(f"unknown message {str(kind)[:20]!r}")

    def _act(self, viewer: _Viewer, held: Held, made_s: float) -> None:
        """The driver holds something, or has let go."""
        before, viewer.held = viewer.held, held
        speed = self._bindings.speed(self._speed, before, held)
        pushes = {name: push * speed for name, push in self._bindings.pushes(held).items()}
        if self._operator_input.put(pushes, active=self._bindings.active(held), made_s=made_s):
            for event in self._bindings.events(before, held):
                if event == "grip":
                    self._operator_input.toggle_grip()
                else:
                    self._operator_input.mark_outcome(event == "success")
        if speed != self._speed or held != before:
            self._speed = speed
            self._wake_all()

    # --- what a page is told

    async def _send(self, viewer: _Viewer) -> None:
        """Tell a page what is new, at the pace at which it takes it."""
        await viewer.tell({"type": "welcome", "controls": self._bindings.describe(), "expiry_ms": self._expiry_s * 1e3})
        told: dict[str, Any] = {}
        num_pings, ping_due_s = 0, 0.0
        while True:
            if time.monotonic() >= ping_due_s:
                num_pings += 1
                ping_due_s = time.monotonic() + (FIRST_PING_S if num_pings < FIRST_PINGS else PING_S)
                await self._ping(viewer)
            state = self._state(viewer)
            if state != told:
                told = state
                await viewer.tell(state)
            frame = self._frame
            if frame is not None and frame.number > viewer.shown and len(viewer.on_the_way) < MAX_ON_THE_WAY:
                viewer.shown = frame.number
                viewer.on_the_way[frame.number] = frame.made_s
                await viewer.connection.send(frame.message)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(viewer.wake.wait(), max(ping_due_s - time.monotonic(), 0.0))
            viewer.wake.clear()

    async def _ping(self, viewer: _Viewer) -> None:
        now_s = time.monotonic()
        viewer.asked_s.add(now_s)
        await viewer.tell(
            {
                "type": "ping",
                "asked_s": now_s,
                "round_trip_ms": _ms(viewer.clock.round_trip_s if viewer.clock.known else None),
                "picture_ms": _ms(viewer.picture_s),
                "hand_ms": _ms(self._operator_input.latency_s),
            }
        )

    def _state(self, viewer: _Viewer) -> dict[str, Any]:
        return {
            "type": "state",
            "you_drive": viewer is self._driver,
            "free": self._driver is None and bool(self._bindings.pairs),
            "num_pages": len(self._viewers),
            "driving": self._operator_input.driving,
            "closed": self._operator_input.closed,
            "speed": self._speed,
        }


@dataclass(eq=False)
class _Viewer:
    """A page that is open somewhere."""

    connection: ServerConnection
    page: str  # a name that it gave itself, and keeps when it connects again
    clock: PageClock = field(default_factory=PageClock)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    asked_s: set[float] = field(default_factory=set)  # pings without an answer
    held: Held = field(default_factory=Held)
    heard_s: float = field(default_factory=time.monotonic)
    shown: int = 0  # number of the last frame that was sent
    on_the_way: dict[int, float] = field(default_factory=dict)  # frames sent and not drawn: made when
    picture_s: float | None = None  # from `show` to the screen and back

    @property
    def silent(self) -> bool:
        return time.monotonic() - self.heard_s > SILENT_S

    async def tell(self, message: dict[str, Any]) -> None:
        await self.connection.send(json.dumps(message))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _import_websockets() -> None:
    try:
        import websockets.asyncio.server  # noqa: F401
    except ImportError as error:
        raise DeviceError(
            f"the page needs the package websockets ({error}); run `pip install 'understudy[web]'`"
        ) from None
