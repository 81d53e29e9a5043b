"""Does GRPO with an adapter come as far in bfloat16 as in float32?

    python -m benchmarks.bfloat16 runs/bfloat16 --seeds 0 1

Runs the commands of the recipes: 50 demonstrations and a small VLA that learns from them (`toy-vla`), and from this one
start GRPO with LoRA twice for each seed (`toy-vla-grpo`), computed in float32 and in bfloat16. Adapters, gradients and
the optimizer's state are float32 in both. Prints the updates of each run, its success from held-out starts before and
after with 95 % Wilson intervals, the largest divergence of sampler and learner, and the CPU seconds of the learner's
process, acting included, in an iteration. Then the same over all seeds.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

import tyro
from benchmarks.improve import run

from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.wilson_interval import SuccessRate

PRECISIONS = ("float32", "bfloat16")
ENV = "toy:press_button?size=32&state=task"


def study(
    root: tyro.conf.Positional[Path],
    *,
    seeds: tuple[int, ...] = (0, 1),
    iterations: int = 36,
    episodes: int = 256,
    rank: int = 8,
    learning_rate: float = 1e-3,
) -> int:
    """Run the study and print its table.

    Args:
        root: Directory for the runs; what is there already is not run again, and a run that was broken off goes on.
        seeds: Seeds of the episodes and adapters of GRPO.
        iterations: Number of iterations of each run; one with all its groups has 14 updates, with half of them seven.
        episodes: Number of episodes of each evaluation.
        rank: Of the adapters.
        learning_rate: Of the adapters.
    """
    start = root / "start"
    if not (start / "policy.safetensors").exists():
        if not (start / "config.json").exists():
            run("record", f"{start}/store", "--env", ENV, "--successes", "50")
            run("init", "toy-vla", str(start))
        run("resume", str(start))
    last: dict[str, list[SuccessRate]] = defaultdict(list)
    for seed in seeds:
        for precision in PRECISIONS:
            path = root / f"{precision}-{seed}"
            if not (path / "config.json").exists():
                given = ("--policy", str(start), "--iterations", str(iterations), "--seed", str(seed))
                adapter = ("--lora.rank", str(rank), "--engine.learning-rate", str(learning_rate))
                small = ("--algorithm.ppo-mini-batch-size", "32")
                often = ("--eval-every", str(iterations), "--evaluation.episodes", str(episodes))
                precise = ("--engine.precision", precision)
                run("init", "toy-vla-grpo", str(path), *given, *adapter, *small, *often, *precise)
            run("resume", str(path))
            last[precision].append(show(seed, precision, path))
    for precision, found in last.items():
        print(f"| all | {precision} | {sum_of(found)} |", flush=True)
    return 0


def show(seed: int, precision: str, path: Path) -> SuccessRate:
    """Print a line; returns the success of the last evaluation."""
    evaluations = [rate(line) for line in read_metrics(path / "metrics.jsonl", "evaluation")]
    lines = list(read_metrics(path / "metrics.jsonl", "train"))
    apart = max((line.get("sampler_kl", 0.0) for line in lines), default=0.0)
    seconds = median(line["cpu_s"] for line in lines)
    cells = [seed, precision, lines[-1]["update"], *evaluations, f"{apart:.1e}", f"{seconds:.2f}"]
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
    return evaluations[-1]


def rate(found: dict[str, float]) -> SuccessRate:
    return SuccessRate(num_successes=round(found["success"] * found["episodes"]), num_episodes=int(found["episodes"]))


def sum_of(rates: list[SuccessRate]) -> SuccessRate:
    return SuccessRate(
        num_successes=sum(one.num_successes for one in rates), num_episodes=sum(one.num_episodes for one in rates)
    )


if __name__ == "__main__":
    raise SystemExit(tyro.cli(study))
