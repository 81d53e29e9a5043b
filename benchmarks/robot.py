"""The scripted expert on the simulated arm over HTTP: successes, and how well the control rate is kept.

    python benchmarks/robot.py --episodes 20 --hz 20

It starts `understudy robot simulate` in a process of its own. `--check` runs check_env instead and lists what a world
in real time cannot keep.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys

import numpy as np

from understudy.envs import CheckError, check_env
from understudy.envs.robot import RobotEnv

CODE = "import sys; from understudy.cli.tools.robot import simulate; sys.exit(simulate(port=0, scene_port=0))"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=20, help="of each task")
    parser.add_argument("--hz", type=float, default=20.0)
    parser.add_argument("--no-cameras", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None
    try:
        if args.check:
            _check(found[0])
            return 0
        return _play(found[0], args)
    finally:
        process.send_signal(signal.SIGINT)
        print(process.communicate()[0].strip().splitlines()[-1], f"(load of the machine {os.getloadavg()[0]:.1f})")


def _play(url: str, args: argparse.Namespace) -> int:
    missing = 0
    with RobotEnv(url, hz=args.hz, cameras={} if args.no_cameras else None) as world:
        for task in world.suite.tasks:
            steps = []
            successes = 0
            for start in range(args.episodes):
                rng = np.random.default_rng(start)
                world.reset(seed=start, options={"task": task.name, "start": start})
                terminated = truncated = False
                while not (terminated or truncated):
                    _, _, terminated, truncated, info = world.step(world.expert_action(noise=0.1, rng=rng).action)
                successes += info["success"]
                steps.append(world._num_steps)
            print(f"{task.name}: {successes} of {args.episodes}, {np.median(steps):.0f} steps (median)", flush=True)
            missing += args.episodes - successes
        print(world.pace.report)
    return 1 if missing else 0


def _check(url: str) -> None:
    try:
        print(check_env(lambda: RobotEnv(url, hz=50), episodes=2))
    except CheckError as error:
        print("passed:", ", ".join(error.report.passed))
        print(error)


if __name__ == "__main__":
    sys.exit(main())
