"""Protocol: the names of the calls, the small messages, and how errors are sent.

Arrays are sent as in message.py, everything else as JSON. No pickle: a message cannot carry code.
"""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import grpc

from understudy.core import (
    CopiedError,
    EpisodeError,
    FencedError,
    RefusedError,
    SequenceError,
    SpecError,
    StoreClosedError,
    StoreError,
    StoreFailedError,
    TooManyFilesError,
    UnavailableError,
    UnderstudyError,
    WireError,
)

# What gRPC has left as garbage waits, when it is collected, for threads that a forked process does not have. So such a
# process never collects what was there at the fork.
os.register_at_fork(after_in_child=gc.freeze)

VERSION = 1  # raised when neighbours could no longer work together without knowing each other's version
SERVICE = "understudy.Delivery"
WRITE, SAMPLE, PUBLISH, SUBSCRIBE, STATUS, REQUEST = "Write", "Sample", "Publish", "Subscribe", "Status", "Request"
COMPACT = "Compact"
DEFAULT_PORT = 7447

TOKEN_KEY = "authorization"
ERROR_KEY = "understudy-error"
LAST_SEQ_KEY = "understudy-last-seq"
CHECKS_KEY = "understudy-checks"


class ReplacedError(StoreError):
    """A server has another store than the one that a sampler began with."""


# Errors that keep their class on the wire; others arrive as the nearest of these, or as a StoreError.
_ERRORS: dict[str, type[UnderstudyError]] = {
    kind.__name__: kind
    for kind in (
        CopiedError,
        EpisodeError,
        FencedError,
        RefusedError,
        ReplacedError,
        SequenceError,
        SpecError,
        StoreError,
        StoreFailedError,
        WireError,
    )
}


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def status_of(error: UnderstudyError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """An error as the server sends it: gRPC status, text, and its class name in the trailer."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "StoreError")
    if isinstance(error, RefusedError):
        code = grpc.StatusCode.UNAUTHENTICATED
    elif isinstance(error, FencedError):
        code = grpc.StatusCode.FAILED_PRECONDITION
    elif isinstance(error, StoreFailedError | StoreClosedError | TooManyFilesError | UnavailableError):
        code = grpc.StatusCode.UNAVAILABLE
    else:
        code = grpc.StatusCode.INVALID_ARGUMENT
    trailer = [(ERROR_KEY, name)]
    if isinstance(error, FencedError):
        trailer.append((LAST_SEQ_KEY, str(error.last_seq)))
        trailer.append((CHECKS_KEY, json.dumps(error.checks)))
    return code, str(error)[:1000].encode("ascii", "replace").decode(), tuple(trailer)


_OUR_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
}


def error_of(error: grpc.RpcError, address: str) -> UnderstudyError:
    """The error that a client raises for a failed call."""
    code, text = error.code(), error.details() or ""
    if code in _OUR_CODES:
        trailer = dict(error.trailing_metadata() or ())
        kind = _ERRORS.get(str(trailer.get(ERROR_KEY)), RefusedError)
        if issubclass(kind, FencedError):
            checks = json.loads(trailer.get(CHECKS_KEY, "[]"))  # an older server sends none
            return kind(text, last_seq=int(trailer.get(LAST_SEQ_KEY, -1)), checks=checks)
        return kind(text)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(f"{address}: does not know this call ({text}); is it an understudy server of this version?")
    return UnavailableError(f"{address}: {_shorten(code, text)}; is `understudy serve` running there?")


def _shorten(code: grpc.StatusCode, text: str) -> str:
    """GRPC's own text, shortened to its last and most specific part."""
    specific = text.rpartition("errors: ")[2].rpartition("Failed to connect to remote host: ")[2][:200]
    kind = code.name.lower().replace("_", " ")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind, specific = "no answer in time", "" if specific.lower() == kind else specific
    return f"{kind}: {specific}".rstrip(": ")


def check_version(message: dict[str, Any], *, other: str) -> None:
    """Refuse a client or a server (`other`) that is more than one version away; one without a number has version 1.

    Versions that are neighbours understand each other: fields that one side does not know are ignored.
    """
    found = message.get("version", 1)
    if type(found) is not int:
        raise WireError(f"version: expected a whole number, got {str(found)[:40]}; is it an understudy {other}?")
    if not max(VERSION - 1, 1) <= found <= VERSION + 1:
        older = other if found < VERSION else "server" if other == "client" else "client"
        raise RefusedError(
            f"the {other} speaks version {found} of the protocol, and this side version {VERSION}; that is more than "
            f"one apart: update the {older} with `pip install --upgrade understudy-robotics`"
        )
