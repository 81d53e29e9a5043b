"""Does an actor that chooses the noise of a frozen policy make it better?

    python -m benchmarks.dsrl runs/dsrl --seeds 0 1 2

Each seed clones five noisy demonstrations into a flow policy, and trains twice for as many steps with DSRL: with a
script that takes over where there is no progress, and without. Prints the success on 100 held-out starts after each
half, with its 95 % Wilson interval, and CPU seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import tyro
from benchmarks.improve import ENV, run
from benchmarks.residual import HUMAN, show

STEERING = ("--sac.noise-bound", "1.5", "--updates-per-step", "1")


def study(root: tyro.conf.Positional[Path], *, seeds: tuple[int, ...] = (0, 1, 2), steps: int = 4000) -> int:
    """Run the study and print its table.

    Args:
        root: Directory for the runs; what is there already is not run again.
        seeds: Seeds of demonstrations, episodes and training.
        steps: Number of environment steps of each run.
    """
    for seed in seeds:
        clone, number = root / f"clone-{seed}", ("--seed", str(seed))
        if not (clone / "policy.safetensors").exists():
            run("record", f"{clone}/store", "--env", ENV, "--successes", "5", "--noise", "0.3", *number)
            run("init", "toy-flow", str(clone), *number)
            run("resume", str(clone))
        show(seed, "flow clone", clone)
        for name, options in (("steering and takeovers", HUMAN), ("steering alone", ())):
            path = root / f"{name.replace(' ', '-')}-{seed}"
            if not path.exists():
                given = ("--env", ENV, "--demos", f"{clone}/store", "--steps", str(steps), *number)
                often = ("--eval-every", str(steps // 2), "--evaluation.episodes", "100")
                base = ("--base-policy", str(clone), *STEERING)
                seconds = run("train", "rlpd", str(path), *given, *often, *base, *options)
                (path / "cpu_seconds.json").write_text(json.dumps(seconds))
            show(seed, name, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(study))
