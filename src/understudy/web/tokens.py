"""Tokens: the secret that clients of a server show. Made, read, checked and compared here and nowhere else."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from understudy.web.errors import AccessError

MIN_TOKEN_LENGTH = 16
_HOW = "make one with `python -c 'import secrets; print(secrets.token_hex(16))'`"


def new_token() -> str:
    """A random token of 32 hexadecimal digits, which is safe in a URL."""
    return secrets.token_hex(16)


def check_token(token: str, *, in_url: bool = False) -> None:
    """Refuse a token that is too short, or with `in_url`, one that cannot stand in a URL as it is."""
    if in_url and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isalnum()):
        raise AccessError(
            f"token: expected at least {MIN_TOKEN_LENGTH} letters and digits, since it is part of a URL, "
            f"got {len(token)} characters; {_HOW}"
        )
    if len(token) < MIN_TOKEN_LENGTH:
        raise AccessError(f"token: expected at least {MIN_TOKEN_LENGTH} characters, got {len(token)}; {_HOW}")


def token_matches(given: str | bytes, token: str) -> bool:
    """Whether somebody showed the token; takes the same time whatever was given."""
    return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), token.encode())


def bearer_matches(header: str | bytes, token: str) -> bool:
    """Whether the value of an Authorization header is `Bearer` and the token."""
    return token_matches(header, f"Bearer {token}")


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{path}: cannot be read ({error}); pass a file that holds the token") from None
    if not token.isascii() or not token.isprintable() or not token:
        raise AccessError(f"{path}: expected a token of plain letters and digits on one line; {_HOW}")
    return token


def write_new_token(path: Path) -> None:
    """Write a new token to a new file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(new_token())
