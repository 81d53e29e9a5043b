"""The simulated arm, its server, a hostile crowd, a client that is killed, and the world that speaks to it."""

import json
import math
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.faults.hostile_robot import problems_of, run

from understudy.envs.robot import RobotEnv
from understudy.robots.franka import LIMITS

CODE = "import sys; from understudy.cli.tools.robot import simulate; sys.exit(simulate(port=0, scene_port=0))"


@pytest.fixture(scope="module")
def simulated() -> Iterator[str]:
    """`understudy robot simulate` in a process of its own; Ctrl-C ends it."""
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = re.search(r"arm at (http://\S+)", process.stdout.readline())
    assert url is not None
    assert "cameras and cube at http://" in process.stdout.readline()
    assert "box [0.4, -0.2, 0.013] to [0.65, 0.2, 0.4] m, up to 0.25 m/s" in process.stdout.readline()
    yield url[1]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert re.search(r"stopped; control ran at \d+ of 200 Hz, late p99 \S+ ms, \d+ of \d+ deadlines missed", rest)


@pytest.mark.serial
def test_whatever_is_sent_the_arm_keeps_its_limits_and_stops_when_its_client_is_killed() -> None:
    report = run(requests=300, kills=1)
    assert problems_of(report, LIMITS, max_stop_s=math.inf) == []
    assert report.seen.num_steps > 100
    assert report.seen.most_speed > 0.1  # it did move
    assert len(report.statuses) >= 8
    assert len(report.stops_s) == 1


@pytest.mark.nightly
@pytest.mark.serial
def test_whatever_is_sent_the_arm_keeps_its_limits_and_stops_in_time() -> None:
    report = run(requests=600, kills=3)
    assert problems_of(report, LIMITS) == []
    assert report.seen.num_steps > 500
    assert report.seen.most_speed > 0.1  # it did move
    assert len(report.statuses) >= 8
    assert all(0.05 < stop <= 0.2 for stop in report.stops_s)


@pytest.mark.serial
@pytest.mark.parametrize("task", ["reach", "lift"])
def test_the_expert_succeeds_over_http(simulated: str, task: str) -> None:
    with RobotEnv(simulated, hz=20, cameras={}) as world:
        for start in (0, 45):
            world.reset(seed=start, options={"task": task, "start": start})
            rng = np.random.default_rng(start)
            terminated = truncated = False
            while not (terminated or truncated):
                _, _, terminated, truncated, info = world.step(world.expert_action(noise=0.1, rng=rng).action)
            assert info["success"], f"start {start}"
        print(task, world.pace.report)
        assert world.pace.report.rate < 20.5


def test_it_is_seen_and_its_cube_can_be_put_back(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.envs.robot_client.TIMEOUT_S", 60.0)  # the machine may be busy
    with RobotEnv(simulated) as world:
        assert set(world.step_spec.observation.tree) == {"front", "wrist", "state"}
        pictures = []
        for start in (0, 1):
            observation, _ = world.reset(seed=0, options={"task": "lift", "start": start})
            pictures.append(observation["front"])
        assert pictures[0].shape == (128, 128, 3)
        assert pictures[0].std() > 10  # not of one colour
        assert np.abs(pictures[0].astype(int) - pictures[1]).max() > 50  # the cube is elsewhere
        request = urllib.request.Request(
            f"{world.limits['scene']}/place", data=b'{"cube": ["x", 1]}', headers={"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert json.loads(refused.value.read())["detail"].startswith("cube.0: Input should be a valid number")
        refused.value.close()
