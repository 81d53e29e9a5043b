"""Listener: the socket of a server, and the URL under which others find it."""

from __future__ import annotations

import contextlib
import errno
import socket

from understudy.web.errors import ListenError


def listen(host: str, port: int, *, or_any_free: bool = False) -> socket.socket:
    """A listening socket at a name or address; port 0 takes any that is free.

    With `or_any_free`, a port that is taken is replaced by a free one: for a default that nobody asked for.
    """
    if not 0 <= port <= 65535:
        raise ListenError(f"{host}:{port}: cannot listen there (a port is 0 to 65535); choose another port (0: any)")
    host = host.strip("[]")
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, port), family=family)
    except OSError as error:
        if or_any_free and error.errno == errno.EADDRINUSE:
            return listen(host, 0)
        raise ListenError(
            f"{host}:{port}: cannot listen there ({error.strerror or error}); stop the server that does, "
            f"or choose another port (0: any)"
        ) from None
    # Connections inherit this. Without it, Nagle's algorithm delays small replies by up to 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def server_url(host: str, listening: socket.socket) -> str:
    """The URL that programs connect to."""
    return f"http://{_reachable_host(host.strip('[]'))}:{listening.getsockname()[1]}"


def page_url(host: str, listening: socket.socket, token: str | None) -> str:
    """The URL to open in a browser; the token stands behind the #, which browsers send to nobody."""
    return f"{server_url(host, listening)}/" + ("" if token is None else f"#token={token}")


def _reachable_host(host: str) -> str:
    """The host for a URL; for a server on all interfaces, the address that other machines use."""
    if host in ("0.0.0.0", "::"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the system chooses an interface
            return str(probe.getsockname()[0])
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
