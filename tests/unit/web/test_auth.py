"""The checks in front of an app, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from understudy.web.auth import MAX_BODY_BYTES, LoginCookie, Message, PageAuth, ProgramAuth, Receive, Send, page_headers
from understudy.web.errors import AccessError

TOKEN = "0123456789abcdef"
Auth = Callable[[MutableMapping[str, Any], Receive, Send], Any]


async def echo(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Answers with the number of bytes of the body."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": str(size).encode()})


def ask(
    auth: Auth, *, path: str = "/api/x", method: str = "GET", pieces: tuple[bytes, ...] = (b"",), **headers: str
) -> tuple[int, str, dict[str, str]]:
    sent: list[Message] = []
    bodies = [
        {"type": "http.request", "body": piece, "more_body": number + 1 < len(pieces)}
        for number, piece in enumerate(pieces)
    ]

    async def receive() -> Message:
        return bodies.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:5", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
    }
    asyncio.run(auth(scope, receive, send))
    start, *rest = sent
    text = b"".join(message["body"] for message in rest).decode()
    replied = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], text if start["status"] == 200 else json.loads(text)["detail"], replied


def page_auth(token: str | None = TOKEN, host: str = "127.0.0.1", hosts: tuple[str, ...] = ()) -> PageAuth:
    return PageAuth(
        echo,
        host=host,
        hosts=hosts,
        cookie=LoginCookie(token, port=5),
        is_public=lambda path: not path.startswith("/api/"),
        headers=page_headers("default-src 'none'"),
    )


# ---- programs


def test_programs_show_the_token() -> None:
    auth = ProgramAuth(echo, host="127.0.0.1", token=TOKEN)
    assert ask(auth)[0] == 401
    assert ask(auth, authorization=f"Bearer {TOKEN}x")[0] == 401
    assert ask(auth, authorization=f"Bearer {TOKEN}")[:2] == (200, "0")
    assert ask(ProgramAuth(echo, host="127.0.0.1", token=None))[0] == 200


def test_a_browser_may_not_ask_a_server_for_programs() -> None:
    auth = ProgramAuth(echo, host="127.0.0.1", token=None)
    for origin in ("http://127.0.0.1:5", "null", ""):
        assert ask(auth, origin=origin)[:2] == (403, "origin: a web page may not use this server; use a program")


@pytest.mark.parametrize("host", ["foreign.test", "127.0.0.1.foreign.test", "10.0.0.1", "", "127.0.0.1:1:foreign.test"])
def test_on_loopback_a_foreign_name_is_refused(host: str) -> None:
    assert ask(ProgramAuth(echo, host="127.0.0.1", token=None), host=host)[0] == 403
    elsewhere = ProgramAuth(echo, host="0.0.0.0", token=TOKEN)
    assert ask(elsewhere, host=host, authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_server_for_others_needs_a_token() -> None:
    with pytest.raises(AccessError, match="so a token is required"):
        ProgramAuth(echo, host="0.0.0.0", token=None)
    with pytest.raises(AccessError, match="at least 16 characters"):
        ProgramAuth(echo, host="127.0.0.1", token="short")


# ---- pages


def test_a_page_shows_the_token_or_its_cookie() -> None:
    auth, cookie = page_auth(), LoginCookie(TOKEN, port=5)
    assert ask(auth, path="/")[0] == 200
    status, detail, _ = ask(auth)
    assert (status, detail) == (401, "the token is missing or wrong; open the address that the program printed")
    assert ask(auth, authorization=f"Bearer {TOKEN}")[0] == 200
    assert cookie.exchange("wrong") is None
    value = cookie.exchange(TOKEN)
    assert value is not None
    assert TOKEN not in value
    assert ask(auth, cookie=f"a=b; {cookie.name}={value}")[0] == 200
    for wrong in (f"{cookie.name}={value}x", f"{cookie.name}=", f"other={value}", "\xff=\xff", ";;="):
        assert ask(auth, cookie=wrong)[0] == 401


def test_without_a_token_there_is_no_cookie() -> None:
    assert LoginCookie(None, port=5).exchange("") is None
    assert ask(page_auth(token=None))[0] == 200


def test_a_change_must_come_from_a_page_of_this_server() -> None:
    auth = page_auth(token=None)
    assert ask(auth, method="POST")[0] == 403
    assert ask(auth, method="POST", origin="http://127.0.0.1:5")[0] == 200
    for origin in ("null", "http://foreign.test", "http://127.0.0.1:6", "file://"):
        for method in ("GET", "HEAD", "POST", "DELETE"):
            assert ask(auth, method=method, origin=origin)[0] == 403


def test_a_page_is_asked_for_by_known_names_only() -> None:
    auth = page_auth(token=None, hosts=("lab.test",))
    assert ask(auth, host="lab.test:9")[0] == 200
    for host in ("foreign.test", "10.0.0.1", ""):
        status, detail, _ = ask(auth, path="/", host=host)
        assert status == 421
        assert detail.endswith("use the address that it printed, or --hosts.")


def test_every_reply_to_a_page_has_the_headers() -> None:
    for reply in (ask(page_auth()), ask(page_auth(), path="/"), ask(page_auth(), host="foreign.test")):
        assert reply[2]["content-security-policy"] == "default-src 'none'"
        assert reply[2]["x-frame-options"] == "DENY"
        assert reply[2]["cache-control"] == "no-store"


# ---- sizes


@pytest.mark.parametrize("auth", [ProgramAuth(echo, host="127.0.0.1", token=None), page_auth(token=None)])
def test_a_large_body_is_refused(auth: Auth) -> None:
    origin = {"origin": "http://127.0.0.1:5"} if isinstance(auth, PageAuth) else {}
    half = b" " * (MAX_BODY_BYTES // 2)
    assert ask(auth, method="POST", pieces=(half, half), **origin)[:2] == (200, str(MAX_BODY_BYTES))
    too_large = (413, "body: expected up to 65536 bytes, got more; send less at once")
    assert ask(auth, method="POST", pieces=(half, half, b" "), **origin)[:2] == too_large
    for length in (str(MAX_BODY_BYTES + 1), "9" * 30, "-1", "x"):
        assert ask(auth, method="POST", content_length=length, **origin)[:2] == too_large
