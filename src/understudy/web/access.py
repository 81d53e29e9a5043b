"""Access: from where a server may be reached, by which names, and from which pages.

A browser sends requests on behalf of any site that its user has open. So a server on this machine looks at the Host
header (a foreign name may have been pointed at 127.0.0.1) and at Origin (which page asks).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from understudy.web.errors import AccessError
from understudy.web.tokens import check_token


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be reached from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_access(host: str, token: str | None, *, in_url: bool = False) -> None:
    """Refuse a weak token, and a server that other machines can reach without one."""
    if token is not None:
        check_token(token, in_url=in_url)
    elif not is_loopback(host):
        raise AccessError(
            f"host {host!r} can be reached from other machines, so a token is required; "
            f"pass one (--token-file), or listen on 127.0.0.1"
        )


def host_name(header: str) -> str:
    """The name or address in a Host header, without its port, in lower case."""
    name = header if header.endswith("]") else header.rsplit(":", 1)[0]
    return name.strip("[]").lower()


class AllowedHosts:
    """The names in a Host header under which browsers may ask a server that listens at `host`.

    `more` are further names, such as that of a proxy. A server that other machines can reach also answers to this
    machine's name and to any address: a number cannot be made to point elsewhere.
    """

    def __init__(self, host: str, more: Sequence[str] = ()):
        self._any_address = not is_loopback(host)
        names = {"localhost", "127.0.0.1", "::1", host, *more}
        if self._any_address:
            names |= {socket.gethostname(), f"{socket.gethostname()}.local"}
        self._names = {name.lower() for name in names}

    def __contains__(self, header: str) -> bool:
        name = host_name(header)
        if name in self._names:
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return self._any_address
        return False


def is_same_origin(origin: str, host: str) -> bool:
    """Whether the page that sends `origin` came from the server that was asked as `host`."""
    return origin in (f"http://{host}", f"https://{host}")
