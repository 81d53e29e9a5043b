"""PageServer: serves the operator's page, its files and its messages, in a thread of its own.

    loop             takes from                  blocks on               woken by
    control loop     OperatorInput               nothing                 -
    server's thread  all below, one event loop   the selector            sockets, timers, `close`
      watching       the newest frame, the input 10 ms at a time         its own clock
      reading        a page's messages           its socket              the page
      sending        the newest frame, the state the page's event        watching, reading

Messages are JSON, except frames: the length of a JSON header, the header, and the raw pixels. A page reports each frame
that it has drawn, and at most two are in flight: a slow page gets fewer frames, not older ones, and holds up nobody.

Access control: the Host header must be one of this server's names (against DNS rebinding); a socket is given only to
pages that this server served (Origin); no other site may show the page in a frame; and on any address other than
loopback the page must send the token.
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
from understudy.envs.teleop.browser_messages import RefusedMessage, held_in, number, parse_message
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
MAX_IN_FLIGHT = 2  # frames that a page has not drawn yet
HELLO_S = 5.0
WATCH_S = 0.01
FIRST_PINGS, FIRST_PING_S, PING_S = 5, 0.1, 1.0
SILENT_S = 3.0  # without input from the driver, after which another page may drive
GOING_AWAY, TRY_AGAIN, REFUSED = 1001, 1013, 1008  # codes with which a socket is closed


@dataclass(frozen=True, kw_only=True)
class Image:
    """One camera's image."""

    name: str
    height: int
    width: int
    pixels: bytes  # [height, width, 3] uint8


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """The images and texts that the page shows at one moment."""

    number: int
    episode: int  # number of the episode, so that the page knows when a new one begins
    images: tuple[Image, ...]
    pushes: dict[str, float]  # of the operator, if one drives
    info: dict[str, Any]
    made_s: float = field(default_factory=time.monotonic)

    @cached_property
    def message(self) -> bytes:
        """Encoded once, in the server's thread, for all pages."""
        cameras = [{"name": p.name, "height": p.height, "width": p.width} for p in self.images]
        header = json.dumps(
            {
                "number": self.number,
                "episode": self.episode,
                "cameras": cameras,
                "pushes": self.pushes,
                "info": self.info,
            }
        ).encode()
        return b"".join([struct.pack("<I", len(header)), header, *(p.pixels for p in self.images)])


class PageServer:
    """Serves the page from construction to `close`."""

    def __init__(
        self,
        bindings: KeyBindings,
        operator_input: OperatorInput,
        *,
        host: str,
        port: int,
        or_any_free: bool,
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
        self._socket = listen(host, port, or_any_free=or_any_free)
        self.port: int = self._socket.getsockname()[1]
        self._allowed_hosts = AllowedHosts(host, hosts)
        self.url = page_url(host, self._socket, token)
        self._files = {path: (PAGE / name).read_bytes() for path, (name, _) in FILES.items()}
        self._viewers: list[_Viewer] = []
        self._driver: _Viewer | None = None
        self._frame: Frame | None = None
        self._farewell = ""
        self._closing: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # once the thread runs
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="page-server", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def connected(self) -> bool:
        driver = self._driver
        return driver is not None and driver.clock.known and not driver.silent

    def publish(self, frame: Frame) -> None:
        """Show this frame from now on. Any thread may call.

        The server polls for new frames: waking its thread would give it the interpreter's lock, and on a busy machine
        the control loop would wait milliseconds to get the lock back.
        """
        self._frame = frame

    def close(self, farewell: str = "") -> None:
        """Close all pages, which then show `farewell`: what has been done, in up to 120 characters."""
        self._farewell = farewell
        if self._thread.is_alive():
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._operator_input.release()

    # --- the event loop; everything below runs in its thread

    async def _serve(self) -> None:
        from websockets.asyncio.server import ServerConnection, serve

        opened: set[asyncio.Transport] = set()
        accepted: set[asyncio.Transport] = set()  # browsers open some sockets ahead of time and never use them

        class Connection(ServerConnection):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                opened.add(self.transport)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                opened.discard(self.transport)
                accepted.discard(self.transport)

        async def accept(connection: ServerConnection) -> None:
            accepted.add(connection.transport)
            await self._handle_page(connection)

        self._loop = asyncio.get_running_loop()
        async with serve(
            accept,
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
            watching = asyncio.create_task(self._watch())
            self._ready.set()
            await self._stop.wait()
            watching.cancel()
            await asyncio.gather(*(viewer.connection.close(GOING_AWAY, self._farewell) for viewer in self._viewers))
            for transport in opened - accepted:
                transport.abort()
        while opened:  # sockets that were not closed in time
            for transport in opened:
                transport.abort()
            await asyncio.sleep(0)

    async def _watch(self) -> None:
        """Wake the senders when there is a new frame or the driver has changed."""
        seen: tuple[Frame | None, bool] = (None, False)
        while True:
            await asyncio.sleep(WATCH_S)
            now = (self._frame, self._operator_input.driving)
            if now != seen:
                seen = now
                self._wake_all()

    def _wake_all(self) -> None:
        for viewer in self._viewers:
            viewer.wake.set()

    # --- HTTP

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to an HTTP request; None if it becomes a WebSocket."""
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

    async def _handle_page(self, connection: ServerConnection) -> None:
        """Serve one page from its first message to its last."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            try:
                viewer = await self._handshake(connection)
            except (TimeoutError, RefusedMessage) as error:
                await connection.close(REFUSED, str(error) or "expected a hello")
                return
            if len(self._viewers) >= MAX_VIEWERS:
                await connection.close(TRY_AGAIN, f"{MAX_VIEWERS} pages are open already")
                return
            self._add_viewer(viewer)
            sending = asyncio.create_task(self._send(viewer))
            try:
                async for message in connection:
                    self._handle_message(viewer, parse_message(message))
            except RefusedMessage as error:
                await connection.close(REFUSED, str(error))
            finally:
                self._remove_viewer(viewer)
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                    await sending

    async def _handshake(self, connection: ServerConnection) -> _Viewer:
        hello = parse_message(await asyncio.wait_for(connection.recv(), HELLO_S))
        page, token = hello.get("page"), hello.get("token")
        if hello.get("type") != "hello" or not isinstance(page, str) or not 8 <= len(page) <= 64:
            raise RefusedMessage("expected a hello with the page's name")
        if self._token is not None and not (isinstance(token, str) and token_matches(token, self._token)):
            raise RefusedMessage("the token is missing or wrong; open the address that the program printed")
        return _Viewer(connection=connection, page=page)

    def _add_viewer(self, viewer: _Viewer) -> None:
        before = next((other for other in self._viewers if other.page == viewer.page), None)
        if before is not None:  # the same page has reconnected
            self._remove_viewer(before)
            closing = asyncio.create_task(before.connection.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._viewers.append(viewer)
        self._try_to_drive(viewer)
        self._wake_all()

    def _remove_viewer(self, viewer: _Viewer) -> None:
        if viewer in self._viewers:
            self._viewers.remove(viewer)
        if self._driver is viewer:
            self._release()
        self._wake_all()

    def _try_to_drive(self, viewer: _Viewer) -> None:
        """Make a page the driver if there is none and the action can be driven."""
        if self._bindings.pairs and (self._driver is None or self._driver.silent):
            self._release()
            self._driver = viewer
            viewer.held, viewer.last_input_s = Held(), time.monotonic()

    def _release(self) -> None:
        self._driver = None
        self._operator_input.release()

    # --- messages from a page

    def _handle_message(self, viewer: _Viewer, message: dict[str, Any]) -> None:
        now_s = time.monotonic()
        kind = message.get("type")
        if kind == "input":
            if viewer is self._driver and viewer.clock.known:
                viewer.last_input_s = now_s
                self._apply_input(
                    viewer, held_in(message), min(viewer.clock.to_local(number(message, "made_ms") / 1e3), now_s)
                )
        elif kind == "pong":
            sent_s, page_ms = number(message, "sent_s"), number(message, "page_ms")
            if sent_s in viewer.pings_s:  # ignore replies to pings that were not sent
                viewer.pings_s.clear()
                viewer.clock.add_reply(sent_s=sent_s, page_s=page_ms / 1e3, received_s=now_s)
        elif kind == "drawn":
            shown_s = viewer.in_flight.pop(int(number(message, "number")), None)
            if shown_s is not None:
                viewer.image_s = now_s - shown_s
                viewer.wake.set()
        elif kind == "drive":
            self._try_to_drive(viewer)
            self._wake_all()
        elif kind == "leave":
            if viewer is self._driver:
                self._release()
                self._wake_all()
        else:
            raise RefusedMessage(f"unknown message {str(kind)[:20]!r}")

    def _apply_input(self, viewer: _Viewer, held: Held, made_s: float) -> None:
        """Pass on what the driver holds or has released."""
        before, viewer.held = viewer.held, held
        speed = self._bindings.speed(self._speed, before, held)
        pushes = {name: push * speed for name, push in self._bindings.pushes(held).items()}
        events = list(self._bindings.events(before, held))
        self._operator_input.put(pushes, active=self._bindings.active(held), made_s=made_s, events=events)
        if speed != self._speed or held != before:
            self._speed = speed
            self._wake_all()

    # --- messages to a page

    async def _send(self, viewer: _Viewer) -> None:
        """Send a page new frames and states, as fast as it draws them."""
        await viewer.send_json(
            {
                "type": "welcome",
                "controls": self._bindings.describe(can_discard=self._operator_input.to_the_end),
                "expiry_ms": self._expiry_s * 1e3,
            }
        )
        sent_state: dict[str, Any] = {}
        num_pings, ping_due_s = 0, 0.0
        while True:
            if time.monotonic() >= ping_due_s:
                num_pings += 1
                ping_due_s = time.monotonic() + (FIRST_PING_S if num_pings < FIRST_PINGS else PING_S)
                await self._ping(viewer)
            state = self._state(viewer)
            if state != sent_state:
                sent_state = state
                await viewer.send_json(state)
            frame = self._frame
            if frame is not None and frame.number > viewer.shown and len(viewer.in_flight) < MAX_IN_FLIGHT:
                viewer.shown = frame.number
                viewer.in_flight[frame.number] = frame.made_s
                await viewer.connection.send(frame.message)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(viewer.wake.wait(), max(ping_due_s - time.monotonic(), 0.0))
            viewer.wake.clear()

    async def _ping(self, viewer: _Viewer) -> None:
        now_s = time.monotonic()
        viewer.pings_s.add(now_s)
        await viewer.send_json(
            {
                "type": "ping",
                "sent_s": now_s,
                "round_trip_ms": _ms(viewer.clock.round_trip_s if viewer.clock.known else None),
                "image_ms": _ms(viewer.image_s),
                "input_ms": _ms(self._operator_input.latency_s),
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
    """A page that is open in some browser."""

    connection: ServerConnection
    page: str  # a name that the page chose, and keeps when it reconnects
    clock: PageClock = field(default_factory=PageClock)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    pings_s: set[float] = field(default_factory=set)  # pings without a reply, by their time
    held: Held = field(default_factory=Held)
    last_input_s: float = field(default_factory=time.monotonic)
    shown: int = 0  # number of the last frame that was sent
    in_flight: dict[int, float] = field(default_factory=dict)  # frames sent and not drawn, with the time they were made
    image_s: float | None = None  # from `show` to the page's report that it is drawn

    @property
    def silent(self) -> bool:
        return time.monotonic() - self.last_input_s > SILENT_S

    async def send_json(self, message: dict[str, Any]) -> None:
        await self.connection.send(json.dumps(message))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _import_websockets() -> None:
    try:
        import websockets.asyncio.server  # noqa: F401
    except ImportError as error:
        raise DeviceError(
            f"the page needs the package websockets ({error}); run `pip install 'understudy-robotics[web]'`"
        ) from None
