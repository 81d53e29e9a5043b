"""Protocol: small messages and errors arrive as what they were."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from understudy.core import (
    FencedError,
    RefusedError,
    SpecError,
    StoreClosedError,
    StoreError,
    StoreFailedError,
    UnavailableError,
    UnderstudyError,
    WireError,
)
from understudy.service.wire.message import MAX_JSON_BYTES, from_json, to_json
from understudy.service.wire.protocol import (
    VERSION,
    ReplacedError,
    check_version,
    error_of,
    status_of,
)


class Failed(grpc.RpcError):
    """A failed call, as a client's gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, text: str, trailer: tuple[tuple[str, str], ...] = ()):
        self._parts = code, text, trailer

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._parts[2]


@pytest.mark.parametrize("kind", [RefusedError, ReplacedError, SpecError, StoreError, WireError])
def test_an_error_arrives_as_its_class_with_its_text(kind: type[UnderstudyError]) -> None:
    found = error_of(Failed(*status_of(kind("what, and what to do"))), "host:1")
    assert type(found) is kind
    assert str(found) == "what, and what to do"


def test_a_fenced_error_keeps_the_last_chunk_of_the_server() -> None:
    found = error_of(Failed(*status_of(FencedError("taken", last_seq=41))), "host:1")
    assert isinstance(found, FencedError)
    assert found.last_seq == 41


@pytest.mark.parametrize("error", [StoreFailedError("disk"), StoreClosedError("closed"), UnavailableError("busy")])
def test_an_error_of_the_server_itself_means_that_it_is_unavailable(error: UnderstudyError) -> None:
    found = error_of(Failed(*status_of(error)), "host:1")
    assert type(found) is UnavailableError
    assert str(found).startswith("host:1: unavailable: ")


def test_a_call_that_the_server_does_not_have_is_refused() -> None:
    found = error_of(Failed(grpc.StatusCode.UNIMPLEMENTED, "no such method"), "host:1")
    assert isinstance(found, RefusedError)
    assert "is it an understudy server of this version?" in str(found)


@pytest.mark.parametrize("message", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 1000, b" " * (MAX_JSON_BYTES + 1)])
def test_what_is_no_json_object_is_a_wire_error(message: bytes) -> None:
    with pytest.raises(WireError):
        from_json(message)


def test_a_small_message_comes_back() -> None:
    value: dict[str, Any] = {"version": 1, "name": "ä"}
    assert from_json(to_json(value)) == value


def test_neighbours_are_accepted() -> None:
    for version in (max(VERSION - 1, 1), VERSION, VERSION + 1):
        check_version({"version": version, "a field of tomorrow": 1}, other="client")
    check_version({}, other="server")  # of the first version, which did not tell it


@pytest.mark.parametrize(
    ("other", "version", "update"),
    [
        ("client", VERSION + 2, "server"),
        ("client", VERSION - 2, "client"),
        ("server", VERSION + 2, "client"),
        ("server", VERSION - 2, "server"),
    ],
)
def test_a_version_too_far_away_says_which_side_to_update(other: str, version: int, update: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_version({"version": version}, other=other)
    assert str(caught.value) == (
        f"the {other} speaks version {version} of the protocol, and this side version {VERSION}; that is more than "
        f"one apart: update the {update} with `pip install --upgrade understudy-robotics`"
    )


@pytest.mark.parametrize("version", [True, "1", 1.0, None, [1]])
def test_a_version_that_is_no_number_is_a_wire_error(version: Any) -> None:
    with pytest.raises(WireError, match="version: expected a whole number"):
        check_version({"version": version}, other="client")
