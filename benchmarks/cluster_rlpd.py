"""RLPD on a real small Ray cluster, undisturbed and with its workers and nodes killed.

    python benchmarks/cluster_rlpd.py --nodes 3                # half an hour on two cores

Two actors live while the learner learns, into two shards. Every `every_s` an actor, the learner or a shard is killed by
SIGKILL; once a node is (another joins), and once the driver, which is resumed. Chance has a part in such a run, so no
two are equal; afterwards:

    lost         steps that a shard had told of, and does not have
    duplicated   episodes that are there twice
    success      of the policy alone on held-out starts, beside that of undisturbed runs; --out draws it

Exit code 1 if anything was lost, is there twice, or a store has problems.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent))

from cluster_faults import cluster, disturbed
from killed import ENV, curve, picture

from understudy.cli import main as understudy
from understudy.replay import Reader, verify
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.runs.run import Run

KILLED = ("actor", "actor", "shard", "learner")
NEVER_S = 1e9


def main(
    nodes: int = 3,
    steps: int = 4_000,
    every_s: float = 20.0,
    seeds: tuple[int, ...] = (0, 1, 2),
    out: Path | None = None,
) -> int:
    """Train twice with each seed, and compare.

    Args:
        nodes: Of the cluster, the head included.
        steps: Of each run.
        every_s: Between two kills.
        seeds: Of the runs, and of what is killed when.
        out: Where to draw success over steps.
    """
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="understudy-faults-") as folder:
        demos = Path(folder) / "demos"
        if understudy(["record", str(demos), "--env", ENV, "--successes", "5"]):
            raise SystemExit("the demonstrations could not be recorded")
        for seed, (name, pause_s) in itertools.product(seeds, (("whole", NEVER_S), ("killed", every_s))):
            path = Path(folder) / f"{name}-{seed}"
            config = RLPDConfig(
                env=ENV,
                demos=str(demos),
                steps=steps,
                eval_every=steps // 8,
                checkpoint_every=steps // 16,
                seed=seed,
                intervention=InterventionConfig(source="script"),
                max_pending_updates=400,
            )
            Run.create(path, "rlpd", config)
            began = time.monotonic()
            with cluster(nodes) as (ray_cluster, extra):
                options = ("--cluster.max-lag", "1", "--cluster.rollout.num", "2")
                faults = disturbed(path, ray_cluster, extra, options, every_s=pause_s, seed=seed, killed=KILLED)
            print(
                f"{path.name}: {time.monotonic() - began:.0f} s; {faults}; success at steps: "
                f"{' '.join(f'{step}:{rate:.0f}' for step, rate in curve(path))}",
                flush=True,
            )
            problems += check(path, faults.acknowledged)
        if out is not None:
            picture(Path(folder), out, "workers, a node and the driver killed")
    for line in problems:
        print(f"WRONG: {line}")
    return 1 if problems else 0


def check(path: Path, acknowledged: Counter[str]) -> list[str]:
    """What is wrong with the shards of a run."""
    problems, lived, steps = [], Counter[tuple[object, ...]](), Counter[str]()
    for shard in sorted((path / "shards").iterdir()):
        problems += [f"{shard.name}: {problem}" for problem in verify(shard).problems]
        with Reader(shard) as reader:
            for record in reader.catalog.episodes():
                steps[shard.name] += record.num_steps
                if record.deleted is None and record.num_steps:
                    episode = reader.read(record.id)
                    lived[record.info.actor, record.info.seed, episode.action.tobytes(), episode.reward.tobytes()] += 1
    lost = {name: most - steps[name] for name, most in acknowledged.items() if steps[name] < most}
    twice = [key[:2] for key, count in lived.items() if count > 1]
    print(
        f"{path.name}: {steps.total()} steps in {len(lived)} episodes; lost {sum(lost.values())}, "
        f"duplicated {len(twice)}, problems of the stores {len(problems)}",
        flush=True,
    )
    return [*problems, *([f"lost: {lost}"] if lost else []), *([f"twice: {twice[:10]}"] if twice else [])]


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
