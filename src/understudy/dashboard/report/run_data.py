"""Report data: everything that a report needs, read from the run's directory during or after the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from understudy.core import UnderstudyError
from understudy.dashboard.api.cluster import lost_shards
from understudy.dashboard.api.cluster_file import Cluster, ClusterFile
from understudy.dashboard.api.rollout_groups import RolloutGroups
from understudy.replay import Reader
from understudy.training.runs.health import HEALTH, ProcessStatus, read_health
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import ON_POLICY, Run

Line: TypeAlias = Mapping[str, Any]

IMITATION = ("cloning", "sft", "improve")  # kinds of run without rollouts


@dataclass(frozen=True, kw_only=True)
class PracticeEpisode:
    """One episode of practice."""

    step: int  # environment steps of practice up to its end
    length: int
    human_steps: int
    success: bool


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The present state of a run."""

    path: Path
    kind: str
    version: str  # of Understudy, at its start
    config: Mapping[str, Any]
    evaluations: tuple[Line, ...]  # each with its `iteration`, which is 0 for off-policy runs
    trains: tuple[Line, ...]
    collections: tuple[Line, ...]  # an iteration each, of on-policy runs
    episodes: tuple[PracticeEpisode, ...]
    later: Line | None  # the last result of `understudy evaluate`
    videos: tuple[Path, ...]  # of the last evaluation that has any
    demonstrations: tuple[int, int] | None  # episodes and steps; None: the store cannot be read
    processes: tuple[ProcessStatus, ...]
    helper: str = "a human"  # who took over from the policy, in a sentence
    cluster: Cluster | None = None  # the nodes that it ran on, if any
    missing: tuple[str, ...] = field(default=())  # what a reader will look for, and why it is missing

    @property
    def env(self) -> str:
        return str(self.config["env"])

    @property
    def on_policy(self) -> bool:
        """Whether each iteration rolls out groups of episodes and learns from them."""
        return self.kind in ON_POLICY

    @property
    def imitates(self) -> bool:
        """Whether it learns from demonstrations alone, without rollouts."""
        return self.kind in IMITATION

    @property
    def rollout_groups(self) -> Line:
        """Kept and dropped groups, and the success of each task."""
        found = RolloutGroups()
        for line in self.collections:
            found.add(line)
        return found.to_json()

    @property
    def step(self) -> int:
        """Environment steps so far."""
        lines = [*self.evaluations, *self.trains]
        return max([int(line["step"]) for line in lines] + [episode.step for episode in self.episodes], default=0)

    @property
    def update(self) -> int:
        return max((int(line["update"]) for line in (*self.evaluations, *self.trains)), default=0)

    @property
    def is_finished(self) -> bool:
        """Whether all its steps, updates or iterations are done."""
        if self.on_policy:
            return bool(self.rollout_groups["iterations"] >= self.config["iterations"])
        if self.imitates:
            return self.update >= int(self.config["updates"])
        return self.step >= int(self.config.get("steps", 0))

    @property
    def is_running(self) -> bool:
        if self.cluster is not None and self.cluster.driver_state == "running":
            return True
        return any(seen.state in ("running", "stuck") and seen.content["role"] != "server" for seen in self.processes)


def read_run(path: Path) -> RunData:
    """Read a run; `missing` lists what does not exist yet."""
    run = Run(path)
    content = run.metadata
    lines = list(read_metrics(run.metrics)) if run.metrics.exists() else []
    evaluations = _evaluations(lines)
    trains = tuple(line for line in lines if line["kind"] == "train")
    collections = tuple(line for line in lines if line["kind"] == "collection")
    episodes = tuple(_episode(line) for line in lines if line["kind"] == "episode")
    missing = []
    on_policy = run.kind in ON_POLICY
    demonstrations, stored, helper = ((0, 0), (), "a human") if on_policy else _store(run, content["config"])
    if not episodes:
        episodes = stored
    if not evaluations:
        every = content["config"].get("eval_every")
        first = "; the first comes before the first iteration" if on_policy else ""
        when = f"; the first comes after {every:,} steps of practice" if every and not on_policy else first
        missing.append(f"no evaluation yet{when}, or with `understudy evaluate {path}`")
    if not trains:
        missing.append("no updates yet, so there are no losses to plot")
    if not episodes and run.kind not in IMITATION:
        missing.append("no iteration has ended yet" if on_policy else "no episode of practice has ended yet")
    videos = _videos(run, evaluations)
    if evaluations and not videos:
        missing.append("no videos: they need a world with cameras, and `--evaluation.videos 3`")
    if demonstrations is None:
        missing.append("the store of demonstrations cannot be read from here, so they are not counted")
    cluster = ClusterFile(path).read()
    missing += lost_shards(cluster) if cluster else []
    return RunData(
        path=path,
        kind=run.kind,
        version=str(content.get("understudy", "?")),
        config=content["config"],
        evaluations=evaluations,
        trains=trains,
        collections=collections,
        episodes=episodes,
        later=_later(run),
        videos=videos,
        demonstrations=demonstrations,
        processes=(*read_health(run.path / HEALTH), *read_health(run.store / HEALTH)),
        helper=helper,
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


def _episode(line: Line) -> PracticeEpisode:
    return PracticeEpisode(
        step=int(line["step"]),
        length=int(line["length"]),
        human_steps=int(line["intervention_steps"]),
        success=bool(line["success"]),
    )


def _store(run: Run, config: Line) -> tuple[tuple[int, int] | None, tuple[PracticeEpisode, ...], str]:
    """The number of demonstrations and their steps; practice, which for remote actors is only in the store; and who
    helped in it: the world's script, or a human."""
    demos = run.store if config.get("demos") is None else Path(config["demos"])
    found = _read_store(demos)
    practice = found if demos == run.store else _read_store(run.store)
    demonstrations = None if found is None else found[0]
    return (demonstrations, (), "a human") if practice is None else (demonstrations, *practice[1:])


def _read_store(path: Path) -> tuple[tuple[int, int], tuple[PracticeEpisode, ...], str] | None:
    num_demos, num_steps, at, episodes = 0, 0, 0, []
    operators = set()
    try:
        with Reader(path) as reader:
            for record in reader.episodes():
                if record.info.kind == "demonstration":
                    num_demos += 1
                    num_steps += record.num_steps
                    continue
                if record.num_human:
                    operators.add(record.info.operator)
                if record.state == "ended":
                    at += record.num_steps
                    success = bool(record.info.success)
                    episodes.append(
                        PracticeEpisode(step=at, length=record.num_steps, human_steps=record.num_human, success=success)
                    )
    except (UnderstudyError, OSError):
        return None
    return (num_demos, num_steps), tuple(episodes), "the script" if operators == {"script"} else "a human"


def _later(run: Run) -> Line | None:
    try:
        found = json.loads((run.path / "evaluations" / "evaluation.json").read_text())
        return {**found["score"], "fingerprint": found["fingerprint"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _videos(run: Run, evaluations: tuple[Line, ...]) -> tuple[Path, ...]:
    for line in reversed(evaluations):
        directories = (
            run.videos / f"step-{line['step']:09d}",
            run.videos / f"iteration-{line['iteration']:06d}",
            run.videos,
        )
        found = [
            directory / name
            for name in line.get("videos", ())
            for directory in directories
            if (directory / name).exists()
        ]
        if found:
            return tuple(found)
    return ()
