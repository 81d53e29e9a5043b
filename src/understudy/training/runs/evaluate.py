"""Evaluate: a policy alone on start states that training has never seen, and the worst of its episodes as films."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from understudy.core import Source, Split, Tree
from understudy.envs.world import World
from understudy.training.data.run_episode import Act
from understudy.training.runs.config import ConfigError
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.score import Score
from understudy.training.runs.video import Frames, cameras_of, draw, write_film

if TYPE_CHECKING:
    from understudy.policies import ActorPolicy


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How often, and from where."""

    episodes: int = 100
    split: Split = "eval"
    videos: int = 0  # of the worst episodes, if the world has cameras

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.videos < 0:
            raise ConfigError(
                f"evaluation: expected episodes from 1 and videos from 0, got {self.episodes} and {self.videos}"
            )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One episode of an evaluation."""

    task: str
    start: int
    success: bool
    num_steps: int
    total_reward: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came of it."""

    score: Score
    num_starts: int  # different ones
    trials: tuple[Trial, ...]
    films: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        low, high = self.score.interval
        return {
            "success": self.score.rate,
            "low": low,
            "high": high,
            "episodes": self.score.num_episodes,
            "starts": self.num_starts,
            "mean_steps": float(np.mean([t.num_steps for t in self.trials])),
            "films": list(self.films),
            "trials": [asdict(trial) for trial in self.trials],
        }


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of a policy's evaluation, and the versions of what its world stands on."""

    evaluation: Evaluation
    versions: Mapping[str, str]


class Judge(Protocol):
    """Whoever plays held-out episodes with a policy, alone and without noise; here, or on another machine."""

    def __call__(self, policy: ActorPolicy, config: EvaluationConfig, films: Path) -> Judged:
        """Films of the worst go to the directory `films`."""
        ...


def last_score(metrics: Path) -> Score | None:
    """The score of a run's last evaluation, from its metrics."""
    found = None
    for line in read_metrics(metrics, "evaluation"):
        found = Score(num_successes=sum(trial["success"] for trial in line["trials"]), num_episodes=line["episodes"])
    return found


def evaluate(
    world: World,
    act: Act,
    config: EvaluationConfig,
    *,
    seed: int,
    films: Path | None = None,
    progress: Callable[[Trial], None] | None = None,
) -> Evaluation:
    """Play the world's task from its held-out starts, in turn; with more episodes than starts they are used again.

    The worst episodes, failures first and long ones among them, go to the directory `films`.
    """
    task = world.task
    starts = world.suite.starts(task, config.split)
    trials: list[Trial] = []
    worst: list[tuple[tuple[bool, int], int, Trial, Frames]] = []
    order = count()
    for number in range(config.episodes):
        frames: Frames = []
        start = starts[number % len(starts)]
        trial = _play(world, act, start, seed + number, frames if films is not None and config.videos else None)
        trials.append(trial)
        if frames:
            heapq.heappush(worst, ((not trial.success, trial.num_steps), next(order), trial, frames))
            if len(worst) > config.videos:
                heapq.heappop(worst)
        if progress is not None:
            progress(trial)
    written = [] if films is None else [_film(films, trial, frames) for *_, trial, frames in sorted(worst)[::-1]]
    return Evaluation(
        score=Score(num_successes=sum(trial.success for trial in trials), num_episodes=len(trials)),
        num_starts=len({trial.start for trial in trials}),
        trials=tuple(trials),
        films=tuple(written),
    )


def _play(world: World, act: Act, start: int, seed: int, frames: Frames | None) -> Trial:
    observation, info = world.reset(seed=seed, options={"task": world.task.name, "start": start})
    total, num_steps, ended, success = 0.0, 0, False, False
    _keep(frames, observation)
    while not ended:
        action, _ = act(observation)
        observation, reward, terminated, truncated, said = world.step(action)
        _keep(frames, observation)
        num_steps += 1
        total += reward
        success = bool(said["success"])
        ended = terminated or truncated
    return Trial(task=info["task"], start=start, success=success, num_steps=num_steps, total_reward=total)


def _keep(frames: Frames | None, observation: Tree) -> None:
    if frames is not None:
        pictures = cameras_of(observation)
        if pictures:
            frames.append(pictures)


def _film(directory: Path, trial: Trial, frames: Frames) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{trial.task}-start-{trial.start}-{'success' if trial.success else 'failure'}.gif".replace("/", "-")
    write_film(directory / name, draw(frames, np.full(trial.num_steps, Source.POLICY)))
    return name
