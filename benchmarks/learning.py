"""Learning curves of RLPD on a real simulator, with cloning of the same demonstrations beside them.

    understudy env setup metaworld
    python benchmarks/learning.py run --place DIR --regime human --seed 0      # some ten minutes on one core
    python benchmarks/learning.py picture --place DIR --out docs/images/learning.svg

Metaworld's button-press-topdown-v3, seen as 39 numbers, sparse reward, two simulator steps to a step, 50 steps an
episode. Every point is the policy alone, without noise, on 100 held-out starts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from understudy.cli import main as understudy
from understudy.training.metrics import read_metrics

ENV = "metaworld:button-press-topdown-v3?cameras=[]&action_repeat=2&max_steps=50"
HUMAN = ("--human.by", "script", "--human.patience-steps", "15")
REGIMES: dict[str, tuple[int, int, tuple[str, ...]]] = {  # demonstrations, steps, options
    "few": (3, 12_000, ()),
    "human": (0, 10_000, ("--start-steps", "200", *HUMAN)),
    "nothing": (0, 8_000, ("--start-steps", "200")),
    "many": (20, 8_000, ()),
    "many-human": (20, 8_000, HUMAN),
}
LABELS = {
    "few": "3 demonstrations", "human": "none, and a human who takes over", "nothing": "none",
    "many": "20 demonstrations",
    "many-human": "20 demonstrations and a human",
}  # fmt: skip
OPTIONS = (
    "--eval-every", "2000", "--checkpoint-every", "2000", "--batch-size", "128", "--updates-per-step", "4",
    "--return-steps", "3", "--sac.actor.hidden", "128", "128", "--sac.critic-hidden", "128", "128", "--sac.actor-lr",
    "1e-3", "--sac.critic-lr", "1e-3", "--sac.temperature-lr", "1e-3", "--sac.tau", "0.01", "--sac.discount", "0.97",
)  # fmt: skip


def run(place: Path, regime: str, seed: int) -> None:
    num_demos, steps, options = REGIMES[regime]
    demos: tuple[str, ...] = ()
    if num_demos:
        store = str(place / f"demos-{num_demos}")
        assert understudy(["record", store, "--env", ENV, "--successes", str(num_demos)]) == 0
        demos = ("--demos", store)
        if not (place / f"clone-{num_demos}").exists():
            hidden = ("--cloning.actor.hidden", "128", "128", "--updates", "2000")
            assert understudy(["train", "clone", str(place / f"clone-{num_demos}"), "--env", ENV, *demos, *hidden]) == 0
    given = ["--env", ENV, *demos, "--seed", str(seed), "--steps", str(steps), *OPTIONS, *options]
    assert understudy(["train", "rlpd", str(place / f"{regime}-{seed}"), *given]) == 0


def picture(place: Path, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1))
    for colour, regime in zip(("C0", "C1", "C7", "C2", "C3"), REGIMES, strict=True):
        for number, path in enumerate(sorted(place.glob(f"{regime}-[0-9]"))):
            lines = list(read_metrics(path / "metrics.jsonl", "evaluation"))
            at, rate = [0, *(line["step"] for line in lines)], [0, *(100 * line["success"] for line in lines)]
            left.plot(at, rate, color=colour, marker=".", alpha=0.8, label=LABELS[regime] if number == 0 else None)
            if regime == "human":
                _takeovers(right, path, number)
    for path in sorted(place.glob("clone-*")):
        rate = 100 * list(read_metrics(path / "metrics.jsonl", "evaluation"))[-1]["success"]
        name = path.name.removeprefix("clone-")
        left.axhline(rate, color="C0" if name == "3" else "C2", linestyle=":", label=f"cloning of {name}: {rate:.0f} %")
    left.set(xlabel="steps of practice", ylabel="success alone, held-out starts (%)", ylim=(-3, 103))
    left.legend(fontsize=8, loc="upper left")
    right.set(xlabel="steps of practice", ylabel="steps by the human (%)", title="no demonstrations", ylim=(-3, 103))
    figure.tight_layout()
    figure.savefig(out)


def _takeovers(axes: object, path: Path, number: int) -> None:
    episodes = list(read_metrics(path / "metrics.jsonl", "episode"))
    size = 25
    groups = [episodes[at : at + size] for at in range(0, len(episodes), size)]
    share = [100 * sum(e["human_steps"] for e in some) / sum(e["length"] for e in some) for some in groups]
    axes.plot([some[-1]["step"] for some in groups], share, color="C1", alpha=0.8, label=f"seed {number}")  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "picture"))
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--regime", choices=tuple(REGIMES), default="human")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("learning.svg"))
    options = parser.parse_args()
    options.place.mkdir(parents=True, exist_ok=True)
    if options.what == "run":
        run(options.place, options.regime, options.seed)
    else:
        picture(options.place, options.out)


if __name__ == "__main__":
    main()
