"""What do corrections and practice add, when there are two demonstrations a task and imitation no longer improves?

    understudy env setup metaworld
    python -m benchmarks.metaworld_study DIR --seeds 0 1 2               # everything; or only some parts, as below
    python -m benchmarks.metaworld_study DIR imitate choose --seeds 0    # how long to imitate, by training starts
    python -m benchmarks.metaworld_study DIR collect picture             # the results as JSON, and the figure

What is there already is not run again, and a run that was stopped is continued. Every figure is the success on 256
held-out starts, 64 of each task, with sampled actions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from benchmarks.improve import run

from understudy.replay import Reader
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run
from understudy.training.runs.wilson_interval import SuccessRate

TASKS = ("handle-press-v3", "button-press-topdown-v3", "faucet-open-v3", "faucet-close-v3")
ENV = (
    f'metaworld?tasks={json.dumps(TASKS).replace(" ", "")}&cameras=["topview"]&size=64&action_repeat=2&max_steps=80'
    "&hide_goal=true&state=hand"
)
DEMOS = 2  # of each task
HELD_OUT = ("--evaluation.episodes", "256")
NETWORKS = {
    "vla": ("--network", "vla", "--vla.use-proprio", "state", "--batch-size", "32"),
    "flow": ("--network", "flow", "--batch-size", "64"),
}
LENGTHS = {"vla": (200, 400, 800, 1600), "flow": (500, 1000, 2000, 4000)}  # updates of imitation
IMITATION = {f"{network}-{updates}": (network, updates) for network in LENGTHS for updates in LENGTHS[network]}
START = {"vla": 200, "flow": 500}  # from which everything else starts; for flow, longer imitation does not help
GROUPS = ("--plan.max-waves", "1", "--algorithm.loss-aggregation", "episode-mean", "--max-empty", "40")
VLA = (*GROUPS, "--engine.learning-rate", "2e-4")
FLOW = (*VLA, "--noise-level", "0.5")
PPO = ("--algorithm.loss-aggregation", "episode-mean", "--engine.learning-rate", "2e-4", "--noise-level", "0.5")


@dataclass(frozen=True)
class Practice:
    """A run of practice: of the imitated policy, or of what HG-DAgger made of it with one round of corrections."""

    network: str
    algorithm: str
    options: tuple[str, ...]
    corrected: bool = False
    iterations: int = 40  # of 64 episodes each

    def start(self, root: Path, seed: int) -> Path:
        return root / f"{METHODS[0]}-1-{seed}" if self.corrected else start(root, self.network, seed)


PRACTICE = {
    "flow-grpo": Practice("flow", "grpo", FLOW),
    "flow-grpo-corrected": Practice("flow", "grpo", FLOW, corrected=True, iterations=80),
    "flow-ppo": Practice("flow", "ppo", PPO, iterations=80),
    "flow-ppo-corrected": Practice("flow", "ppo", PPO, corrected=True, iterations=80),
    "vla-grpo": Practice("vla", "grpo", VLA),
    "vla-rloo": Practice("vla", "rloo", VLA),
}
METHODS = ("hg-dagger", "filtered-cloning", "recap", "cloning")
ROUNDS = 3  # of corrections: of the first policy, and of what hg-dagger made of the rounds before
EPISODES = 30  # in each task and round, with a script that takes over where there is no progress
PATIENCE = 8  # steps without progress
IMPROVE_UPDATES = 1500
RESIDUAL_STEPS = 1500  # of each task
BASE = ("--sac.actor.residual-scale", "0.5", "--sac.bc-weight", "1", "--intervention.source", "script")
RESULTS = Path("docs/benchmarks/metaworld_study.json")
PICTURE = Path("docs/images/metaworld_study.svg")
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}  # by seed: as matplotlib names and as the legend shows it
Part = Literal["demos", "imitate", "choose", "practice", "correct", "residual", "collect", "picture"]


def study(
    root: tyro.conf.Positional[Path],
    parts: tyro.conf.Positional[tuple[Part, ...]] = (
        "demos",
        "imitate",
        "correct",
        "practice",
        "residual",
        "collect",
        "picture",
    ),
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    only: tuple[str, ...] = (),
    iterations: int | None = None,
) -> int:
    """Run parts of the study, for one seed after the other.

    Args:
        root: Directory for the runs; what is there already is not run again.
        parts: Parts to run.
        seeds: Seeds of demonstrations, training and episodes.
        only: Names of lengths (flow-500), runs (flow-grpo), methods (recap) or tasks; by default all.
        iterations: Number of iterations of practice, of 64 episodes each; by default 40 or 80, as on the page.
    """
    for seed in seeds:
        for part in parts:
            if part == "demos":
                demos(root, seed)
            elif part == "imitate":
                imitate(root, seed, _chosen(IMITATION, only))
            elif part == "choose":
                choose(root, seed, _chosen(IMITATION, only))
            elif part == "practice":
                practice(root, seed, _chosen(PRACTICE, only), iterations)
            elif part == "correct":
                correct(root, seed, _chosen(METHODS, only))
            elif part == "residual":
                residual(root, seed, _chosen(TASKS, only))
    if "collect" in parts:
        RESULTS.write_text(json.dumps({"env": ENV, "rows": list(collect(root, seeds))}, indent=1) + "\n")
        print(table(json.loads(RESULTS.read_text())["rows"]))
    if "picture" in parts:
        picture(json.loads(RESULTS.read_text())["rows"], PICTURE)
    return 0


def demos(root: Path, seed: int) -> None:
    """Record them, unless they are there."""
    path = root / f"demos-{seed}"
    if not _is_done(path):
        words = ("record", str(path), "--successes", str(DEMOS), "--seed", str(seed))
        seconds = sum(run(*words, "--env", f"{ENV}&task={task}") for task in TASKS)
        _done(path).write_text(json.dumps({"cpu_s": round(seconds)}))


def imitate(root: Path, seed: int, names: Iterable[str]) -> None:
    """Imitate them for several lengths; the learning rate falls over each."""
    for name in names:
        network, updates = IMITATION[name]
        given = ("--env", ENV, "--demos", str(root / f"demos-{seed}"), *NETWORKS[network], "--seed", str(seed))
        once(root / f"{name}-{seed}", "sft", *given, "--updates", str(updates), *HELD_OUT)


def choose(root: Path, seed: int, names: Iterable[str]) -> None:
    """Evaluate each length on 128 starts of the training, to judge from which one on longer imitation does not help."""
    for name in names:
        path = root / f"{name}-{seed}"
        if not (out := path / "training-starts").exists():
            sample = ("--split", "train", "--episodes", "128", "--sampled")
            run("evaluate", str(path), "--env", ENV, *sample, "--out", str(out))


def practice(root: Path, seed: int, names: Iterable[str], iterations: int | None) -> None:
    """Learn from the success of 64 episodes an iteration: 8 from each of 8 starts, and with PPO of 64 starts."""
    for name in names:
        one = PRACTICE[name]
        wanted = iterations or one.iterations
        given = ("--policy", str(one.start(root, seed)), "--env", ENV, "--seed", str(seed))
        often = ("--iterations", str(wanted), "--eval-every", "20", "--workers.num-parallel-envs", "4", *HELD_OUT)
        once(path := root / f"{name}-{seed}", "train", one.algorithm, *given, *often, *one.options)
        if Run(path).metadata["config"]["iterations"] < wanted:
            before = json.loads(_done(path).read_text())["cpu_s"]
            seconds = run("resume", str(path), "--iterations", str(wanted))
            _done(path).write_text(json.dumps({"cpu_s": None if before is None else before + round(seconds)}))


def correct(root: Path, seed: int, methods: Iterable[str]) -> None:
    """Learn from episodes of the flow policy in which a script corrects it."""
    first = policy = start(root, "flow", seed)
    script = ("--human", "script", "--patience-steps", str(PATIENCE), "--noise", "0.1", "--episodes", str(EPISODES))
    for number in range(1, ROUNDS + 1):
        new, stores = mixed(root, seed, number), mixed(root, seed, *range(1, number + 1))
        for task, store in zip(TASKS, new, strict=True):
            given = ("--policy", str(policy), "--env", f"{ENV}&task={task}", "--seed", str(10 * seed + number))
            once(store, "rollout", *given, *script)
        given = ("--policy", str(first), "--experience", *map(str, stores), "--updates", str(IMPROVE_UPDATES))
        for method in methods if number == ROUNDS else METHODS[:1]:
            path = root / f"{method}-{number}-{seed}"
            once(path, "improve", *given, "--by", method, "--env", ENV, "--seed", str(seed), *HELD_OUT)
        policy = root / f"{METHODS[0]}-{number}-{seed}"


def mixed(root: Path, seed: int, *rounds: int) -> list[Path]:
    """The stores with corrections of these rounds, one for each task and round."""
    return [root / f"mixed-{number}-{task}-{seed}" for number in rounds for task in TASKS]


def residual(root: Path, seed: int, tasks: Iterable[str]) -> None:
    """Change the actions of the flow policy, with takeovers: a run for each task, as its actor gets no instruction."""
    base = ("--base-policy", str(start(root, "flow", seed)), *BASE)
    for task in tasks:
        store, number = root / f"demos-{task}-{seed}", ("--env", f"{ENV}&task={task}", "--seed", str(seed))
        once(store, "record", "--successes", str(DEMOS), *number)  # the same as of all tasks, in a store of their own
        given = ("--demos", str(store), *number)
        steps = ("--steps", str(RESIDUAL_STEPS), "--eval-every", str(RESIDUAL_STEPS), "--evaluation.episodes", "64")
        once(root / f"residual-{task}-{seed}", "train", "rlpd", *given, *steps, *base)


def start(root: Path, network: str, seed: int) -> Path:
    return root / f"{network}-{START[network]}-{seed}"


def once(path: Path, *words: str) -> None:
    """Run a command for a directory unless it has finished; its CPU seconds are kept if it was not interrupted."""
    if _is_done(path):
        return
    verb = 2 if words[0] == "train" else 1
    if begun := path.exists():
        words = ("resume", str(path)) if Run.is_at(path) else (*words[:verb], str(path), *words[verb:])
        run(*words)
    else:
        seconds = run(*words[:verb], str(path), *words[verb:])
    _done(path).write_text(json.dumps({"cpu_s": None if begun else round(seconds)}))


# ---- results


def collect(root: Path, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """A row for each run that has finished; the seconds include those of all that it needs."""
    for seed in seeds:
        if not _is_done(root / f"demos-{seed}"):
            continue
        shown = _steps(root / f"demos-{seed}")
        for network in NETWORKS:
            for updates in LENGTHS[network]:
                if _is_done(path := root / f"{network}-{updates}-{seed}"):
                    yield _row(path, seed, network, "imitation", shown, updates=updates)
        for name, one in PRACTICE.items():
            curve = _curve(path := root / f"{name}-{seed}")
            if len(curve) > 1:  # also of a run that was stopped: up to its last evaluation
                needs, stores, method = [start(root, one.network, seed)], list[Path](), one.algorithm
                if one.corrected:
                    needs.append(one.start(root, seed))
                    stores, method = mixed(root, seed, 1), f"{METHODS[0]} + {one.algorithm}"
                rounds = 1 if one.corrected else None
                yield _row(
                    path, seed, one.network, method, shown, needs=needs, experience=stores, rounds=rounds, curve=curve
                )
        base = start(root, "flow", seed)
        for number in range(1, ROUNDS + 1):
            stores = mixed(root, seed, *range(1, number + 1))
            before = [base, *(root / f"{METHODS[0]}-{earlier}-{seed}" for earlier in range(1, number))]
            for method in METHODS:
                if _is_done(path := root / f"{method}-{number}-{seed}"):
                    yield _row(path, seed, "flow", method, shown, needs=before, experience=stores, rounds=number)
        runs = [root / f"residual-{task}-{seed}" for task in TASKS]
        if all(map(_is_done, runs)):
            yield _residual(runs, seed, shown, start(root, "flow", seed))


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: success of each run against what it needed."""
    lines = [
        "| policy | method | seed | success | demonstrated steps | practised steps | human steps | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        method = _method(row)
        success, low, high = (100 * row[name] for name in ("success", "low", "high"))
        seconds = "" if row["cpu_s"] is None else f"{row['cpu_s']:,}"
        lines.append(
            f"| {row['network']} | {method} | {row['seed']} | {success:.0f} % ({low:.0f} to {high:.0f}) | "
            f"{row['demo_steps']:,} | {row['env_steps']:,} | {row['human_steps']:,} | {seconds} |"
        )
    return "\n".join(lines)


def task_table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: success of each run in each task, in percent."""
    lines = [f"| policy | method | seed | {' | '.join(TASKS)} |", "|---|---|---|" + "---|" * len(TASKS)]
    for row in rows:
        method = _method(row)
        shares = " | ".join(f"{100 * row['tasks'][task]:.0f}" for task in TASKS)
        lines.append(f"| {row['network']} | {method} | {row['seed']} | {shares} |")
    return "\n".join(lines)


def _method(row: dict[str, Any]) -> str:
    lengths = ((row[name], name) for name in ("updates", "iterations", "rounds"))
    counted = [f"{number:,} {name if number > 1 else name[:-1]}" for number, name in lengths if number is not None]
    return ", ".join([row["method"], *counted])


def picture(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw success over updates of imitation, and over the steps of methods with corrections and of practice."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, panels = plt.subplots(1, 3, figsize=(12, 4.8), sharey=True)
    algorithms = {one.algorithm for one in PRACTICE.values()}
    kinds = sorted({(row["network"], row["method"]) for row in rows})
    panel = {kind: 0 if kind[1] == "imitation" else 2 if kind[1].split()[-1] in algorithms else 1 for kind in kinds}
    for kind in kinds:
        beside = [other for other in kinds if panel[other] == panel[kind]]
        seeds = sorted({row["seed"] for row in rows if (row["network"], row["method"]) == kind})
        for seed in seeds:
            of_kind = [row for row in rows if row["seed"] == seed and (row["network"], row["method"]) == kind]
            points: list[tuple[Any, ...]]
            if panel[kind] == 0:
                points = [(row["updates"], row["success"], row["low"], row["high"]) for row in of_kind]
            else:
                points = [tuple(point) for row in of_kind for point in row["curve"]]
                if kind[1] == METHODS[0]:
                    points[:0] = [
                        (0, row["success"], row["low"], row["high"])
                        for row in rows
                        if (row["seed"], row["network"], row["updates"]) == (seed, kind[0], START[kind[0]])
                    ]
            at, success, low, high = zip(*points, strict=True)
            errors = [
                [100 * (middle - least) for middle, least in zip(success, low, strict=True)],
                [100 * (most - middle) for middle, most in zip(success, high, strict=True)],
            ]
            panels[panel[kind]].errorbar(
                at,
                [100 * share for share in success],
                errors,
                marker=list(MARKERS)[seed % len(MARKERS)],
                markersize=4,
                linewidth=1,
                capsize=2,
                color=f"C{beside.index(kind)}",
                label=" ".join(kind) if seed == seeds[0] else None,
            )
    panels[0].set(xlabel="updates of imitation", ylabel="success on 256 held-out starts, sampled [%]", ylim=(0, 100))
    panels[1].set(xlabel="steps of the policy and the script: corrections")
    panels[2].set(xlabel="steps of the policy and the script: practice")
    shown = [f"{seed} {list(MARKERS.values())[seed % len(MARKERS)]}" for seed in sorted({row["seed"] for row in rows})]
    title = f"markers: seeds {', '.join(shown)}"
    for axes in panels:
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, loc="lower center", ncols=2, title=title, title_fontsize=7)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def _row(
    path: Path,
    seed: int,
    network: str,
    method: str,
    shown: tuple[int, int],
    *,
    needs: Iterable[Path] = (),
    experience: Iterable[Path] = (),
    updates: int | None = None,
    rounds: int | None = None,
    curve: list[list[float]] | None = None,
) -> dict[str, Any]:
    *_, last = read_metrics(path / "metrics.jsonl", "evaluation")
    stores = list(experience)
    counted = [_steps(store) for store in stores]
    before = sum(steps for steps, _ in counted)
    practised = [[before + steps, *found] for steps, *found in curve or ()]
    needed = [path, *needs, *stores]
    found = rate(last["episode_results"])
    return {
        "network": network,
        "method": method,
        "seed": seed,
        "updates": updates,
        "iterations": last.get("iteration") if curve else None,
        "rounds": rounds,
        **found,
        "tasks": {name: numbers["success"] for name, numbers in last["tasks"].items()},
        "demo_steps": shown[0],
        "env_steps": round(practised[-1][0]) if practised else before,
        "human_steps": sum(human for _, human in counted),
        "cpu_s": _seconds(needed),
        "curve": practised or [[before, found["success"], found["low"], found["high"]]],
    }


def _residual(runs: list[Path], seed: int, shown: tuple[int, int], base: Path) -> dict[str, Any]:
    """One row for the runs of all tasks together."""
    last = [list(read_metrics(path / "metrics.jsonl", "evaluation"))[-1] for path in runs]
    episodes = [episode for path in runs for episode in read_metrics(path / "metrics.jsonl", "episode")]
    env_steps, found = sum(episode["length"] for episode in episodes), rate(_results(last))
    return {
        "network": "flow",
        "method": "residual",
        "seed": seed,
        "updates": None,
        "iterations": None,
        "rounds": None,
        **found,
        "tasks": {task: line["success"] for task, line in zip(TASKS, last, strict=True)},
        "demo_steps": shown[0],
        "env_steps": env_steps,
        "human_steps": sum(episode["intervention_steps"] for episode in episodes),
        "cpu_s": _seconds([*runs, base]),
        "curve": [[env_steps, found["success"], found["low"], found["high"]]],
    }


def _curve(path: Path) -> list[list[float]]:
    """Practised steps, success and its interval, at each evaluation of a run of practice; none if it is not there."""
    points: list[list[float]] = []
    steps = 0
    if not (path / "metrics.jsonl").exists():
        return points
    for line in read_metrics(path / "metrics.jsonl"):
        if line["kind"] == "episode":
            steps += line["length"]
        elif line["kind"] == "evaluation":
            found = rate(line["episode_results"])
            points.append([steps, found["success"], found["low"], found["high"]])
    return points


def rate(episodes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The success of these episodes with its 95 % Wilson interval."""
    outcomes = [bool(episode["success"]) for episode in episodes]
    success = SuccessRate(num_successes=sum(outcomes), num_episodes=len(outcomes))
    low, high = success.interval
    return {
        "successes": success.num_successes,
        "episodes": success.num_episodes,
        "success": success.rate,
        "low": low,
        "high": high,
    }


def _results(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [episode for line in lines for episode in line["episode_results"]]


def _steps(store: Path) -> tuple[int, int]:
    """The number of steps of a store, and of a human's among them."""
    with Reader(store) as reader:
        episodes = list(reader.episodes())
    return sum(one.num_steps for one in episodes), sum(one.num_human for one in episodes)


def _seconds(paths: Iterable[Path]) -> int | None:
    """CPU seconds of all these; None if one of them was interrupted."""
    found = [json.loads(_done(path).read_text())["cpu_s"] if _is_done(path) else None for path in paths]
    return None if None in found else sum(found)


def _done(path: Path) -> Path:
    return path.with_name(f"{path.name}.done.json")


def _is_done(path: Path) -> bool:
    return _done(path).exists()


def _chosen(names: Iterable[str], only: tuple[str, ...]) -> list[str]:
    return [name for name in names if not only or name in only]


if __name__ == "__main__":
    raise SystemExit(tyro.cli(study))
