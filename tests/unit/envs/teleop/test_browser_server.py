"""The page's server over real sockets: whom it lets in, what it believes, and that nobody can hold it up."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import math
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.unit.envs.teleop.page import Page, open_socket, port_of
from tests.waiting import wait_for

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.envs.teleop import browser_server
from understudy.envs.teleop.axes import DeviceError
from understudy.envs.teleop.browser import BrowserDevice
from understudy.web.errors import AccessError, ListenError

pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed, InvalidStatus

pytestmark = pytest.mark.serial  # what was pressed too long ago does not count
TOKEN = "0123456789abcdef"
SPEC = StepSpec(
    observation=Spec(
        {
            "images": {"front": ArraySpec(shape=(6, 8, 3), dtype="uint8")},
            "wide": ArraySpec(shape=(30, 1200, 3), dtype="uint8"),
            "mask": ArraySpec(shape=(6, 8), dtype="uint8"),
            "state": ArraySpec(shape=(3,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(4,), dtype="float32", low=-1, high=1)),
)


def observation(value: int = 0) -> dict[str, Any]:
    return {
        "images": {"front": np.full((6, 8, 3), value, np.uint8)},
        "wide": np.arange(30 * 1200 * 3).reshape(30, 1200, 3).astype(np.uint8),
        "mask": np.zeros((6, 8), np.uint8),
        "state": np.zeros(3, np.float32),
    }


@pytest.fixture
def device() -> Iterator[BrowserDevice]:
    with BrowserDevice(SPEC) as made:
        yield made


def get(device: BrowserDevice, path: str, host: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(device), timeout=5)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


# ---- driving


def test_a_key_drives_until_it_is_let_go(device: BrowserDevice) -> None:
    with Page(device) as page:
        assert device.connected
        pressed_s = time.monotonic()
        page.press("KeyW")
        reading = wait_for(lambda: r if (r := device.read()).action is not None else None)
        assert reading.action.tolist() == [0, 0.5, 0, -1]
        assert abs(reading.since_s - pressed_s) < 0.1  # the page's clock is an hour ahead
        page.press()
        wait_for(lambda: device.read().action is None)
        page.press("KeyG")
        assert wait_for(lambda: r if (r := device.read()).action is not None else None).action.tolist() == [0, 0, 0, 1]
        page.press("Enter")
        assert wait_for(lambda: device.read().verdict) is True
    wait_for(lambda: not device.connected)


def test_the_moment_of_a_press_is_that_of_the_page() -> None:
    with BrowserDevice(SPEC, expiry_s=5.0) as device, Page(device) as page:
        pressed_s = time.monotonic() - 0.5
        page.press("KeyW", ago_s=0.5)
        reading = wait_for(lambda: r if (r := device.read()).action is not None else None)
        assert abs(reading.since_s - pressed_s) < 0.2


def test_what_was_long_on_its_way_neither_moves_nor_judges(device: BrowserDevice) -> None:
    with Page(device) as page:
        page.press("KeyW", "Enter", ago_s=0.5)
        page.hear(0.2)
        reading = device.read()
        assert reading.action is None
        assert reading.verdict is None


def test_a_moment_in_the_future_is_now(device: BrowserDevice) -> None:
    with Page(device) as page:
        page.press("KeyW", ago_s=-1000)
        wait_for(lambda: device.read().action is not None)
        time.sleep(0.35)
        assert device.read().action is None


def test_nothing_is_believed_before_the_clocks_are_known(device: BrowserDevice) -> None:
    with Page(device, answers=False) as page:
        page.say({"type": "pong", "sent_s": 1.0, "page_ms": page.now_ms()})  # nobody asked that
        page.press("KeyW")
        page.hear(0.2)
        assert device.read().action is None
        assert not device.connected


def test_speeds_and_the_grip_are_told_to_the_page(device: BrowserDevice) -> None:
    with Page(device) as page:
        assert (page.state["speed"], page.state["closed"], page.state["you_drive"]) == (0.5, False, True)
        page.press("Digit3")
        page.press("Digit3", "KeyG")
        page.press("KeyD")
        page.hear_until(lambda: page.state["driving"])
        assert (page.state["speed"], page.state["closed"]) == (1.0, True)
        assert device.read().action.tolist() == [1, 0, 0, 1]


def test_a_gamepad_in_a_message(device: BrowserDevice) -> None:
    with Page(device) as page:
        page.press(sticks=[-1, 0, 0, 0], buttons=[0] * 17)
        reading = wait_for(lambda: r if (r := device.read()).action is not None else None)
        assert reading.action.tolist() == [-0.5, 0, 0, -1]


@pytest.mark.parametrize(
    ("options", "keys", "action"),
    [
        ({"speed": 0.8}, ["KeyD"], [0.8, 0, 0, -1]),
        ({"high_closes": False}, ["KeyD"], [0.5, 0, 0, 1]),
        ({"names": ["a", "b", "c", "d"]}, ["KeyR"], [0, 0, 0, 0.5]),
        ({"names": ["grip", "x", "y", "z"]}, ["KeyD"], [-1, 0.5, 0, 0]),
    ],
)
def test_options_of_the_action(options: dict[str, Any], keys: list[str], action: list[float]) -> None:
    with BrowserDevice(SPEC, **options) as device, Page(device) as page:
        page.press(*keys)
        reading = wait_for(lambda: r if (r := device.read()).action is not None else None)
        assert reading.action.tolist() == pytest.approx(action)


@pytest.mark.parametrize(("expiry_s", "still"), [(0.1, False), (1.0, True)])
def test_the_expiry_is_a_choice(expiry_s: float, still: bool) -> None:
    with BrowserDevice(SPEC, expiry_s=expiry_s) as device, Page(device) as page:
        wait_for(lambda: (page.press("KeyW"), device.read().action is not None)[1])  # one may arrive too late
        time.sleep(0.2)
        assert (device.read().action is not None) == still


def test_a_demonstration_rests_when_nothing_is_pressed() -> None:
    with BrowserDevice(SPEC, to_the_end=True) as device, Page(device) as page:
        device.begin()
        assert device.read().action is None
        page.press("KeyW")
        wait_for(lambda: device.read().action is not None)
        page.press()
        wait_for(lambda: device.read().action.tolist() == [0, 0, 0, -1])


# ---- who drives


def test_one_drives_and_the_next_may_when_the_first_has_left(device: BrowserDevice) -> None:
    with Page(device) as first, Page(device, "page-two") as second:
        assert (first.state["you_drive"], second.state["you_drive"], second.state["free"]) == (True, False, False)
        second.say({"type": "drive"})
        second.press("KeyW")
        second.hear()
        assert device.read().action is None
        first.press("KeyW")
        wait_for(lambda: device.read().action is not None)
        first.say({"type": "leave"})
        wait_for(lambda: device.read().action is None)
        second.hear_until(lambda: second.state["free"])
        assert (second.state["you_drive"], second.state["num_pages"]) == (False, 2)
        second.say({"type": "drive"})
        second.press("KeyW")
        wait_for(lambda: device.read().action is not None)


def test_a_page_that_comes_back_drives_on(device: BrowserDevice) -> None:
    with Page(device) as first, Page(device, "page-two"), Page(device) as again:
        assert first.closed()[0] == 1000
        again.hear_until(lambda: again.state["you_drive"] and again.state["num_pages"] == 2)


def test_a_driver_who_is_silent_may_be_replaced(device: BrowserDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_server, "SILENT_S", 0.3)
    with Page(device) as first, Page(device, "page-two") as second:
        for _ in range(4):
            first.press()
            second.say({"type": "drive"})
            second.hear()
            assert not second.state["you_drive"]
        second.hear(0.4)
        assert not device.connected
        second.say({"type": "drive"})
        second.hear_until(lambda: second.state["you_drive"])


def test_no_more_pages_than_can_be_served(device: BrowserDevice) -> None:
    with contextlib.ExitStack() as pages:
        for number in range(browser_server.MAX_VIEWERS):
            pages.enter_context(Page(device, f"page-number-{number}"))
        assert Page(device, "one-too-many").closed() == (1013, "16 pages are open already")


def test_a_screen_has_nobody_who_drives() -> None:
    action = Spec(ArraySpec(shape=(14,), dtype="float32"))  # more than there are keys for
    spec = StepSpec(observation=SPEC.observation, action=action)
    with pytest.raises(DeviceError, match="up to 8 axes"):
        BrowserDevice(spec)
    with BrowserDevice(spec, watch_only=True) as device, Page(device) as page:
        page.say({"type": "drive"})
        page.press("KeyW", "Space", "Enter")
        device.show(observation(), {"action": np.zeros(14, np.float32)})
        page.hear_until(lambda: len(page.frames) == 1)
        page.hear()
        assert (page.state["you_drive"], page.state["free"], device.connected) == (False, False, False)
        assert len(page.frames) == 1
        reading = device.read()
        assert (reading.action, reading.verdict) == (None, None)


# ---- frames


def test_a_frame_is_the_pictures_as_they_are(device: BrowserDevice) -> None:
    seen = observation(7)
    with Page(device) as page:
        device.begin()
        device.show(seen, {"task": "t", "step": np.int64(4), "reward": math.nan, "action": np.zeros(4, np.float32)})
        seen["images"]["front"][:] = 0  # whoever shows something may go on with the array
        page.hear_until(lambda: bool(page.frames))
        header, pixels = page.frames[0]
    assert header["cameras"] == [
        {"name": "images/front", "height": 6, "width": 8},
        {"name": "wide", "height": 10, "width": 400},  # every third pixel
    ]
    assert (header["episode"], header["info"]) == (1, {"task": "t", "step": 4, "reward": "nan"})
    assert pixels[: 6 * 8 * 3] == bytes([7]) * (6 * 8 * 3)
    assert pixels[6 * 8 * 3 :] == seen["wide"][::3, ::3].tobytes()


def test_the_grip_follows_the_action_of_the_policy(device: BrowserDevice) -> None:
    closing = np.float32([0, 0, 0, 1])
    with Page(device) as page:
        device.read()
        device.show(observation(), {"action": closing})
        page.press("KeyW")
        reading = wait_for(lambda: r if (r := device.read()).action is not None else None)
        assert reading.action[3] == 1  # taking over drops nothing
        device.show(observation(), {"action": -closing})
        assert device.read().action[3] == 1  # it is the person's own now


def test_a_slow_page_gets_fewer_frames_and_holds_nobody_up(device: BrowserDevice) -> None:
    with Page(device) as quick, Page(device, "page-slow") as slow:
        took_s = []
        for number in range(20):
            start_s = time.monotonic()
            device.show(observation(number), {})
            took_s.append(time.monotonic() - start_s)
            quick.hear(0.02)
            for header, _ in quick.frames[-1:]:
                quick.say({"type": "drawn", "number": header["number"]})
        slow.hear_until(lambda: len(slow.frames) >= browser_server.MAX_IN_FLIGHT)
        slow.hear()
        assert len(quick.frames) > 10
        assert len(slow.frames) == browser_server.MAX_IN_FLIGHT
        slow.say({"type": "drawn", "number": slow.frames[0][0]["number"]})
        slow.hear_until(lambda: len(slow.frames) > browser_server.MAX_IN_FLIGHT)
        assert slow.frames[-1][0]["number"] == 20  # the newest, not the next
        assert np.median(took_s) < 0.1  # a page that held it up would do so from its third frame on


def test_a_page_that_is_opened_later_sees_the_last_frame(device: BrowserDevice) -> None:
    device.show(observation(9), {})
    with Page(device) as page:
        page.hear_until(lambda: bool(page.frames))
        assert page.frames[0][1][0] == 9


# ---- whom it lets in


def test_the_files_of_the_page(device: BrowserDevice) -> None:
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        status, headers, body = get(device, path)
        assert (status, headers["Content-Type"].split(";")[0]) == (200, kind)
        assert len(body) == int(headers["Content-Length"]) > 500
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    for path in ("/browser.py", "/../browser.py", "/page/page.js", "/%2e%2e/browser.py"):
        assert get(device, path)[0] == 404


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for file in browser_server.PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_this_machine_is_known_by_its_names(device: BrowserDevice, host: str) -> None:
    assert get(device, "/", host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "192.168.1.5", "", "[evil", "127.0.0.1.x"]
)
def test_other_names_are_refused(device: BrowserDevice, host: str) -> None:
    assert get(device, "/", host)[0] == 421


def test_names_can_be_added() -> None:
    with BrowserDevice(SPEC, hosts=["robot.lab"]) as device:
        assert get(device, "/", "robot.lab")[0] == 200
        assert get(device, "/", "other.lab")[0] == 421


def test_off_loopback_any_number_is_a_name_of_this_machine() -> None:
    with BrowserDevice(SPEC, host="0.0.0.0", token=TOKEN) as device:
        assert get(device, "/", "192.168.1.5:99")[0] == 200
        assert get(device, "/", socket.gethostname())[0] == 200
        assert get(device, "/", "evil.example")[0] == 421


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:1", "http://localhost"])
def test_a_socket_is_for_the_page_from_here_only(device: BrowserDevice, origin: str | None) -> None:
    with pytest.raises(InvalidStatus) as refused, open_socket(port_of(device), origin):
        pass
    assert refused.value.response.status_code == 403


def test_the_token_is_asked_for() -> None:
    with BrowserDevice(SPEC, token=TOKEN) as device:
        assert device.url.endswith(f"/#token={TOKEN}")
        for token in (None, "", TOKEN[:-1], "ä" * 16):
            code, reason = Page(device, token=token).closed()
            assert (code, reason.partition(";")[0]) == (1008, "the token is missing or wrong")
        with Page(device, token=TOKEN) as page:
            assert page.state["you_drive"]


def test_off_loopback_a_token_is_required_and_a_long_one() -> None:
    with pytest.raises(AccessError, match="so a token is required"):
        BrowserDevice(SPEC, host="0.0.0.0")
    with pytest.raises(AccessError, match=r"token: expected at least 16 letters and digits, .* got 5 characters"):
        BrowserDevice(SPEC, token="short")
    with pytest.raises(AccessError, match="token: expected at least 16 letters and digits"):
        BrowserDevice(SPEC, token="#" * 20)


HOSTILE = [
    "no json",
    "[]",
    b"\x00\xff",
    '{"type": "what"}',
    '{"type": "input"}',
    "[" * 5000,
    '{"type": "input", "made_ms": NaN, "keys": []}',
    '{"type": "input", "made_ms": "1", "keys": []}',
    '{"type": "input", "made_ms": 1, "keys": [1]}',
    '{"type": "input", "made_ms": 1, "keys": "KeyW"}',
    json.dumps({"type": "input", "made_ms": 1, "keys": ["k"] * 33}),
    json.dumps({"type": "input", "made_ms": 1, "keys": [], "sticks": [0, 0, 0]}),
    json.dumps({"type": "input", "made_ms": 1, "keys": [], "sticks": [9, 0, 0, 0]}),
    '{"type": "input", "made_ms": 1, "keys": [], "sticks": [NaN, 0, 0, 0]}',
    '{"type": "drawn"}',
    '{"type": "drawn", "number": Infinity}',
    '{"type": "pong", "sent_s": []}',
]


def test_what_is_no_message_ends_the_socket_and_nothing_else(device: BrowserDevice) -> None:
    for number, message in enumerate(HOSTILE):
        with Page(device, f"hostile-{number}") as page:
            page.press("KeyW")
            page.say(message)
            assert page.closed()[0] == 1008, message
            wait_for(lambda: device.read().action is None)
    with Page(device) as page:
        page.say("x" * (browser_server.MAX_MESSAGE_BYTES + 1))
        assert page.closed()[0] == 1009
    with Page(device) as page:
        page.press("KeyW")
        wait_for(lambda: device.read().action is not None)


def test_a_socket_that_says_nothing_is_closed(device: BrowserDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_server, "HELLO_S", 0.2)
    port = port_of(device)
    with open_socket(port, f"http://127.0.0.1:{port}") as silent, pytest.raises(ConnectionClosed):
        silent.recv(timeout=3)
    assert Page(device, "short").closed() == (1008, "expected a hello with the page's name")


# ---- beginning and end


def test_a_port_that_is_taken_is_said_so(device: BrowserDevice) -> None:
    with pytest.raises(ListenError, match=r"127.0.0.1:\d+: cannot listen there \(.*\); .* choose another port"):
        BrowserDevice(SPEC, port=port_of(device))


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets.asyncio.server", None)
    with pytest.raises(DeviceError, match=r"pip install 'understudy-robotics\[web\]'"):
        BrowserDevice(SPEC)


def test_a_speed_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(DeviceError, match="speed: expected more than 0 and up to 1, got int 2"):
        BrowserDevice(SPEC, speed=2)


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_closing_does_not_wait_for_sockets_that_nobody_uses(said: bytes) -> None:
    """Browsers open some ahead of time."""
    device = BrowserDevice(SPEC)
    with socket.create_connection(("127.0.0.1", port_of(device))) as unused:
        unused.sendall(said)
        time.sleep(0.05)
        start_s = time.monotonic()
        device.close()
        assert time.monotonic() - start_s < 1.0
    gc.collect()  # a transport that was not closed would say so


def test_closing_ends_everything() -> None:
    device = BrowserDevice(SPEC)
    port = port_of(device)
    with Page(device) as page:
        page.press("KeyW")
        wait_for(lambda: device.read().action is not None)
        device.close()
        assert device.read().action is None
        assert page.closed()[0] == 1001
    device.show(observation(), {})
    device.close()
    with BrowserDevice(SPEC, port=port):  # it is free again
        pass
