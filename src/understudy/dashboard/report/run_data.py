"""Report data: all that a report tells of a run, read from its directory while it is at work or afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from understudy.core import UnderstudyError
from understudy.dashboard.api.cluster import lost_shards
from understudy.dashboard.api.cluster_file import Cluster, ClusterFile
from understudy.dashboard.api.rollout_groups import ON_POLICY, Practice
from understudy.replay import Reader
from understudy.training.runs.health import HEALTH, Seen, look
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

Line: TypeAlias = Mapping[str, Any]

IMITATION = ("cloning", "sft")  # kinds of run that live nothing


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
    evaluations: tuple[Line, ...]  # each with the `iteration` after which it was, which is 0 where there are none
    trains: tuple[Line, ...]
    collections: tuple[Line, ...]  # an iteration each, of on-policy runs
    episodes: tuple[Lived, ...]
    later: Line | None  # what `understudy evaluate` found last
    films: tuple[Path, ...]  # of the last evaluation that has any
    demonstrations: tuple[int, int] | None  # episodes and steps; None: the store cannot be read
    processes: tuple[Seen, ...]
    cluster: Cluster | None = None  # the machines that it ran on, if they were several
    missing: tuple[str, ...] = field(default=())  # what a reader will look for, and why it is not there

    @property
    def env(self) -> str:
        return str(self.config["env"])

    @property
    def on_policy(self) -> bool:
        """Whether it goes on in iterations, each of which lives groups of episodes and learns from them."""
        return self.kind in ON_POLICY

    @property
    def imitates(self) -> bool:
        """Whether it lives nothing, and learns from demonstrations alone."""
        return self.kind in IMITATION

    @property
    def practice(self) -> Line:
        """What came of the groups, and of each task."""
        found = Practice()
        for line in self.collections:
            found.add(line)
        return found.to_json()

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
        if self.cluster is not None and self.cluster.state == "running":
            return True
        return any(seen.state in ("running", "stuck") and seen.said["role"] != "server" for seen in self.processes)


def read_run(path: Path) -> RunData:
    """Read it; what is not there yet is named in `missing`."""
    run = Run(path)
    said = run.said
    lines = list(read_metrics(run.metrics)) if run.metrics.exists() else []
    evaluations = _evaluations(lines)
    trains = tuple(line for line in lines if line["kind"] == "train")
    collections = tuple(line for line in lines if line["kind"] == "collection")
    episodes = tuple(_lived(line) for line in lines if line["kind"] == "episode")
    missing = []
    on_policy = run.kind in ON_POLICY
    demonstrations, stored = ((0, 0), ()) if on_policy else _store(run, said["config"])
    if not episodes:
        episodes = stored
    if not evaluations:
        every = said["config"].get("eval_every")
        first = "; the first comes before the first iteration" if on_policy else ""
        when = f"; the first comes after {every:,} steps of practice" if every and not on_policy else first
        missing.append(f"no evaluation yet{when}, or with `understudy evaluate {path}`")
    if not trains:
        missing.append("no updates yet, so there are no losses to draw")
    if not episodes and run.kind not in IMITATION:
        missing.append("no iteration has ended yet" if on_policy else "no episode of practice has ended yet")
    films = _films(run, evaluations)
    if evaluations and not films:
        missing.append("no films: they need a world with cameras, and `--evaluation.videos 3`")
    if demonstrations is None:
        missing.append("the store of demonstrations cannot be read from here, so they are not counted")
    cluster = ClusterFile(path).read()
    missing += lost_shards(cluster) if cluster else []
    return RunData(
        path=path,
        kind=run.kind,
        version=str(said.get("understudy", "?")),
        config=said["config"],
        evaluations=evaluations,
        trains=trains,
        collections=collections,
        episodes=episodes,
        later=_later(run),
        films=films,
        demonstrations=demonstrations,
        processes=(*look(run.path / HEALTH), *look(run.store / HEALTH)),
        cluster=cluster,
        missing=tuple(missing),
    )


def _evaluations(lines: list[dict[str, Any]]) -> tuple[Line, ...]:
    found, iteration = [], 0
    for line in lines:
        if line["kind"] == "collection":
            iteration += 1
        elif line["kind"] == "evaluation":
            found.append({**line, "iteration": iteration})
    return tuple(found)


def _lived(line: Line) -> Lived:
    return Lived(
        step=int(line["step"]),
        length=int(line["length"]),
        human_steps=int(line["human_steps"]),
        success=bool(line["success"]),
    )


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
        places = (
            run.videos / f"step-{line['step']:09d}",
            run.videos / f"iteration-{line['iteration']:06d}",
            run.videos,
        )
        found = [place / name for name in line.get("films", ()) for place in places if (place / name).exists()]
        if found:
            return tuple(found)
    return ()
