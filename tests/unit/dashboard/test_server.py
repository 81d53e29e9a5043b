"""Who gets in: names, origins, tokens, sizes; and what every answer carries. Over real sockets."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.dashboard.api.app import PAGE
from understudy.dashboard.server import WatchServer
from understudy.web.errors import AccessError

TOKEN = "abcdef0123456789abcdef"
PATHS = (
    "/api/targets",
    "/api/events",
    "/api/runs",
    "/api/0/overview",
    "/api/0/episodes",
    "/api/0/facets",
    "/api/0/episode/1",
    "/api/0/thumbnail/1",
    "/api/0/frames/1?camera=observation/front",
    "/api/0/interventions",
    "/api/0/replay",
    "/api/0/health",
    "/api/exports",
    "/api/0/export/1?format=film",
)


@pytest.fixture
def open_server(store: Path) -> Iterator[WatchServer]:
    with WatchServer([store]) as server:
        yield server


@pytest.fixture
def locked_server(store: Path) -> Iterator[WatchServer]:
    with WatchServer([store], token=TOKEN) as server:
        yield server


def ask(
    server: WatchServer, path: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        more = {"Content-Type": "application/json"} if content is not None else {}
        connection.request(method, path, content, {**more, **(headers or {})})
        answer = connection.getresponse()
        streams = answer.headers["content-type"].startswith("text/event-stream")
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, b"" if streams else answer.read()
    finally:
        connection.close()


def origin(server: WatchServer) -> dict[str, str]:
    return {"Origin": f"http://127.0.0.1:{server.port}"}


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_is_shown(path: str, locked_server: WatchServer) -> None:
    status, _, body = ask(locked_server, path)
    assert status == 401
    assert json.loads(body) == {"detail": "the token is missing or wrong; open the address that the program printed"}
    assert ask(locked_server, path, headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
    for wrong in (f"Bearer {TOKEN}x", "Bearer ", TOKEN, f"Bearer {TOKEN[:-1]}"):
        assert ask(locked_server, path, headers={"Authorization": wrong})[0] == 401


def test_a_page_gets_a_cookie_for_the_token(locked_server: WatchServer) -> None:
    enter = {"token": TOKEN}
    assert ask(locked_server, "/api/enter", "POST", {"token": "wrong"}, origin(locked_server))[0] == 401
    assert ask(locked_server, "/api/enter", "POST", enter)[0] == 403  # from nowhere
    status, headers, _ = ask(locked_server, "/api/enter", "POST", enter, origin(locked_server))
    assert status == 200
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    pair = cookie.partition(";")[0]
    assert ask(locked_server, "/api/0/overview", headers={"Cookie": pair})[0] == 200
    for wrong in (f"{pair}x", pair.replace("=", "=x"), "understudy=1", "\xff=\xff", ";;="):
        assert ask(locked_server, "/api/0/overview", headers={"Cookie": wrong})[0] == 401


def test_a_wish_needs_the_token_too(locked_server: WatchServer) -> None:
    edit = {"action": "delete", "episodes": [1]}
    assert ask(locked_server, "/api/0/edit", "POST", edit, origin(locked_server))[0] == 401
    bearer = {"Authorization": f"Bearer {TOKEN}", **origin(locked_server)}
    assert ask(locked_server, "/api/0/edit", "POST", edit, bearer)[0] == 200


@pytest.mark.parametrize("host", ["foreign.test", "foreign.test:80", "10.0.0.1", "127.0.0.1.foreign.test", ""])
def test_a_foreign_name_is_refused(host: str, open_server: WatchServer) -> None:
    for path in ("/", "/api/targets"):
        assert ask(open_server, path, headers={"Host": host})[0] == 421


def test_names_that_are_given_are_known(store: Path) -> None:
    with WatchServer([store], hosts=["lab.test"]) as server:
        assert ask(server, "/", headers={"Host": f"lab.test:{server.port}"})[0] == 200
        assert ask(server, "/", headers={"Host": f"localhost:{server.port}"})[0] == 200


@pytest.mark.parametrize("foreign", ["http://foreign.test", "null", "http://127.0.0.1:1", "file://"])
def test_a_foreign_page_is_refused(foreign: str, open_server: WatchServer) -> None:
    edit = {"action": "delete", "episodes": [1]}
    for method, path, body in (("POST", "/api/0/edit", edit), ("GET", "/api/targets", None)):
        assert ask(open_server, path, method, body, {"Origin": foreign})[0] == 403


def test_a_change_needs_an_origin_and_a_post(open_server: WatchServer) -> None:
    edit = {"action": "delete", "episodes": [1]}
    assert ask(open_server, "/api/0/edit", "POST", edit)[0] == 403
    assert ask(open_server, "/api/0/edit", headers=origin(open_server))[0] in (404, 405)
    assert ask(open_server, "/api/0/edit", "POST", edit, origin(open_server))[0] == 200


@pytest.mark.parametrize(
    "edit",
    [
        {},
        [],
        {"action": "purge", "episodes": [1]},
        {"action": "delete", "episodes": []},
        {"action": "delete", "episodes": [999]},
        {"action": "delete", "episodes": ["1"]},
        {"action": "delete", "episodes": [True]},
        {"action": "delete", "episodes": [1], "more": 1},
        {"action": "label", "episodes": [1]},
        {"action": "judge", "episodes": [1], "success": "yes"},
        {"action": "restore", "episodes": [1], "success": True},
        {"action": "label", "episodes": [1], "labels": {"a": 1}},
        {"action": "label", "episodes": [1], "labels": {"": "x"}},
        {"action": "label", "episodes": [1], "labels": {"a": "x" * 300}},
        b"{",
        b"\xff",
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_in_words(edit: Any, open_server: WatchServer) -> None:
    status, _, body = ask(open_server, "/api/0/edit", "POST", edit, origin(open_server))
    assert status in (400, 409, 422)
    assert json.loads(body)["detail"]


@pytest.mark.parametrize("number", [2**63, 2**70, -(2**70), 10**400])
def test_a_number_above_64_bits_is_refused_in_words(number: int, open_server: WatchServer) -> None:
    paths = [
        f"/api/0/episode/{number}",
        f"/api/0/thumbnail/{number}",
        f"/api/0/frames/{number}?camera=observation/front",
        f"/api/0/export/{number}?format=film",
        f"/api/0/frames/1?camera=observation/front&first={number}",
        f"/api/0/episodes?offset={abs(number)}",
        f"/api/0/episodes?upto={number}",
        f"/api/0/episodes?text={number}",
        f"/api/0/episodes?limit={number}",
        f"/api/0/workers?role=actor&offset={number}",
    ]
    for path in paths:
        status, _, body = ask(open_server, path)
        assert status == 200 or (400 <= status < 500 and json.loads(body)["detail"]), (path, status, body)
    assert all(400 <= ask(open_server, path)[0] < 500 for path in paths[:4])
    part = {"episode": number, "first": 0, "stop": 1}
    assert 400 <= ask(open_server, "/api/0/trim", "POST", part, origin(open_server))[0] < 500
    edit = {"action": "delete", "episodes": [number]}
    assert 400 <= ask(open_server, "/api/0/edit", "POST", edit, origin(open_server))[0] < 500


def test_a_body_that_is_too_large_is_refused(open_server: WatchServer) -> None:
    status, _, body = ask(open_server, "/api/0/edit", "POST", b" " * 70_000, origin(open_server))
    assert status == 413
    assert b"send less at once" in body


@pytest.mark.parametrize(
    "path",
    [
        "/../targets.py",
        "/..%2fplaces.py",
        "/%2e%2e/app.py",
        "/page/../../app.py",
        "//etc/passwd",
        "/app.py",
        "/api/9/overview",
        "/api/-1/overview",
        "/api/..%2f/overview",
        "/api/0/episode/99999",
        "/api/0/thumbnail/x",
        "/api/0/frames/1?camera=../../catalog.sqlite",
        "/api/0/episodes?sort=x",
        "/api/0/thumbnail/99",
    ],
)
def test_there_is_nothing_behind_other_paths(path: str, open_server: WatchServer) -> None:
    status, headers, body = ask(open_server, path)
    assert 400 <= status < 500
    assert b"import" not in body
    assert headers["x-content-type-options"] == "nosniff"


def test_every_answer_carries_the_headers(locked_server: WatchServer) -> None:
    for path, headers in (("/", {}), ("/main.js", {}), ("/api/targets", {}), ("/", {"Host": "foreign.test"})):
        said = ask(locked_server, path, headers=headers)[1]
        policy = said["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert said["x-frame-options"] == "DENY"
        assert said["referrer-policy"] == "no-referrer"
        assert said["cache-control"] in ("no-cache", "no-store")
        assert "server" not in said


def test_off_loopback_a_token_is_required(store: Path) -> None:
    with pytest.raises(AccessError, match="a token is required"):
        WatchServer([store], host="0.0.0.0")
    with pytest.raises(AccessError, match="at least 16 letters and digits, since it is part of a URL, got 5"):
        WatchServer([store], token="short")
    with WatchServer([store], host="0.0.0.0", token=TOKEN) as server:
        assert server.url.endswith(f"#token={TOKEN}")
        assert ask(server, "/api/targets")[0] == 401
        assert ask(server, "/api/targets", headers={"Authorization": f"Bearer {TOKEN}", "Host": "10.1.2.3:1"})[0] == 200
        assert ask(server, "/api/targets", headers={"Authorization": f"Bearer {TOKEN}", "Host": "a.test"})[0] == 421


def test_the_page_needs_nothing_from_elsewhere(open_server: WatchServer) -> None:
    for path in sorted(path for path in PAGE.rglob("*") if path.is_file()):
        route = "/" if path.name == "index.html" else f"/{path.relative_to(PAGE).as_posix()}"
        status, _, body = ask(open_server, route)
        assert status == 200
        assert body == path.read_bytes()
        text = body.decode().replace("http://www.w3.org/", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
    assert ask(open_server, "/main.js")[1]["content-type"].startswith("text/javascript")
