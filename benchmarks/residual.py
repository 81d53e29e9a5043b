"""Does an actor that changes the actions of a frozen policy beat one that learns from nothing?

    python -m benchmarks.residual runs/residual --seeds 0 1 2

Each seed clones five noisy demonstrations into a flow policy, and trains three times for as many steps with RLPD: with
that policy as its base and a script that takes over where there is no progress, with the base alone, and with the
script alone. Prints the success on 100 held-out starts after each half, with its 95 % Wilson interval, and CPU seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import tyro
from benchmarks.improve import ENV, run

from understudy.training.runs.metrics import read_metrics

BASE = ("--sac.actor.residual-scale", "0.5", "--sac.bc-weight", "1")
HUMAN = ("--intervention.source", "script")


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
        base = ("--base-policy", str(clone), *BASE)
        kinds = {"base policy and takeovers": (*base, *HUMAN), "base policy alone": base, "takeovers alone": HUMAN}
        for name, options in kinds.items():
            path = root / f"{name.replace(' ', '-')}-{seed}"
            if not path.exists():
                given = ("--env", ENV, "--demos", f"{clone}/store", "--steps", str(steps), *number)
                often = ("--eval-every", str(steps // 2), "--evaluation.episodes", "100")
                seconds = run("train", "rlpd", str(path), *given, *often, *options)
                (path / "cpu_seconds.json").write_text(json.dumps(seconds))
            show(seed, name, path)
    return 0


def show(seed: int, name: str, path: Path) -> None:
    for line in read_metrics(path / "metrics.jsonl", "evaluation"):
        human = sum(one["intervention_steps"] for one in read_metrics(path / "metrics.jsonl", "episode"))
        rate = f"{100 * line['success']:.0f} % ({100 * line['low']:.0f} to {100 * line['high']:.0f})"
        took = path / "cpu_seconds.json"
        seconds = f"{json.loads(took.read_text()):.0f}" if took.exists() else ""
        print(f"| {seed} | {name} | {line['step']:,} | {human} | {rate} | {seconds} |", flush=True)


if __name__ == "__main__":
    raise SystemExit(tyro.cli(study))
