"""A fuzzer for the arm's server: requests that no client of ours would send, and a client that is killed in mid-motion.

    python -m tests.faults.hostile_robot --requests 10000 --kills 10

| process | does |
|---|---|
| this one | the simulated arm and its server; notes where the arm is and how fast at every step of the simulator |
| `--attack URL` | sends requests, and knows for each kind which answers are right |
| `--move URL` | drives the arm to and fro at 20 Hz until it is killed |

The arm must stay inside its limits, and stop within 0.2 s of the last sign of life that the server took.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from understudy.robots.arm import ArmState
from understudy.robots.franka import SimulatedFranka
from understudy.robots.server import ArmServer

TOKEN = "the right token, and long enough"
ROOT = Path(__file__).parents[2]
DOWN = [1.0, 0.0, 0.0, 0.0]
STOPPED = (0.01, 0.05)  # m/s, rad/s
NUMBERS = [0.0, -1.0, 0.5, 1e9, -1e9, 1e300, -1e308, 5e-324, 2**70, -(2**63)]


@dataclass(kw_only=True)
class Seen:
    """What the simulator itself did."""

    low: list[float] = field(default_factory=lambda: [np.inf] * 3)
    high: list[float] = field(default_factory=lambda: [-np.inf] * 3)
    most_speed: float = 0.0
    most_turn_speed: float = 0.0
    most_joint_speed: float = 0.0
    least_joint_margin: float = np.inf
    num_steps: int = 0
    last_moved_at: float = 0.0

    def note(self, at: float, state: ArmState, ranges: np.ndarray) -> None:
        self.low = np.minimum(self.low, state.pose[:3]).tolist()
        self.high = np.maximum(self.high, state.pose[:3]).tolist()
        speed, turn = float(np.linalg.norm(state.vel[:3])), float(np.linalg.norm(state.vel[3:]))
        self.most_speed, self.most_turn_speed = max(self.most_speed, speed), max(self.most_turn_speed, turn)
        self.most_joint_speed = max(self.most_joint_speed, float(np.abs(state.dq).max()))
        margin = np.minimum(state.q - ranges[:, 0], ranges[:, 1] - state.q).min()
        self.least_joint_margin = min(self.least_joint_margin, float(margin))
        self.num_steps += 1
        if speed > STOPPED[0] or turn > STOPPED[1]:
            self.last_moved_at = at


@dataclass(kw_only=True)
class Report:
    """What was sent, what came of it, and what the arm did meanwhile."""

    statuses: dict[str, int]
    problems: list[str]
    stops_s: list[float]  # from the last sign of life that was taken to the last motion, one for each kill
    seen: Seen
    rate_hz: float
    faults: list[str]
    server_alive: bool


def run(requests: int, kills: int, seed: int = 0) -> Report:
    arm = SimulatedFranka()
    seen = Seen()
    ranges = arm.model.jnt_range[1:8].copy()
    arm.watch = lambda at, state: seen.note(at, state, ranges)
    faults: list[str] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        with ArmServer(arm, port=0, token=TOKEN) as server:
            control = server.control
            restless = _child("--move", server.url, "--wild")
            time.sleep(requests / 200)  # from wall to wall, before others get in its way
            told = _child("--attack", server.url, "--requests", str(requests), "--seed", str(seed)).communicate()[0]
            _kill(restless)
            attack = json.loads(told.splitlines()[-1])
            if control.health.fault is not None:
                faults.append(str(control.health.fault))
            _post(server.url, "/clearerr")
            _post(server.url, "/startimp")
            stops = []
            rng = random.Random(seed)
            for _ in range(kills):
                mover = _child("--move", server.url)
                assert mover.stdout is not None
                mover.stdout.readline()  # it is under way
                time.sleep(rng.uniform(0.2, 0.8))
                while np.linalg.norm(control.state.vel[:3]) < 0.1:  # it turns round now and then
                    time.sleep(0.01)
                _kill(mover)
                time.sleep(0.6)
                stops.append(seen.last_moved_at - control._heartbeat_at)
            alive = _post(server.url, "/getstate") == 200
            rate = control.health.measured_hz
            if control.health.fault is not None:
                faults.append(str(control.health.fault))
    finally:
        sys.setswitchinterval(before)
        arm.close()
    return Report(
        statuses=attack["statuses"],
        problems=attack["problems"],
        stops_s=stops,
        seen=seen,
        rate_hz=rate,
        faults=faults,
        server_alive=alive,
    )


def problems_of(report: Report, limits: Any, *, max_stop_s: float = 0.2) -> list[str]:
    """What is wrong, one line each."""
    found = list(report.problems)
    seen = report.seen
    for axis in range(3):
        if seen.low[axis] < limits.low[axis] or seen.high[axis] > limits.high[axis]:
            found.append(f"axis {axis}: the arm was at {seen.low[axis]:.4f} to {seen.high[axis]:.4f}")
    if seen.most_speed > limits.max_speed:
        found.append(f"the arm moved at {seen.most_speed:.3f} m/s")
    if seen.most_turn_speed > limits.max_turn_speed:
        found.append(f"the arm turned at {seen.most_turn_speed:.3f} rad/s")
    if seen.least_joint_margin < 0:
        found.append(f"a joint was {-seen.least_joint_margin:.3f} rad beyond its end")
    found += [f"it stopped only after {stop:.3f} s" for stop in report.stops_s if stop > max_stop_s]
    if not report.server_alive:
        found.append("the server is dead")
    return found


def _child(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.faults.hostile_robot", *args]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def _post(url: str, path: str, body: Any = None) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    try:
        connection.request("POST", path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


# ---- the client that is killed


def move(url: str, *, wild: bool) -> None:
    """To the farther side and back again; or wildly, to a corner far outside the box, another every 1.5 s."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", "X-Client": "mover"}
    connection.request("POST", "/getpos", None, headers)
    corner, turn = [9.0, 9.0, 9.0], DOWN
    side = -1 if json.loads(connection.getresponse().read())["pose"][1] > 0 else 1
    rng = random.Random(0)
    began = time.monotonic()
    while True:
        if time.monotonic() - began > (1.5 if wild else 1.2):
            began, side = time.monotonic(), -side
            corner = [rng.choice([-9.0, 9.0]), rng.choice([-9.0, 9.0]), rng.choice([-9.0, 0.2, 9.0])]
            turn = [1.0, rng.uniform(-1, 1), rng.uniform(-1, 1), rng.uniform(-1, 1)]
        body = json.dumps({"arr": [*corner, *turn] if wild else [0.55, 0.18 * side, 0.2 + 0.1 * side, *DOWN]})
        connection.request("POST", "/pose", body, headers)
        answer = connection.getresponse()
        answer.read()
        print(answer.status, flush=True)
        time.sleep(0.05)


# ---- requests: what is sent, and the answers that are right


@dataclass(frozen=True, kw_only=True)
class Sent:
    path: str = "/pose"
    body: bytes | None = None
    right: tuple[int, ...] = (422,)
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None  # bytes for the socket instead
    chunked: bool = False


def _arr(numbers: Any) -> bytes:
    return json.dumps({"arr": numbers}).encode()


def _any_json(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(10 if depth else 8)
    if kind == 8:
        return [_any_json(rng, depth - 1) for _ in range(rng.randrange(9))]
    if kind == 9:
        return {
            rng.choice(["arr", "gripper_pos", "\ud800", "", "x" * 300]): _any_json(rng, depth - 1)
            for _ in range(rng.randrange(4))
        }
    return [
        None,
        True,
        rng.randrange(-9, 9),
        10 ** rng.randrange(20, 500),
        rng.gauss(0, 1e9),
        float("nan"),
        float("-inf"),
        rng.choice(["", "1", "\ud800", "\0", "é" * 50, "NaN"]),
    ][kind]


def _client(rng: random.Random) -> tuple[tuple[str, str], ...]:
    return (("X-Client", rng.choice(["a", "b", ""])),)


MAKERS: dict[str, Callable[[random.Random], Sent]] = {
    "a far target": lambda r: Sent(
        body=_arr([r.choice(NUMBERS) for _ in range(3)] + DOWN), right=(200, 409), headers=_client(r)
    ),
    "a near target": lambda r: Sent(
        body=_arr([r.uniform(0.3, 0.8), r.uniform(-0.4, 0.4), r.uniform(0, 0.6), *(r.gauss(0, 0.5) for _ in "xyzw")]),
        right=(200, 409, 422),
        headers=_client(r),
    ),
    "low over the table": lambda r: Sent(
        body=_arr([r.uniform(0.45, 0.55), r.uniform(-0.05, 0.05), r.uniform(-0.1, 0.05), 1, r.gauss(0, 0.3), 0, 0.1]),
        right=(200, 409),
        headers=_client(r),
    ),
    "not finite": lambda r: Sent(
        body=_arr(
            [
                r.choice([float("nan"), float("inf"), float("-inf")]) if i == r.randrange(7) or i == 3 else 0.5
                for i in range(7)
            ]
        )
    ),
    "no orientation": lambda r: Sent(body=_arr([0.5, 0.0, 0.2] + [r.choice([0.0, 1e-9, 1e300, 50.0])] * 4)),
    "a wrong length": lambda r: Sent(body=_arr([0.5] * r.choice([0, 1, 6, 8, 700]))),
    "a wrong type": lambda r: Sent(
        body=_arr(r.choice([None, "x", 7, {}, [[0.5] * 7], ["0.5"] * 7, [True] * 7, [None] * 7, [10**400] * 7]))
    ),
    "any JSON": lambda r: Sent(
        path=r.choice(["/pose", "/move_gripper", "/update_param"]),
        body=json.dumps(_any_json(r)).encode(),
        right=(200, 400, 409, 422),
    ),
    "any bytes": lambda r: Sent(body=r.randbytes(r.randrange(1, 300)), right=(400, 422)),
    "deep JSON": lambda r: Sent(body=r.choice([b"[", b'{"arr":']) * r.randrange(500, 9000), right=(400, 422)),
    "a huge body": lambda r: Sent(body=b"[" * r.choice([70_000, 300_000]), right=(413,)),
    "a huge body in pieces": lambda r: Sent(body=b" " * 200_000, right=(413,), chunked=True),
    "a huge length": lambda r: Sent(
        raw=b"POST /pose HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
        + TOKEN.encode()
        + b"\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n{",
        right=(413,),
    ),
    "no HTTP": lambda r: Sent(raw=r.randbytes(40) + b"\r\n\r\n", right=(0, 400)),
    "a wrong method": lambda r: Sent(
        method=r.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"]),
        right=(405,),
        path=r.choice(["/pose", "/getstate", "/getstates", "/jointreset"]),
    ),
    "no such path": lambda r: Sent(path=r.choice(["/", "/poses", "/..%2f..", "/pose/x", "/docs"]), right=(404,)),
    "a wrong token": lambda r: Sent(
        body=_arr([0.5, 0.0, 0.2, *DOWN]),
        right=(401,),
        headers=(("Authorization", r.choice(["", "Bearer", "Bearer x", f"Bearer {TOKEN[:-1]}", TOKEN])),),
    ),
    "a foreign host": lambda r: Sent(
        path="/open_gripper", right=(403,), headers=(("Host", r.choice(["evil.example", "127.0.0.1.example", ""])),)
    ),
    "a web page": lambda r: Sent(path="/open_gripper", right=(403,), headers=(("Origin", "http://127.0.0.1:5000"),)),
    "a long name": lambda r: Sent(path="/heartbeat", headers=(("X-Client", "x" * 1000),)),
    "fingers": lambda r: Sent(
        path="/move_gripper",
        body=json.dumps({"gripper_pos": r.choice([0, 255, -5, 1e5, 1e300])}).encode(),
        right=(200, 409, 422),
        headers=_client(r),
    ),
    "stiffness": lambda r: Sent(
        path="/update_param",
        right=(200, 409, 422),
        headers=_client(r),
        body=json.dumps({"translational_stiffness": r.choice([2000, 500, 3000, 1e9, -1, 0]), "\ud800": 1}).encode(),
    ),
    "stop and start": lambda r: Sent(path=r.choice(["/stopimp", *["/startimp"] * 5, "/clearerr"]), right=(200,)),
    "leave while homing": lambda r: Sent(
        raw=b"POST /jointreset HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n",
        right=(0, 200, 409, 422),
    ),
}


def attack(url: str, requests: int, seed: int) -> None:
    rng = random.Random(seed)
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    for _ in range(requests):
        kind = rng.choice(list(MAKERS))
        sent = MAKERS[kind](rng)
        try:
            status = _send_raw(host, int(port), sent) if sent.raw is not None else _send(connection, sent)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if sent.right == (413,):  # the server may hang up on what it will not read
                status = 413
            else:
                problems.append(f"{kind}: no answer, {error!r}")
                continue
        statuses[status] += 1
        if status not in sent.right:
            problems.append(f"{kind}: {status} instead of {sent.right}: {sent!r}"[:300])
    connection.close()
    print(json.dumps({"statuses": dict(statuses), "problems": problems[:20]}))


def _send(connection: http.client.HTTPConnection, sent: Sent) -> int:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **dict(sent.headers)}
    body: Any = (
        iter([sent.body[i : i + 9000] for i in range(0, len(sent.body), 9000)])
        if (sent.chunked and sent.body is not None)
        else sent.body
    )
    connection.request(sent.method, sent.path, body, headers, encode_chunked=sent.chunked)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def _send_raw(host: str, port: int, sent: Sent) -> int:
    assert sent.raw is not None
    with socket.create_connection((host, port), timeout=1 if 0 in sent.right else 20) as plain:
        plain.sendall(sent.raw)
        try:
            answer = plain.recv(100)
        except TimeoutError:
            return 0
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attack")
    parser.add_argument("--move")
    parser.add_argument("--wild", action="store_true")
    args = parser.parse_args()
    if args.move:
        move(args.move, wild=args.wild)
    if args.attack:
        attack(args.attack, args.requests, args.seed)
        return 0
    from understudy.robots.franka import LIMITS

    began = time.monotonic()
    report = run(args.requests, args.kills, args.seed)
    print(json.dumps(asdict(report), indent=1, default=str))
    found = problems_of(report, LIMITS)
    print(f"{args.requests} requests, {args.kills} kills, {time.monotonic() - began:.0f} s:", found or "no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
