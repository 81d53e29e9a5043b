"""Where the page's server listens, by which names it is known, and the token that is needed off loopback."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence

from understudy.envs.teleop.axes import DeviceError
from understudy.web.access import MIN_TOKEN_LENGTH, is_loopback


def import_websockets() -> None:
    try:
        import websockets.asyncio.server  # noqa: F401
    except ImportError as error:
        raise DeviceError(
            f"the page needs the package websockets ({error}); run `pip install 'understudy[web]'`"
        ) from None


def checked_token(token: str | None, host: str) -> str | None:
    if token is None and not is_loopback(host):
        raise DeviceError(
            f"host {host!r} can be reached from other machines, so a token is required to drive; pass one, such as "
            f"{secrets.token_hex(16)}, or listen on 127.0.0.1 and use `ssh -L`"
        )
    if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isalnum()):
        raise DeviceError(
            f"token: expected at least {MIN_TOKEN_LENGTH} letters and digits, got {len(token)} characters"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeviceError(f"{host}:{port}: cannot listen there ({reason}); choose another port, or 0 for any") from None


class Names:
    """The names by which browsers may ask for a server that listens at `host`."""

    def __init__(self, host: str, hosts: Sequence[str]):
        self._any_address = not is_loopback(host)
        known = {"localhost", "127.0.0.1", "::1", host, *hosts}
        if self._any_address:
            known |= {socket.gethostname(), f"{socket.gethostname()}.local"}
        self._known = {name.lower() for name in known}

    def __contains__(self, asked: str) -> bool:
        """Whether what stands in a Host header, with or without a port, is one of them."""
        name = asked if asked.endswith("]") else asked.rsplit(":", 1)[0]
        name = name.strip("[]").lower()
        if name in self._known:
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return self._any_address  # a number cannot be made to point elsewhere
        return False


def shown_host(host: str) -> str:
    """A name for the address line; for a server on all interfaces, the address that others see."""
    if host in ("0.0.0.0", "::"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the system chooses an interface
            return str(probe.getsockname()[0])
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
