"""Evaluate: a policy without help on start states that training never sees, and videos of its worst episodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from understudy.core import Source, Split, Tree
from understudy.envs.pace import Pace
from understudy.envs.world import World
from understudy.training.data.run_episode import Act
from understudy.training.runs.config import ConfigError
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run
from understudy.training.runs.video import Frames, cameras_of, draw_frames, video_name, write_video
from understudy.training.runs.wilson_interval import SuccessRate

if TYPE_CHECKING:
    from understudy.policies import ActorPolicy

_EPISODES = {
    "eval": "held-out episodes",
    "train": "episodes from starts of the training",
    "all": "episodes from all starts",
}


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How many episodes an evaluation has, and from which start states."""

    episodes: int = 100
    """Number of episodes of an evaluation."""
    split: Split = "eval"
    """Start states to evaluate on: eval are held out from training, train are not."""
    videos: int = 0
    """Number of the worst episodes to write as videos, if the world has cameras."""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.videos < 0:
            raise ConfigError(
                f"evaluation: expected episodes from 1 and videos from 0, got {self.episodes} and {self.videos}"
            )

    def starts(self, world: World) -> Sequence[int]:
        """The start states of the world's task to evaluate on; a ConfigError if there are none."""
        starts = world.suite.starts(world.task, self.split)
        if not starts:
            other = "train" if self.split == "eval" else "eval"
            raise ConfigError(
                f"evaluation.split: expected a split with start states, got {self.split!r}, and task "
                f"{world.task.name!r} has {world.task.num_starts} in all and none in it; choose {other}, or give the "
                f"task more starts"
            )
        return starts


@dataclass(frozen=True, kw_only=True)
class EvaluationEpisode:
    """One episode of an evaluation. An episode whose simulator failed for good has no steps and no success."""

    task: str
    start: int
    success: bool
    num_steps: int
    total_reward: float
    failure: str | None = None  # why the simulator failed


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The episodes of an evaluation, and the versions of the simulator and libraries it ran on."""

    episodes: tuple[EvaluationEpisode, ...]
    versions: Mapping[str, str]
    videos: tuple[str, ...] = field(default=())  # file names

    @property
    def success_rate(self) -> SuccessRate:
        return success_rate_of(self.episodes)

    @property
    def num_starts(self) -> int:
        """Number of different start states."""
        return len({episode.start for episode in self.episodes})

    def to_json(self) -> dict[str, Any]:
        low, high = self.success_rate.interval
        return {
            "success": self.success_rate.rate,
            "low": low,
            "high": high,
            "episodes": self.success_rate.num_episodes,
            "starts": self.num_starts,
            "mean_steps": float(np.mean([episode.num_steps for episode in self.episodes])),
            "videos": list(self.videos),
            "episode_results": [asdict(episode) for episode in self.episodes],
        }


def success_rate_of(episodes: Sequence[EvaluationEpisode]) -> SuccessRate:
    """The success rate over these episodes; those whose simulator failed count as failures."""
    return SuccessRate(num_successes=sum(episode.success for episode in episodes), num_episodes=len(episodes))


class Evaluator(Protocol):
    """Runs held-out episodes with a policy, without help and without exploration; in this process or another."""

    def __call__(self, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        """Evaluate; videos of the worst episodes go to the directory `videos`."""
        ...


def last_success_rate(metrics: Path) -> SuccessRate | None:
    """The success rate of a run's last evaluation, from its metrics; None if there was none."""
    found = None
    for line in read_metrics(metrics, "evaluation"):
        successes = sum(episode["success"] for episode in line["episode_results"])
        found = SuccessRate(num_successes=successes, num_episodes=line["episodes"])
    return found


def last_score(run: Run) -> str:
    """The success rate of a run's last evaluation in a sentence, which says where its episodes started."""
    config = run.metadata["config"]["evaluation"]
    starts = config["split"] or ("eval" if config["protocol"] == "held-out" else "all")
    return f"{last_success_rate(run.metrics)} of {_EPISODES[starts]} succeed"


def count_episodes(total: int, say: Callable[[str], None]) -> Callable[[object], None]:
    """Say that none of an evaluation's episodes has ended, and at each call that one more has."""
    numbers = count()

    def ended(_: object) -> None:
        say(f"evaluating: {next(numbers)} of {total} episodes")

    ended(None)
    return ended


def evaluate(
    world: World,
    act: Act,
    config: EvaluationConfig,
    *,
    seed: int,
    videos: Path | None = None,
    progress: Callable[[EvaluationEpisode], None] | None = None,
    pace: Pace | None = None,
    on_reset: Callable[[Mapping[str, Any]], None] | None = None,
) -> EvaluationResult:
    """Run the world's task from its start states in turn; if there are more episodes than starts, these repeat.

    Videos of the worst episodes, failures and then long ones first, go to the directory `videos`. `pace` keeps a
    control rate; `on_reset` gets what each reset of the world said, before the first action.
    """
    starts = config.starts(world)
    episodes: list[EvaluationEpisode] = []
    worst: list[tuple[tuple[bool, int], int, EvaluationEpisode, Frames]] = []
    order = count()
    for number in range(config.episodes):
        frames: Frames = []
        start = starts[number % len(starts)]
        wanted = frames if videos is not None and config.videos else None
        episode = _run_episode(world, act, start, seed + number, wanted, pace, on_reset)
        episodes.append(episode)
        if frames:
            heapq.heappush(worst, ((not episode.success, episode.num_steps), next(order), episode, frames))
            if len(worst) > config.videos:
                heapq.heappop(worst)
        if progress is not None:
            progress(episode)
    written = [] if videos is None else [_video(videos, episode, frames) for *_, episode, frames in sorted(worst)[::-1]]
    return EvaluationResult(episodes=tuple(episodes), versions=world.versions(), videos=tuple(written))


def _run_episode(
    world: World,
    act: Act,
    start: int,
    seed: int,
    frames: Frames | None,
    pace: Pace | None,
    on_reset: Callable[[Mapping[str, Any]], None] | None,
) -> EvaluationEpisode:
    observation, info = world.reset(seed=seed, options={"task": world.task.name, "start": start})
    total, num_steps, ended, success = 0.0, 0, False, False
    _add_frame(frames, observation)
    if on_reset is not None:
        on_reset(info)
    while not ended:
        action, _ = act(observation)
        if pace is not None:
            pace.wait() if num_steps else pace.begin()  # the first action may take its time
        observation, reward, terminated, truncated, outcome = world.step(action)
        _add_frame(frames, observation)
        num_steps += 1
        total += reward
        success = bool(outcome["success"])
        ended = terminated or truncated
    return EvaluationEpisode(task=info["task"], start=start, success=success, num_steps=num_steps, total_reward=total)


def _add_frame(frames: Frames | None, observation: Tree) -> None:
    if frames is not None:
        images = cameras_of(observation)
        if images:
            frames.append(images)


def _video(directory: Path, episode: EvaluationEpisode, frames: Frames) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    outcome = "success" if episode.success else "failure"
    name = video_name(f"{episode.task}-start-{episode.start}-{outcome}")
    write_video(directory / name, draw_frames(frames, np.full(episode.num_steps, Source.POLICY)))
    return name
