"""Runs histories: `python -m tests.simulation --seeds 0:200`, or one again, with what happened: `--seed 17`.

Each history is a process of its own, forked from this one, so that nothing of one reaches the next.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEMORY = "/dev/shm"  # the simulated disks are in memory
SEEDS_PER_REPETITION = 20  # every 20th history runs twice: the second time must be the same


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="Run this history only, and print what happened in it.")
    parser.add_argument("--seeds", default="0:200", help="Run the histories from the first seed to before the second.")
    parser.add_argument("--operations", type=int, default=40, help="The number of operations in each history.")
    parser.add_argument("--only", help="Of a single history, run only these operations: numbers with commas between.")
    parser.add_argument("--shrink", action="store_true", help="Leave out operations of --seed while it still fails.")
    parser.add_argument("--scenario", help="Run a history that is written by hand (scenarios.py).")
    parser.add_argument("--mutation", help="Plant a defect (mutations.py), and stop at the first seed that finds it.")
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory() as directory:
            environment = {**os.environ, "LD_PRELOAD": str(build(Path(directory))), "PYTHONHASHSEED": "0"}
            return subprocess.call([sys.executable, "-m", "tests.simulation", *sys.argv[1:]], env=environment)
    prepare(options.mutation)
    if options.scenario is not None:
        problems = run_scenario(options.scenario)
        print("\n".join(problems))
        return bool(problems)
    only = None if options.only is None else {int(number) for number in options.only.split(",")}
    if options.seed is not None:
        if options.shrink:
            only = shrink(options.seed, options.operations)
        result = run(options.seed, options.operations, only)
        print("\n".join(result["log"]))
        print(json.dumps({name: value for name, value in result.items() if name != "log"}, indent=2))
        return bool(result["problems"])
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    first, stop = (int(part) for part in options.seeds.split(":"))
    started, failed = time.monotonic(), 0
    for seed in range(first, stop):
        result = run(seed, options.operations)
        problems = result["problems"]
        again = seed % SEEDS_PER_REPETITION == 0 and not problems and not options.mutation
        if again and run(seed, options.operations) != result:
            problems = ["the second time, something else happened"]
        if problems:
            failed += 1
            print(f"seed {seed}: {problems[0][:400]}", flush=True)
            if options.mutation:
                break
        if (seed + 1 - first) % 500 == 0:
            print(f"{seed + 1 - first} histories: {failed} failed", flush=True)
    took_s, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{seed + 1 - first} histories of {options.operations} operations: {failed} failed; "
        f"{took_s:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of a processor"
    )
    return failed > 0


def build(directory: Path) -> Path:
    """Compile machine.c."""
    made = directory / "machine.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", made, HERE / "machine.c", "-ldl"], check=True)
    return made


def prepare(mutation: str | None) -> None:
    """Import the product, put the simulated parts under it, and run a short history, so that all is compiled."""
    from tests.simulation import disk, mutations, world
    from tests.simulation.history import run_history

    logging.disable(logging.CRITICAL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    world.install()
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        run_history(disk.load(), Path(directory), seed=0, num_operations=40)
    if mutation is not None:
        mutations.MUTATIONS[mutation]()
    gc.collect()
    gc.freeze()
    gc.disable()  # threads.py collects


def run_scenario(name: str) -> tuple[str, ...]:
    from tests.simulation import disk
    from tests.simulation.history import run_script
    from tests.simulation.scenarios import SCENARIOS

    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        return run_script(disk.load(), Path(directory), 0, SCENARIOS[name]).problems


def run(seed: int, num_operations: int, only: set[int] | None = None) -> dict[str, Any]:
    """One history, in a process of its own."""
    from tests.simulation import disk
    from tests.simulation.history import run_history

    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            root = Path(tempfile.mkdtemp(prefix="understudy-", dir=MEMORY))
            try:
                result = run_history(disk.load(), root, seed=seed, num_operations=num_operations, only=only)
            finally:
                shutil.rmtree(root)
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(json.dumps(vars(result)).replace(f"{root}/", "").encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return dict(json.loads(text)) if text else {"seed": seed, "problems": ["the process died"], "log": [], "digest": 0}


def shrink(seed: int, num_operations: int) -> set[int]:
    """The operations of a failing history without which it does not fail: first fewer halves, then single ones."""
    kept = list(range(num_operations))
    size = num_operations // 2
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if run(seed, num_operations, set(fewer))["problems"]:
                kept = fewer
            else:
                start += size
        size //= 2
    print(f"--seed {seed} --operations {num_operations} --only {','.join(map(str, kept))}")
    return set(kept)


if __name__ == "__main__":
    sys.exit(main())
