"""LIBERO through LiberoWorld, against LIBERO's own environment.

    python benchmarks/libero.py tasks       # every task: starts, steps, pictures, and the very states of LIBERO
    python benchmarks/libero.py repeat      # the same twice, after other episodes, and in another process
    python benchmarks/libero.py episodes    # one construction, many episodes, flat memory
    python benchmarks/libero.py cost        # CPU seconds of eight steps and a look, in turns with LIBERO's own
    python benchmarks/libero.py picture     # what the cameras see: images/libero.png

Each needs `understudy env setup libero`, writes its figures to `benchmarks/libero_*.json` below `--out`, and exits with
1 if something is not as it should be.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from understudy.core import Tree
from understudy.envs.registry import WORLD_REGISTRY
from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.workers.restarting_worker import Limits
from understudy.envs.world_factory import WorldFactory

WORLDS = str(Path(__file__).resolve().parent / "worlds")
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
BLOCK_STEPS = 8
WANTED_RATIO = 0.2
MAX_GROWTH_BYTES = 16 * 2**20  # from the second fifth of the episodes to the last
LIMITS = Limits(start_s=120.0, reset_s=300.0, step_s=60.0)


def open_world(kind: str, **options: Any) -> IsolatedWorld:
    """`Ours` or `Stock` of libero_worlds, in a process of LIBERO's virtual environment."""
    known = WORLD_REGISTRY["libero"]
    source = WorldFactory(
        factory=f"libero_worlds:{kind}",
        options=options,
        python=str(known.python),
        env={**known.variables, "PYTHONPATH": WORLDS},
    )
    return IsolatedWorld(source, limits=LIMITS)


def actions_of(seed: int, num_steps: int) -> list[Tree]:
    """Actions that go somewhere: a direction is kept for a block, and the gripper opens and closes."""
    rng = np.random.default_rng(seed)
    directions = rng.uniform(-1, 1, (num_steps // BLOCK_STEPS + 1, 7)).repeat(BLOCK_STEPS, axis=0)[:num_steps]
    return list(np.clip(directions + 0.3 * rng.normal(size=directions.shape), -1, 1).astype(np.float32))


def tasks(
    *,
    suites: tuple[str, ...] = SUITES,
    starts: tuple[int, ...] = (0, 24, 49),
    steps: int = 16,
    stock: bool = True,
    out: Path | None = Path("docs"),
) -> int:
    """Begin, step and look at every task of some suites.

    Args:
        suites: Of LIBERO.
        starts: Of each task.
        steps: Of each episode.
        stock: Compare the states of the first start with LIBERO's own, step by step.
        out: Where to put the figures; None: nowhere.
    """
    console = Console(soft_wrap=True)
    rows: list[dict[str, Any]] = []
    for suite in suites:
        with ExitStack() as stack:
            ours = stack.enter_context(open_world("Ours", suite=suite))
            theirs = stack.enter_context(open_world("Stock", suite=suite, cameras=False)) if stock else None
            for task in ours.suite.tasks:
                began = time.monotonic()
                row: dict[str, Any] = {
                    "suite": suite,
                    "task": task.name,
                    "num_starts": task.num_starts,
                    "episodes": [],
                    "steps_equal_to_stock": None,
                }
                for start in starts:
                    trace = play(ours, task.name, start, steps)
                    row["episodes"].append({"start": start, "steps": len(trace) - 1, "problem": look_at(trace)})
                    if theirs is not None and start == starts[0]:
                        other = play(theirs, task.name, start, steps)
                        same = [np.array_equal(a["physics"], b["physics"]) for a, b in zip(trace, other, strict=True)]
                        row["steps_equal_to_stock"] = f"{sum(same)} of {len(same)}"
                        row["equal"] = all(same)
                rows.append(row)
                good = row.get("equal", True) and not any(one["problem"] for one in row["episodes"])
                console.print(
                    f"{'ok ' if good else 'BAD'} {suite}/{task.name}: {len(starts)} starts of {task.num_starts}, "
                    f"states equal to LIBERO's {row['steps_equal_to_stock']}, {time.monotonic() - began:.0f} s",
                    style=None if good else "red",
                    highlight=False,
                )
    problems = [one for row in rows for one in row["episodes"] if one["problem"]]
    num_equal = sum(row.get("equal", False) for row in rows)
    console.print(
        f"{len(rows)} tasks, {sum(len(row['episodes']) for row in rows)} episodes, {len(problems)} with a problem; "
        f"states equal to LIBERO's in {num_equal}"
    )
    _save(out, "libero_tasks", {"steps": steps, "rows": rows})
    return 1 if problems or (stock and num_equal < len(rows)) else 0


def play(world: IsolatedWorld, task: str, start: int, num_steps: int) -> list[Tree]:
    """What is seen after the reset and after each step."""
    seen = [world.reset(seed=0, options={"task": task, "start": start})[0]]
    for action in actions_of(start, num_steps):
        observation, _, terminated, truncated, _ = world.step(action)
        seen.append(observation)
        if terminated or truncated:
            break
    return seen


def look_at(trace: list[Tree]) -> str:
    """What is wrong with pictures and states, if anything."""
    for name in ("agentview", "wrist"):
        if any(seen[name].std() < 8 for seen in trace):
            return f"{name}: a picture of nearly one colour"
        if np.array_equal(trace[0][name], trace[-1][name]):
            return f"{name}: the arm moved and the picture did not change"
    if not all(np.isfinite(seen["state"]).all() for seen in trace):
        return "state: not finite"
    if np.array_equal(trace[0]["physics"], trace[-1]["physics"]):
        return "physics: nothing moved"
    return ""


def repeat(
    *, suites: tuple[str, ...] = SUITES, num_tasks: int = 2, steps: int = 50, out: Path | None = Path("docs")
) -> int:
    """Play the same start and actions again, after another episode and in another process.

    Args:
        suites: Of LIBERO.
        num_tasks: Of each suite.
        steps: Of each episode.
        out: Where to put the figures; None: nowhere.
    """
    console = Console(soft_wrap=True)
    rows = []
    for suite in suites:
        with open_world("Ours", suite=suite) as one, open_world("Ours", suite=suite) as two:
            for task in one.suite.task_names[:num_tasks]:
                first = play(one, task, 7, steps)
                play(one, task, 8, steps)
                traces = {"again": play(one, task, 7, steps), "elsewhere": play(two, task, 7, steps)}
                row: dict[str, Any] = {"suite": suite, "task": task, "steps": len(first) - 1}
                for name, trace in traces.items():
                    for field in ("physics", "state", "agentview", "wrist"):
                        same = [np.array_equal(a[field], b[field]) for a, b in zip(first, trace, strict=True)]
                        row[f"{name}/{field}"] = sum(same)
                rows.append(row)
                console.print(row)
    _save(out, "libero_repeat", {"rows": rows})
    return 0 if all(value == row["steps"] + 1 for row in rows for name, value in row.items() if "/" in name) else 1


def episodes(
    *, suite: str = "libero_spatial", num_episodes: int = 100, steps: int = 48, out: Path | None = Path("docs")
) -> int:
    """Play many episodes of one task in one construction.

    Args:
        suite: Of LIBERO; its first task.
        num_episodes: How many, from its start states in turn.
        steps: Of each, with a look after every eighth.
        out: Where to put the figures; None: nowhere.
    """
    sizes: list[int] = []
    began = time.monotonic()
    with open_world("Ours", suite=suite) as world:
        pid = world.worker.pid
        task = world.suite.tasks[0]
        observation: Tree = {}
        for number in range(num_episodes):
            observation, _ = world.reset(seed=number, options={"start": number % task.num_starts})
            actions = actions_of(number, steps)
            for place in range(0, steps, BLOCK_STEPS):
                stepped = world.step_block(actions[place : place + BLOCK_STEPS])
                observation = stepped.observation
                if stepped.last:
                    break
            sizes.append(int(observation["rss_bytes"]))
        same_process = world.worker.pid == pid
        num_built = int(observation["num_built"])
    fifth = max(1, num_episodes // 5)
    first, last = (float(np.median(part)) for part in (sizes[fifth : 2 * fifth], sizes[-fifth:]))
    figures = {
        "task": f"{suite}/{task.name}",
        "num_episodes": num_episodes,
        "steps": steps,
        "num_built": num_built,
        "same_process": same_process,
        "rss_bytes_second_fifth": first,
        "rss_bytes_last_fifth": last,
        "seconds": time.monotonic() - began,
    }
    Console().print(figures)
    _save(out, "libero_episodes", figures)
    return 0 if num_built == 1 and same_process and last <= first + MAX_GROWTH_BYTES else 1


def cost(*, suites: tuple[str, ...] = SUITES, blocks: int = 15, out: Path | None = Path("docs")) -> int:
    """Compare CPU seconds of a block: eight steps and one look at two cameras, against LIBERO as it comes.

    Args:
        suites: Of LIBERO; the first task of each.
        blocks: Of each side, in turns. The first is left out.
        out: Where to put the figures; None: nowhere.
    """
    rows: list[dict[str, Any]] = []
    for suite in suites:
        with open_world("Ours", suite=suite) as ours, open_world("Stock", suite=suite) as stock:
            task = ours.suite.tasks[0].name
            seen = [world.reset(seed=0, options={"task": task, "start": 0})[0] for world in (ours, stock)]
            equal = [np.array_equal(seen[0]["physics"], seen[1]["physics"])]
            seconds = []
            actions = actions_of(1, blocks * BLOCK_STEPS)
            for place in range(0, len(actions), BLOCK_STEPS):
                block = actions[place : place + BLOCK_STEPS]
                after = [ours.step_block(block), stock.step_block(block)]
                seconds.append([float(b.observation["cpu_s"] - a["cpu_s"]) for a, b in zip(seen, after, strict=True)])
                seen = [stepped.observation for stepped in after]
                equal.append(np.array_equal(seen[0]["physics"], seen[1]["physics"]))
                if after[0].last or after[1].last:
                    break
        taken = np.array(seconds[1:])
        rows.append(
            {
                "suite": suite,
                "task": task,
                "blocks": len(taken),
                "cpu_s": float(np.median(taken[:, 0])),
                "stock_cpu_s": float(np.median(taken[:, 1])),
                "ratio": float(np.median(taken[:, 0] / taken[:, 1])),
                "worst_ratio": float((taken[:, 0] / taken[:, 1]).max()),
                "looks_equal": sum(equal),
                "looks": len(equal),
            }
        )
    table = Table("suite", "blocks", "stock CPU s", "ours CPU s", "ratio", "worst", "equal states")
    for row in rows:
        table.add_row(
            row["suite"],
            str(row["blocks"]),
            f"{row['stock_cpu_s']:.2f}",
            f"{row['cpu_s']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['worst_ratio']:.3f}",
            f"{row['looks_equal']} of {row['looks']}",
        )
    Console(width=120).print(table)
    _save(out, "libero_cost", {"block_steps": BLOCK_STEPS, "rows": rows})
    return 0 if all(row["ratio"] <= WANTED_RATIO and row["looks_equal"] == row["looks"] for row in rows) else 1


def picture(*, out: Path = Path("docs")) -> int:
    """Draw a task of each suite through both cameras, the first one also as LIBERO draws it.

    Args:
        out: Where to put the picture.
    """
    columns: list[tuple[str, Tree]] = []
    for suite, index in {
        "libero_spatial": 1,
        "libero_object": 0,
        "libero_goal": 0,
        "libero_10": 8,
        "libero_90": 0,
    }.items():
        kinds = {"Stock": "LIBERO's own", "Ours": suite} if not columns else {"Ours": suite}
        for kind, title in kinds.items():
            with open_world(kind, suite=suite) as world:
                task = world.suite.task_names[index]
                columns.append((title, world.reset(seed=0, options={"task": task, "start": 0})[0]))
    side, head = len(columns[0][1]["agentview"]), 16
    sheet = Image.new("RGB", (len(columns) * (side + 4) - 4, head + 2 * side + 4), "white")
    for place, (title, seen) in enumerate(columns):
        ImageDraw.Draw(sheet).text((place * (side + 4) + 2, 2), title, fill="black")
        for row, name in enumerate(("agentview", "wrist")):
            sheet.paste(Image.fromarray(seen[name]), (place * (side + 4), head + row * (side + 4)))
    path = out / "images" / "libero.png"
    sheet.save(path, optimize=True)
    Console().print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


def _save(out: Path | None, name: str, figures: dict[str, Any]) -> None:
    if out is not None:
        path = out / "benchmarks" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    commands = {"tasks": tasks, "repeat": repeat, "episodes": episodes, "cost": cost, "picture": picture}
    sys.exit(tyro.extras.subcommand_cli_from_dict(commands))
