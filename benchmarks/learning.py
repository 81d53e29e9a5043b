"""Learning curves of RLPD on a real simulator, with cloning of the same demonstrations beside them.

    understudy env setup metaworld
    python benchmarks/learning.py run --place DIR --regime human --seed 0      # some ten minutes on one core
    python benchmarks/learning.py picture --place DIR --out docs/images/learning.svg

Metaworld's button-press-topdown-v3, sparse reward, two simulator steps to a step, 50 steps an episode; seen as 39
numbers, or (regime "images") through one camera of 48 x 48 pixels and nothing else. Every point is the policy alone,
without noise, on 100 held-out starts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from understudy.cli import main as understudy
from understudy.training.runs.metrics import read_metrics

TASK = "metaworld:button-press-topdown-v3"
REST = "action_repeat=2&max_steps=50"
NUMBERS = f"{TASK}?cameras=[]&{REST}"
CAMERA = f'{TASK}?cameras=["corner4"]&size=48&{REST}'
HUMAN = ("--intervention.source", "script", "--intervention.patience-steps", "15")


@dataclass(frozen=True, kw_only=True)
class Regime:
    label: str
    colour: str
    demos: int
    steps: int
    options: tuple[str, ...] = ()
    env: str = NUMBERS
    eval_every: int = 2_000
    updates_per_step: int = 4

    @property
    def seen(self) -> str:
        return "camera" if self.env == CAMERA else "numbers"


REGIMES = {
    "few": Regime(label="3 demonstrations", colour="C0", demos=3, steps=16_000),
    "human": Regime(
        label="none, and a human who takes over",
        colour="C1",
        demos=0,
        steps=14_000,
        options=("--start-steps", "200", *HUMAN),
    ),
    "nothing": Regime(label="none", colour="C7", demos=0, steps=8_000, options=("--start-steps", "200")),
    "many": Regime(label="20 demonstrations", colour="C2", demos=20, steps=8_000),
    "many-human": Regime(label="20 demonstrations and a human", colour="C3", demos=20, steps=8_000, options=HUMAN),
    "images": Regime(
        label="1 demonstration and a human",
        colour="C4",
        demos=1,
        steps=6_000,
        env=CAMERA,
        eval_every=1_000,
        updates_per_step=1,
        options=(
            *HUMAN,
            "--cloning-updates",
            "1000",
            "--sac.bc-weight",
            "0.5",
            "--sac.shift-pixels",
            "2",
            "--sac.actor.encoder.inputs",
            "corner4",
        ),
    ),
    "images-alone": Regime(
        label="1 demonstration",
        colour="C5",
        demos=1,
        steps=6_000,
        env=CAMERA,
        eval_every=1_000,
        updates_per_step=1,
        options=(
            "--cloning-updates",
            "1000",
            "--sac.bc-weight",
            "0.1",
            "--sac.shift-pixels",
            "2",
            "--sac.actor.encoder.inputs",
            "corner4",
        ),
    ),
}
OPTIONS = (
    "--checkpoint-every",
    "2000",
    "--batch-size",
    "128",
    "--n-step",
    "3",
    "--sac.actor.hidden",
    "128",
    "128",
    "--sac.critic-hidden",
    "128",
    "128",
    "--sac.actor-lr",
    "1e-3",
    "--sac.critic-lr",
    "1e-3",
    "--sac.temperature-lr",
    "1e-3",
    "--sac.tau",
    "0.01",
    "--sac.discount",
    "0.97",
)


def run(place: Path, name: str, seed: int) -> None:
    regime = REGIMES[name]
    demos: tuple[str, ...] = ()
    if regime.demos:
        store = str(place / f"demos-{regime.seen}-{regime.demos}")
        assert understudy(["record", store, "--env", regime.env, "--successes", str(regime.demos)]) == 0
        demos = ("--demos", store)
        cloned = place / f"clone-{regime.seen}-{regime.demos}"
        if not cloned.exists():
            shape = ["--cloning.actor.hidden", "128", "128", "--updates", "2000"]
            if regime.env == CAMERA:
                shape += ["--cloning.actor.encoder.inputs", "corner4"]
            assert understudy(["train", "clone", str(cloned), "--env", regime.env, *demos, *shape]) == 0
    given = [
        "--env",
        regime.env,
        *demos,
        "--seed",
        str(seed),
        "--steps",
        str(regime.steps),
        "--eval-every",
        str(regime.eval_every),
        "--updates-per-step",
        str(regime.updates_per_step),
        *OPTIONS,
        *regime.options,
    ]
    assert understudy(["train", "rlpd", str(place / f"{name}-{seed}"), *given]) == 0


def picture(place: Path, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (numbers, camera, human) = plt.subplots(1, 3, figsize=(14, 4.2), width_ratios=(2, 1.4, 1))
    axes = {"numbers": numbers, "camera": camera}
    for name, regime in REGIMES.items():
        for number, path in enumerate(sorted(place.glob(f"{name}-[0-9]"))):
            lines = list(read_metrics(path / "metrics.jsonl", "evaluation"))
            at, rate = [line["step"] for line in lines], [100 * line["success"] for line in lines]
            label = regime.label if number == 0 else None
            axes[regime.seen].plot(at, rate, color=regime.colour, marker=".", alpha=0.8, label=label)
            if name in ("human", "images"):
                _takeovers(human, path, regime, first=number == 0)
    for path in sorted(place.glob("clone-*")):
        rate = 100 * list(read_metrics(path / "metrics.jsonl", "evaluation"))[-1]["success"]
        _, seen, demos = path.name.split("-")
        colour = next(regime.colour for regime in REGIMES.values() if regime.demos == int(demos))
        axes[seen].axhline(rate, color=colour, linestyle=":", label=f"cloning of {demos}: {rate:.0f} %")
    for seen, title in (("numbers", "seen as numbers"), ("camera", "seen through a camera")):
        axes[seen].set(xlabel="steps of practice", ylim=(-3, 103), title=title)
        axes[seen].legend(fontsize=8, loc="lower right")
    numbers.set(ylabel="success alone, held-out starts (%)")
    human.set(xlabel="steps of practice", ylabel="steps by the human (%)", title="how much it helps", ylim=(-3, 103))
    human.legend(fontsize=8)
    for one in (numbers, camera, human):
        one.xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:g}k")
        one.set_xlim(left=0)
    figure.tight_layout()
    figure.savefig(out)


def _takeovers(axes: object, path: Path, regime: Regime, *, first: bool) -> None:
    episodes = list(read_metrics(path / "metrics.jsonl", "episode"))
    size = 25
    groups = [episodes[at : at + size] for at in range(0, len(episodes), size)]
    share = [100 * sum(e["intervention_steps"] for e in some) / sum(e["length"] for e in some) for some in groups]
    label = regime.seen if first else None
    axes.plot([some[-1]["step"] for some in groups], share, color=regime.colour, alpha=0.8, label=label)  # type: ignore[attr-defined]


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
