"""The server over real sockets, in front of the smallest arm there is."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.unit.robots.point_arm import PointArm
from tests.waiting import wait_for

from understudy.robots import ArmError
from understudy.robots.server import ArmServer
from understudy.web.errors import AccessError, ListenError

pytestmark = pytest.mark.serial  # an arm stops when its client is silent for 0.12 s

DOWN = [1.0, 0.0, 0.0, 0.0]
BEAT_S = PointArm.limits.heartbeat_s


class Client:
    def __init__(self, url: str, **headers: str):
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        self.headers = {"Content-Type": "application/json", **headers}

    def __call__(self, path: str, body: Any = None, *, method: str = "POST", **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        self.connection.request(method, path, data, {**self.headers, **headers})
        answer = self.connection.getresponse()
        text = answer.read().decode()
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(text) if is_json else text


@pytest.fixture
def arm() -> PointArm:
    return PointArm()


@pytest.fixture
def server(arm: PointArm) -> Iterator[ArmServer]:
    with ArmServer(arm, port=0) as found:
        yield found


@pytest.fixture
def post(server: ArmServer) -> Iterator[Client]:
    client = Client(server.url)
    yield client
    client.connection.close()


def test_states_say_how_old_they_are_and_none_is_left_out(post: Client) -> None:
    _, first = post("/getstate")
    time.sleep(0.2)
    _, last = post("/getstate")
    status, found = post("/getstates", {"after": first["tick"]})
    ticks = [state["tick"] for state in found["states"]]
    assert status == 200
    assert ticks == list(range(first["tick"] + 1, ticks[-1] + 1))
    assert ticks[-1] >= last["tick"]
    ages = [state["age_s"] for state in found["states"]]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] - ages[-1] > 0.1
    assert post("/getstates", {"after": ticks[-1] + 10**6}) == (200, {"states": []})
    assert post("/getstates", {"after": "x"})[0] == 422
    assert post("/getstates")[0] == 422


def test_readings_have_the_names_that_clients_know(post: Client, arm: PointArm) -> None:
    _, state = post("/getstate")
    names = {"pose", "vel", "force", "torque", "q", "dq", "jacobian", "gripper_pos"}  # those of HIL-SERL's clients
    assert set(state) == names | {"tick", "age_s"}
    assert state["pose"] == pytest.approx(arm.home.tolist())
    assert np.shape(state["jacobian"]) == (6, 7)
    for path, key, wanted in (
        ("/getpos", "pose", state["pose"]),
        ("/getvel", "vel", [0.0] * 6),
        ("/getforce", "force", [1.0, 2.0, 3.0]),
        ("/gettorque", "torque", [0.0] * 3),
        ("/getq", "q", list(range(7))),
        ("/getdq", "dq", [0.0] * 7),
        ("/getjacobian", "jacobian", state["jacobian"]),
        ("/get_gripper", "gripper", 1.0),
    ):
        assert post(path) == (200, {key: wanted})
    status, euler = post("/getpos_euler")
    assert status == 200
    assert np.abs(euler["pose"]) == pytest.approx([0.5, 0.0, 0.3, np.pi, 0.0, 0.0])


def test_commands_answer_as_clients_know(post: Client, arm: PointArm) -> None:
    assert post("/pose", {"arr": [0.5, 0.0, 0.3, *DOWN]}) == (200, "Moved")
    assert post("/close_gripper") == (200, "Closed")
    assert arm.opening == 0.0
    assert post("/open_gripper") == (200, "Opened")
    assert arm.opening == 1.0
    assert post("/move_gripper", {"gripper_pos": 51}) == (200, "Moved Gripper")
    assert arm.opening == pytest.approx(0.2)
    assert post("/move_gripper", {"gripper_pos": 999}) == (200, "Moved Gripper")
    assert arm.opening == 1.0
    assert post("/activate_gripper") == (200, "Activated")
    assert post("/reset_gripper") == (200, "Reset")
    assert post("/clearerr") == (200, "Clear")
    assert arm.num_recovered == 1
    assert post("/update_param", {"translational_stiffness": 500}) == (200, "Updated compliance parameters")
    assert arm.tuned == {"translational_stiffness": 500}
    assert post("/update_param", {"x": -1}) == (422, {"detail": "stiffness: expected 0 or more"})
    assert post("/heartbeat") == (200, "Alive")


def test_a_far_target_is_approached_at_limited_speed(post: Client, arm: PointArm) -> None:
    began = time.monotonic()
    post("/pose", {"arr": [9.0, 0.0, 0.3, *DOWN]})
    while time.monotonic() - began < 0.3:
        post("/heartbeat")
        time.sleep(0.01)
    way = arm.pose[0] - 0.5
    assert 0.01 < way <= 0.25 * (time.monotonic() - began)


def test_a_silent_client_stops_the_arm(post: Client, arm: PointArm, server: ArmServer) -> None:
    sent = time.monotonic()
    post("/pose", {"arr": [0.8, 0.0, 0.3, *DOWN]})
    post("/getstate")  # of nobody: no sign of life
    wait_for(lambda: server.control.health.num_expired == 1)
    assert time.monotonic() - sent >= BEAT_S - 0.01
    stands = arm.pose.copy()
    assert stands[0] > 0.5
    time.sleep(0.1)
    assert arm.pose == pytest.approx(stands)


def test_readings_of_the_client_that_has_the_arm_are_signs_of_life(server: ArmServer, arm: PointArm) -> None:
    mine = Client(server.url, **{"X-Client": "mine"})

    def keeps_it() -> bool:
        mine("/pose", {"arr": [0.8, 0.0, 0.3, *DOWN]})
        until = time.monotonic() + 3 * BEAT_S
        while time.monotonic() < until:
            mine("/getstate")
            time.sleep(0.01)
        return server.control.health.client == "mine"

    wait_for(keeps_it)  # it rightly loses the arm if this process stands still
    mine.connection.close()


def test_a_second_client_waits_its_turn(server: ArmServer, arm: PointArm) -> None:
    mine, other = Client(server.url, **{"X-Client": "mine"}), Client(server.url, **{"X-Client": "other"})

    def refused() -> dict[str, str] | None:
        mine("/pose", {"arr": [0.8, 0.0, 0.3, *DOWN]})
        status, said = other("/pose", {"arr": [0.2, 0.0, 0.3, *DOWN]})
        return said if status == 409 else None

    said = wait_for(refused)  # the first one rightly loses the arm if this process stands still
    assert said["detail"] == "client 'mine' has the arm; wait until it has been silent for 0.12 s"
    wait_for(lambda: other("/pose", {"arr": [0.2, 0.0, 0.3, *DOWN]})[0] == 200)
    for client in (mine, other):
        client.connection.close()


def test_anyone_may_stop_it(post: Client, server: ArmServer) -> None:
    mine = Client(server.url, **{"X-Client": "mine"})
    assert mine("/pose", {"arr": [0.8, 0.0, 0.3, *DOWN]})[0] == 200
    mine.connection.close()
    assert post("/stopimp") == (200, "Stopped impedance")
    assert post("/pose", {"arr": [0.5, 0.0, 0.3, *DOWN]}) == (
        409,
        {"detail": "the arm is stopped; POST /startimp first"},
    )
    assert post("/startimp") == (200, "Started impedance")
    assert post("/pose", {"arr": [0.5, 0.0, 0.3, *DOWN]})[0] == 200


def test_a_joint_reset_goes_home_and_then_answers(arm: PointArm) -> None:
    arm.pose = np.array([0.55, 0.05, 0.3, *DOWN])
    with ArmServer(arm, port=0) as server:
        post = Client(server.url)
        assert post("/jointreset") == (200, "Reset Joint")
        assert arm.pose == pytest.approx(arm.home, abs=5e-3)
        assert arm.num_joint_resets == 1
        post.connection.close()


def test_who_leaves_while_homing_stops_the_arm(arm: PointArm) -> None:
    arm.pose = np.array([0.8, 0.3, 0.3, *DOWN])
    with ArmServer(arm, port=0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"POST /jointreset HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            wait_for(lambda: bool(arm.pose[0] < 0.79))
        wait_for(lambda: server.control.health.client is None)
        assert arm.pose[0] > 0.55


def test_an_arm_that_is_too_fast_is_stopped_until_somebody_looked(post: Client, arm: PointArm) -> None:
    arm.vel = np.array([2.0, 0, 0, 0, 0, 0])
    wait_for(lambda: post("/health")[1]["fault"] == "the arm moved at 2.00 m/s, and 0.25 is its limit")
    status, said = post("/pose", {"arr": [0.5, 0.0, 0.3, *DOWN]})
    assert status == 409
    assert said["detail"].endswith("look at it, then POST /clearerr")
    arm.vel = np.zeros(6)
    post("/clearerr")
    assert post("/pose", {"arr": [0.5, 0.0, 0.3, *DOWN]})[0] == 200


def test_an_arm_that_raises_is_a_fault_and_not_the_end(post: Client, arm: PointArm) -> None:
    arm.broken = True
    wait_for(lambda: "the cable is out" in str(post("/health")[1]["fault"]))
    assert post("/clearerr")[0] == 200
    wait_for(lambda: post("/pose", {"arr": [0.5, 0.0, 0.3, *DOWN]})[0] == 200)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/pose", b'{"arr": [NaN, 0, 0, 1, 0, 0, 0]}', "arr.0: Input should be a finite number"),
        ("/pose", {"arr": [0.5, 0, 0.3]}, "arr: List should have at least 7 items"),
        ("/pose", {"arr": ["0.5"] * 7}, "arr.0: Input should be a valid number"),
        ("/pose", {"arr": [0.5, 0, 0.3, 0, 0, 0, 0]}, "arr: expected a quaternion x, y, z, w of length 1"),
        ("/pose", {}, "arr: Field required"),
        ("/move_gripper", {"gripper_pos": None}, "gripper_pos: Input should be a valid number"),
        ("/update_param", {"a": "x"}, "a: Input should be a valid number"),
    ],
)
def test_wrong_bodies_are_refused_with_a_sentence(post: Client, path: str, body: Any, said: str) -> None:
    status, found = post(path, body)
    assert status == 422
    assert found["detail"].startswith(said)


def test_limits_and_health(post: Client) -> None:
    _, limits = post("/limits")
    assert limits["low"] == [0.2, -0.3, 0.0]
    assert (limits["heartbeat_s"], limits["scene"]) == (0.12, None)
    assert limits["simulated"] is False  # PointArm does not say that it is
    wait_for(lambda: post("/health")[1]["num_ticks"] > 20)
    _, health = post("/health")
    assert health["rate_hz"] == 200.0
    assert 0 <= health["late_p50_s"] <= health["late_p99_s"] <= health["late_max_s"]


def test_the_rate_is_the_one_asked_for(arm: PointArm) -> None:
    began = time.monotonic()
    with ArmServer(arm, port=0, rate_hz=20) as server:
        time.sleep(0.5)
        num_ticks = server.control.health.num_ticks
        assert 3 <= num_ticks <= 20 * (time.monotonic() - began) + 1
    with pytest.raises(ArmError, match=r"rate_hz: expected 10 to 1000, got 1"):
        ArmServer(arm, port=0, rate_hz=1)


def test_who_gets_in(arm: PointArm) -> None:
    token = "0123456789abcdef"
    with ArmServer(arm, port=0, token=token) as server:
        post = Client(server.url)
        assert post("/getpos")[0] == 401
        assert post("/getpos", Authorization="Bearer 0123456789abcdeF")[0] == 401
        assert post("/getpos", Authorization=f"Bearer {token}")[0] == 200
        assert post("/getpos", Authorization=f"Bearer {token}", Host="evil.example:5000")[0] == 403
        assert post("/getpos", Authorization=f"Bearer {token}", Host="localhost:1")[0] == 200
        status, said = post("/getpos", Authorization=f"Bearer {token}", Origin="http://127.0.0.1")
        assert (status, said["detail"]) == (403, "origin: a web page may not use this server; use a program")
        post.connection.close()
    with pytest.raises(AccessError, match=r"host '0.0.0.0' can be reached from other machines, so a token is required"):
        ArmServer(arm, host="0.0.0.0", port=0)
    with pytest.raises(AccessError, match=r"token: expected at least 16 characters, got 5"):
        ArmServer(arm, port=0, token="short")


def test_a_large_body_is_refused_unread(post: Client) -> None:
    status, said = post("/pose", b" " * 70_000)
    assert (status, said["detail"][:35]) == (413, "body: expected up to 65536 bytes, g")


def test_a_port_that_is_taken(server: ArmServer, arm: PointArm) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(
        ListenError,
        match=r"127.0.0.1:\d+: cannot listen there \(.*\); stop the server that does",
    ):
        ArmServer(arm, port=port)


def test_a_backend_is_found_by_its_name() -> None:
    from understudy.cli.tools.robot import _build

    assert isinstance(_build("tests.unit.robots.point_arm:PointArm"), PointArm)
    for wrong, said in (
        ("point_arm", r"backend: expected module:Class, got 'point_arm'"),
        ("no_such_module:X", r"no_such_module:X: there is no module .*; run the command in the directory"),
        ("builtins:dict", r"backend: expected 'builtins:dict' to be a subclass of understudy.robots.Arm"),
    ):
        with pytest.raises(ArmError, match=said):
            _build(wrong)
