"""A small VLA on four tasks of Metaworld: imitation of few demonstrations, then reinforcement learning from success.

    understudy env setup metaworld
    python benchmarks/vla.py demos --place DIR                          # 10 demonstrations of each task, by script
    python benchmarks/vla.py sft --place DIR --updates 300              # the policy that all runs start from
    python benchmarks/vla.py run --place DIR --kind grpo --seed 0       # also rloo, ppo; about 12 minutes on two cores
    python benchmarks/vla.py sft --place DIR --updates 1200             # the fair control: more supervision instead
    python benchmarks/vla.py final --place DIR                          # 256 held-out episodes of each, both ways
    python benchmarks/vla.py picture --place DIR --out docs/images/vla.svg

One 64 x 64 camera from above, the instruction, and where the hand is; goal markers are hidden, so that the two faucet
tasks look the same and only the words tell them apart. A block is 5 actions, an episode at most 9 blocks. Every figure
is of starts that training never sees.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import tyro

from understudy.cli import main as understudy
from understudy.training.runs.metrics import read_metrics

TASKS = ("handle-press-v3", "coffee-button-v3", "faucet-open-v3", "faucet-close-v3")
ENV = (
    f'metaworld?tasks={json.dumps(TASKS).replace(" ", "")}&cameras=["topview"]&size=64&action_repeat=2&max_steps=45'
    "&hide_goal=true&state=hand"
)
COLOURS = {"grpo": "C0", "rloo": "C1", "ppo": "C2", "reinforce": "C3"}
START = 300  # updates of supervision


def demos(place: Path, successes: int = 10) -> None:
    """Record them."""
    for task in TASKS:
        assert (
            understudy(["record", str(place / "demos"), "--env", f"{ENV}&task={task}", "--successes", str(successes)])
            == 0
        )


def sft(place: Path, updates: int = START, seed: int = 0) -> None:
    """Imitate them."""
    assert (
        understudy(
            [
                "sft",
                str(_sft(place, updates)),
                "--env",
                ENV,
                "--demos",
                str(place / "demos"),
                "--updates",
                str(updates),
                "--seed",
                str(seed),
                "--vla.use-proprio",
                "state",
                "--evaluation.episodes",
                "256",
            ]
        )
        == 0
    )


def run(
    place: Path, kind: Literal["grpo", "rloo", "ppo", "reinforce"], seed: int, iterations: int = 40, workers: int = 4
) -> None:
    """Learn from success: 64 episodes an iteration; groups of one outcome are dropped and not replaced."""
    assert (
        understudy(
            [
                "train",
                kind,
                str(place / f"{kind}-{seed}"),
                "--policy",
                str(_sft(place, START)),
                "--env",
                ENV,
                "--iterations",
                str(iterations),
                "--seed",
                str(seed),
                "--workers.num-parallel-envs",
                str(workers),
                "--plan.max-waves",
                "1",
                "--evaluation.episodes",
                "256",
                "--eval-every",
                "20",
            ]
        )
        == 0
    )


def final(place: Path, episodes: int = 256) -> None:
    """Evaluate all that is there, in the mode of practice and greedy."""
    for path in sorted(place.glob("*/policy.safetensors")):
        for mode in (["--sampled"], []):
            out = path.parent / "evaluations" / (mode[0][2:] if mode else "greedy")
            print(path.parent.name, end=": ", flush=True)
            assert (
                understudy(
                    ["evaluate", str(path.parent), "--env", ENV, "--episodes", str(episodes), "--out", str(out), *mode]
                )
                == 0
            )


def picture(place: Path, out: Path) -> None:
    """Draw success over episodes of practice, each evaluation with its interval, and the control beside."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for path in sorted(place.glob("*-*/metrics.jsonl")):
        kind = path.parent.name.partition("-")[0]
        if kind not in COLOURS:
            continue
        points, lived = [], 0
        for line in read_metrics(path):
            lived += line["kind"] == "episode"
            if line["kind"] == "evaluation":
                points.append((lived, *(100 * line[name] for name in ("success", "low", "high"))))
        at, success, low, high = zip(*points, strict=True)
        axes.plot(at, success, marker="o", color=COLOURS[kind], label=path.parent.name)
        axes.fill_between(at, low, high, color=COLOURS[kind], alpha=0.12)
    for path in sorted(place.glob("sft-*/metrics.jsonl"), key=lambda one: int(one.parent.name[4:])):
        *_, line = read_metrics(path, "evaluation")
        axes.axhline(100 * line["success"], color="grey", linestyle=":", linewidth=1)
        axes.annotate(f"{path.parent.name[4:]} updates of imitation", (0, 100 * line["success"]), fontsize=7)
    axes.set(xlabel="episodes of practice", ylabel="success on 256 held-out starts, drawn [%]", ylim=(0, 100))
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def _sft(place: Path, updates: int) -> Path:
    return place / f"sft-{updates}"


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"demos": demos, "sft": sft, "run": run, "final": final, "picture": picture})
