"""Learning curves of a run in three processes, undisturbed and with all of them killed again and again.

    python benchmarks/killed.py --place DIR --out docs/images/killed.svg      # some twenty minutes on two cores

Each run is a real `understudy serve`, `understudy actor` and `understudy learner`. While a killed one goes on, each in
turn dies by SIGKILL every KILL_EVERY steps and is started again. No step that a server had acknowledged may be lost,
and at the end the policy should stand where the undisturbed ones do.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from understudy.cli import main as understudy
from understudy.core import UnderstudyError
from understudy.replay import Reader, verify
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

STEPS = 3_000
EVERY = 500
KILL_EVERY = 250
ENV = "toy:press_button?cameras=false&state=task"


class Role:
    """A command of understudy that runs until it is killed or done."""

    def __init__(self, log: Path, *arguments: str):
        self._log = log
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-u", "-m", "understudy", *self._arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def done(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def live(place: Path, demos: Path, seed: int, *, killed: bool) -> None:
    config = RLPDConfig(
        env=ENV,
        demos=str(demos),
        steps=STEPS,
        eval_every=EVERY,
        checkpoint_every=EVERY // 2,
        seed=seed,
        intervention=InterventionConfig(source="script"),
        max_pending_updates=400,
    )
    run = Run.create(place, "rlpd", config)
    port = 7500 + seed + 10 * killed
    address = f"127.0.0.1:{port}"
    server = Role(place / "server.log", "serve", str(run.store), "--port", str(port))
    actor = Role(place / "actor.log", "actor", str(place), address, "--spool", str(place / "spool"))
    learner = Role(place / "learner.log", "learner", str(place), address)
    kills = 0
    with ExitStack() as undo:
        for role in (server, actor, learner):
            undo.callback(role.kill)
            role.start()
        turn = itertools.cycle((actor, server, learner))
        due = KILL_EVERY
        while not learner.done:
            time.sleep(0.2)
            if killed and num_steps(run) >= due:
                role = next(turn)
                role.kill()
                role.start()
                kills += 1
                due += KILL_EVERY
        assert learner.process is not None
        if learner.process.returncode:
            raise SystemExit(f"the learner failed; see {place / 'learner.log'}")
    problems = verify(run.store).problems
    print(f"{place.name}: killed {kills} times, {num_steps(run)} steps, problems of the store: {len(problems)}")


def num_steps(run: Run) -> int:
    with suppress(UnderstudyError), Reader(run.store) as reader:
        return sum(record.num_steps for record in reader.episodes())
    return 0


def curve(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], 100 * line["success"]) for line in read_metrics(path / "metrics.jsonl", "evaluation")]


def picture(place: Path, out: Path, done: str = "each process killed in turn") -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, colour, label in (("whole", "C0", "undisturbed"), ("killed", "C3", done)):
        for number, path in enumerate(sorted(place.glob(f"{kind}-*"))):
            at, rate = zip(*curve(path), strict=True)
            axes.plot(at, rate, color=colour, marker=".", label=label if number == 0 else None)
    axes.set(xlabel="steps of practice", ylabel="success alone, held-out starts (%)", ylim=(-3, 103))
    axes.legend()
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("killed.svg"))
    options = parser.parse_args()
    demos = options.place / "demos"
    if understudy(["record", str(demos), "--env", ENV, "--successes", "5"]):
        raise SystemExit("the demonstrations could not be recorded")
    for seed in range(options.seeds):
        for kind in ("whole", "killed"):
            path = options.place / f"{kind}-{seed}"
            if not path.exists():
                live(path, demos, seed, killed=kind == "killed")
            print(path.name, " ".join(f"{step}:{rate:.0f}" for step, rate in curve(path)), flush=True)
    picture(options.place, options.out)


if __name__ == "__main__":
    main()
