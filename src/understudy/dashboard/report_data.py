"""Report data: all that a report tells of a run, read from its directory while it is at work or afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from understudy.core import UnderstudyError
from understudy.replay import Reader
from understudy.training.health import HEALTH, Seen, look
from understudy.training.metrics import read_metrics
from understudy.training.run import Run

Line: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lived:
    """One episode of practice."""

    step: int  # environment steps of practice at its end
    length: int
    human_steps: int
    success: bool


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as it is now."""

    path: Path
    kind: str
    version: str  # of Understudy, when it began
    config: Mapping[str, Any]
    evaluations: tuple[Line, ...]
    trains: tuple[Line, ...]
    episodes: tuple[Lived, ...]
    later: Line | None  # what `understudy evaluate` found last
    films: tuple[Path, ...]  # of the last evaluation that has any
    demonstrations: tuple[int, int] | None  # episodes and steps; None: the store cannot be read
    processes: tuple[Seen, ...]
    missing: tuple[str, ...] = field(default=())  # what a reader will look for, and why it is not there

    @property
    def env(self) -> str:
        return str(self.config["env"])

    @property
    def step(self) -> int:
        """How far it is."""
        lines = [*self.evaluations, *self.trains]
        return max([int(line["step"]) for line in lines] + [lived.step for lived in self.episodes], default=0)

    @property
    def update(self) -> int:
        return max((int(line["update"]) for line in (*self.evaluations, *self.trains)), default=0)

    @property
    def at_work(self) -> bool:
        return any(seen.state in ("running", "stuck") and seen.said["role"] != "server" for seen in self.processes)


def read_run(path: Path) -> RunData:
    """Read it; what is not there yet is named in `missing`."""
    run = Run(path)
    said = run.said
    lines = list(read_metrics(run.metrics)) if run.metrics.exists() else []
    evaluations = tuple(line for line in lines if line["kind"] == "evaluation")
    trains = tuple(line for line in lines if line["kind"] == "train")
    episodes = tuple(_lived(line) for line in lines if line["kind"] == "episode")
    missing = []
    demonstrations, stored = _store(run, said["config"])
    if not episodes:
        episodes = stored
    if not evaluations:
        every = said["config"].get("eval_every")
        when = f"; the first comes after {every:,} steps of practice" if every else ""
        missing.append(f"no evaluation yet{when}, or with `understudy evaluate {path}`")
    if not trains:
        missing.append("no updates yet, so there are no losses to draw")
    if not episodes and run.kind != "cloning":
        missing.append("no episode of practice has ended yet")
    films = _films(run, evaluations)
    if evaluations and not films:
        missing.append("no films: they need a world with cameras, and `--evaluation.videos 3`")
    if demonstrations is None:
        missing.append("the store of demonstrations cannot be read from here, so they are not counted")
    return RunData(
        path=path, kind=run.kind, version=str(said.get("understudy", "?")), config=said["config"],
        evaluations=evaluations, trains=trains, episodes=episodes, later=_later(run), films=films,
        demonstrations=demonstrations, processes=(*look(run.path / HEALTH), *look(run.store / HEALTH)),
        missing=tuple(missing),
    )  # fmt: skip


def _lived(line: Line) -> Lived:
    return Lived(
        step=int(line["step"]), length=int(line["length"]), human_steps=int(line["human_steps"]),
        success=bool(line["success"]),
    )  # fmt: skip


def _store(run: Run, config: Line) -> tuple[tuple[int, int] | None, tuple[Lived, ...]]:
    """Demonstrations, and the practice of actors, which only the store knows."""
    demos = run.store if config.get("demos") is None else Path(config["demos"])
    found = _read_store(demos)
    practice = found if demos == run.store else _read_store(run.store)
    return (None if found is None else found[0]), (() if practice is None else practice[1])


def _read_store(path: Path) -> tuple[tuple[int, int], tuple[Lived, ...]] | None:
    num_demos, num_steps, at, lived = 0, 0, 0, []
    try:
        with Reader(path) as reader:
            for record in reader.episodes():
                if record.info.kind == "demonstration":
                    num_demos += 1
                    num_steps += record.num_steps
                elif record.state == "ended":
                    at += record.num_steps
                    success = bool(record.info.success)
                    lived.append(Lived(step=at, length=record.num_steps, human_steps=record.num_human, success=success))
    except (UnderstudyError, OSError):
        return None
    return (num_demos, num_steps), tuple(lived)


def _later(run: Run) -> Line | None:
    try:
        found = json.loads((run.path / "evaluations" / "evaluation.json").read_text())
        return {**found["score"], "fingerprint": found["fingerprint"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _films(run: Run, evaluations: tuple[Line, ...]) -> tuple[Path, ...]:
    for line in reversed(evaluations):
        places = (run.videos / f"step-{line['step']:09d}", run.videos)
        found = [place / name for name in line["films"] for place in places if (place / name).exists()]
        if found:
            return tuple(found)
    return ()
