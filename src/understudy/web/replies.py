"""Replies: texts that are safe to send in an HTTP reply."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError


def validation_text(error: Exception) -> str:
    """The first thing that is wrong with the body of a request, in one sentence."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return printable(f"{path[:100]}: {first['msg'][:200]}")


def printable(text: str) -> str:
    """The text without halves of characters, which JSON can carry and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
