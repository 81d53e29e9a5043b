"""Access: who may reach a server: those on this machine, or whoever knows its token."""

from __future__ import annotations

import ipaddress

from understudy.core.errors import UnderstudyError

MIN_TOKEN_LENGTH = 16


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_access(host: str, token: str | None, refusal: type[UnderstudyError]) -> None:
    """Refuse a short token, and none for a server that other machines can reach."""
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise refusal(
            f"token: expected at least {MIN_TOKEN_LENGTH} characters, got {len(token)}; "
            f"make one with `python -c 'import secrets; print(secrets.token_hex(16))'`"
        )
    if token is None and not is_loopback(host):
        raise refusal(
            f"host {host!r} can be reached from other machines, so a token is required; "
            f"pass --token-file, or listen on 127.0.0.1"
        )
