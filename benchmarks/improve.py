"""Does a policy get better from its own episodes and from corrections, and by which method?

    python benchmarks/improve.py runs/study --seeds 0 1 2

Each seed runs the commands of docs/improve.md: five noisy demonstrations and a flow policy that clones them, 100 of its
episodes in every second of which a script takes over where there is no progress, and `improve --compare`. Prints a line
for each policy, with its success on 100 held-out starts, the 95 % Wilson interval, and the CPU seconds of each command.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import tyro

ENV = "toy:pick_red?cameras=false&state=task"


def study(root: tyro.conf.Positional[Path], *, seeds: tuple[int, ...] = (0, 1, 2), updates: int = 1000) -> int:
    """Run the study and print its table.

    Args:
        root: Directory for the runs; what is there already is not run again.
        seeds: Seeds of demonstrations, episodes and training.
        updates: Number of updates of each improvement.
    """
    for seed in seeds:
        clone, mixed, better = root / f"clone-{seed}", root / f"mixed-{seed}", root / f"better-{seed}"
        seconds: dict[str, float] = {}
        if not (better / "comparison.json").exists():
            number = ["--seed", str(seed)]
            record = ["record", f"{clone}/store", "--env", ENV, "--successes", "5", "--noise", "0.3", *number]
            seconds["record"] = run(*record)
            run("init", "toy-flow", str(clone), *number)
            seconds["sft"] = run("resume", str(clone))
            script = ["--human", "script", "--takeover-every", "2", "--noise", "0.1"]
            seconds["rollout"] = run(
                "rollout", str(mixed), "--policy", str(clone), "--episodes", "100", *script, *number
            )
            given = ["--policy", str(clone), "--experience", str(mixed), "--updates", str(updates), *number]
            for method in ("hg-dagger", "recap"):
                path = better if method == "recap" else root / f"corrected-{seed}"
                compare = ["--compare"] if method == "recap" else []
                seconds[method + " ".join(["", *compare])] = run("improve", str(path), *given, "--by", method, *compare)
            (better / "cpu_seconds.json").write_text(json.dumps(seconds))
        seconds = json.loads((better / "cpu_seconds.json").read_text())
        for row in json.loads((better / "comparison.json").read_text()):
            rate, (low, high) = row["success"], row["interval"]
            share = f"{100 * rate['num_successes'] / rate['num_episodes']:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
            print(f"| {seed} | {row['method']} | {row['num_steps']:,} | {share} |", flush=True)
        print(f"seed {seed}, CPU seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    return 0


def run(*words: str) -> float:
    """Run a command with one thread of torch; returns the CPU seconds of it and of its simulators."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "understudy", *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(tyro.cli(study))
