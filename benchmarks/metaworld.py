"""Metaworld: whether its experts solve their tasks, what a step costs, and whether all fifty keep the contract.

    python benchmarks/metaworld.py experts                     # 50 tasks, 20 starts each; about five minutes
    python benchmarks/metaworld.py experts --run noise --starts 5      # with noise of 0.3; `repeat`: two steps in one
    python benchmarks/metaworld.py speed                       # against Metaworld's own rendering
    python benchmarks/metaworld.py check                       # check_env over all tasks, with pictures
    python benchmarks/metaworld.py picture                     # the picture of the docs (needs pillow)

Runs in the virtual environment of Metaworld (`understudy env setup metaworld`), whichever Python it was started with.
`experts` and `speed` write their figures to `benchmarks/metaworld_*.json` below `--out`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # this file would hide the simulator

from understudy.envs import check_env  # noqa: E402
from understudy.envs.registry import WORLD_REGISTRY  # noqa: E402
from understudy.envs.simulators.metaworld import (  # noqa: E402
    NUM_STARTS,
    SIMULATOR_STEPS,
    TASKS,
    MetaworldWorld,
)

SOURCES = HERE.parent / "src"
RUNS = {"plain": (0.0, 1), "noise": (0.3, 1), "repeat": (0.0, 2)}  # how experts are asked: noise, action_repeat
MARGIN = 1e-3  # progress below this is none, as for the scripted human
SPEED_TASKS = ("button-press-topdown-v3", "push-v3", "hammer-v3", "window-open-v3")
SHOWN = (
    "button-press-topdown-v3",
    "push-v3",
    "hammer-v3",
    "door-open-v3",
    "peg-insert-side-v3",
    "drawer-close-v3",
    "soccer-v3",
    "coffee-push-v3",
)
SIZE = 128


# --- experts ---


def experts(run: str, num_starts: int, out: Path) -> None:
    """Every task from starts spread over train and eval; the figures of other runs stay in the file."""
    starts = [index * (NUM_STARTS - 1) // max(1, num_starts - 1) for index in range(num_starts)]
    noise, action_repeat = RUNS[run]
    rows = {}
    with MetaworldWorld(cameras=[], action_repeat=action_repeat) as world:
        for task in TASKS:
            rows[task] = summary(starts, [episode(world, task, start, noise) for start in starts])
            print(f"{run}: {task} {rows[task]}", flush=True)
    total = sum(row["successes"] for row in rows.values())
    print(f"{run}: {total} of {len(TASKS) * num_starts}", flush=True)
    where = out / "benchmarks" / "metaworld_experts.json"
    figures = json.loads(where.read_text()) if where.exists() else {}
    save(where, {**figures, run: {"starts": starts, "success": total / len(TASKS) / num_starts, "tasks": rows}})


def episode(world: MetaworldWorld, task: str, start: int, noise: float) -> tuple[bool, int, int]:
    """Whether it succeeded, its steps, and the longest run of steps without progress."""
    world.reset_without_observation(seed=start, options={"task": task, "start": start})
    rng = np.random.default_rng(start)
    best, stalled, longest, num_steps = 0.0, 0, 0, 0
    while True:
        action = world.expert_action(noise=noise, rng=rng).action
        _, terminated, truncated, info = world.step_without_observation(action)
        num_steps += 1
        progress = world.expert_action().progress
        stalled = 0 if progress > best + MARGIN else stalled + 1
        best, longest = max(best, progress), max(longest, stalled)
        if terminated or truncated:
            return info["success"], num_steps, longest


def summary(starts: list[int], episodes: list[tuple[bool, int, int]]) -> dict[str, Any]:
    good = [(num_steps, longest) for success, num_steps, longest in episodes if success]
    return {
        "successes": len(good),
        "median_steps": float(np.median([num_steps for num_steps, _ in good])) if good else None,
        "longest_stall": max((longest for _, longest in good), default=None),  # of the episodes that succeed
        "failed_starts": [start for start, (success, _, _) in zip(starts, episodes, strict=True) if not success],
    }


# --- speed ---


def speed(out: Path) -> None:
    """Steps per second of processor time, looking at each."""
    rows = []
    for task in SPEED_TASKS:
        row: dict[str, Any] = {"task": task}
        for name, cameras in (("none", []), ("one", ["corner4"]), ("two", ["corner4", "gripperPOV"])):
            before = time.process_time()
            with MetaworldWorld(tasks=[task], cameras=cameras, size=SIZE) as world:
                world.reset(seed=0, options={"start": 0})
                row[f"create_s_{name}"] = time.process_time() - before
                rng = np.random.default_rng(0)
                actions = iter(rng.uniform(-1, 1, (SIMULATOR_STEPS, 4)).astype(np.float32))
                row[name] = rate(lambda world=world, actions=actions: world.step(next(actions)), 60 if cameras else 450)
                row["reset_s"] = 1 / rate(lambda world=world: world.reset_without_observation(seed=0), 10)
        for name, cameras in (("stock_one", ["corner4"]), ("stock_two", ["corner4", "gripperPOV"])):
            row[name] = stock(task, cameras)
        rows.append(row)
        print(row, flush=True)
    save(out / "benchmarks" / "metaworld_speed.json", {"size": SIZE, "rows": rows})


def stock(task: str, cameras: list[str]) -> float:
    """The same with Metaworld's environment and renderer as they come."""
    classes = importlib.import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS
    env = classes[task](render_mode="rgb_array", camera_name=cameras[0], width=SIZE, height=SIZE)
    env._partially_observable, env._freeze_rand_vec, env._set_task_called = False, False, True
    del env.sawyer_observation_space
    env.reset()
    ids = [env.model.camera(name).id for name in cameras]
    rng = np.random.default_rng(0)

    def step() -> None:
        env.step(rng.uniform(-1, 1, 4).astype(np.float32))
        for camera in ids:
            env.mujoco_renderer.camera_id = camera
            env.render()

    try:
        return rate(step, 15)
    finally:
        env.close()


def rate(do: Callable[[], Any], times: int) -> float:
    do()
    before = time.process_time()
    for _ in range(times):
        do()
    return times / (time.process_time() - before)


# --- check and picture ---


def check() -> None:
    tasks = list(TASKS)
    for first in range(0, len(tasks), 5):
        some = tasks[first : first + 5]
        report = check_env(lambda some=some: MetaworldWorld(tasks=some, size=32, max_steps=40), episodes=5)
        print(f"{', '.join(some)}: {report}", flush=True)


def picture(out: Path) -> None:
    """A grid of tasks, each halfway through the expert's episode, and what the hand sees in the corner."""
    images = importlib.import_module("PIL.Image")
    tiles = []
    with MetaworldWorld(tasks=SHOWN, size=224) as world:
        for task in SHOWN:
            num_steps = episode(world, task, 0, 0.0)[1]
            observation, _ = world.reset(seed=0, options={"task": task, "start": 0})
            for _ in range(num_steps * 2 // 3):
                observation, *_ = world.step(world.expert_action().action)
            tile = observation["corner4"]
            tile[:56, -56:] = observation["gripperPOV"].reshape(56, 4, 56, 4, 3).mean(axis=(1, 3))
            tiles.append(tile)
    grid = np.vstack([np.hstack(tiles[:4]), np.hstack(tiles[4:])])
    where = out / "images" / "metaworld.png"
    images.fromarray(grid).quantize(256, method=1).save(where, optimize=True)  # 1: colours that are rare, too
    print(where, where.stat().st_size, "bytes")


def save(where: Path, figures: dict[str, Any]) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(figures, indent=1) + "\n")
    print(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["experts", "speed", "check", "picture"])
    parser.add_argument("--run", choices=list(RUNS), default="plain", help="for experts")
    parser.add_argument("--starts", type=int, default=20, help="of each task, for experts")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    chosen = parser.parse_args()
    if importlib.util.find_spec("metaworld") is None:
        known = WORLD_REGISTRY["metaworld"]
        if not known.ready:
            sys.exit("metaworld is not set up; run `understudy env setup metaworld`")
        variables = {**os.environ, **known.variables, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        os.execve(known.python, [str(known.python), __file__, *sys.argv[1:]], variables)
    if chosen.what == "experts":
        experts(chosen.run, chosen.starts, chosen.out)
    elif chosen.what == "speed":
        speed(chosen.out)
    elif chosen.what == "check":
        check()
    else:
        picture(chosen.out)


if __name__ == "__main__":
    main()
