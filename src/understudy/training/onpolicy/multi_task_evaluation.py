"""Multi-task evaluation: a block policy without help on all tasks of a world.

Every episode counts; one whose worker failed for good counts as a failure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.core import Episode
from understudy.envs.suite import Suite, Task
from understudy.policies.protocol import BlockPolicy
from understudy.training.collection.collector import TicketRunner
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.shared_tickets import Sharing
from understudy.training.collection.task_start_plan import Ticket, derived_seed
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import EvaluationEpisode, success_rate_of
from understudy.training.runs.video import cameras_of, draw_episode, video_name, write_video
from understudy.training.runs.wilson_interval import SuccessRate

if TYPE_CHECKING:
    from understudy.training.distributed.ranks import Ranks  # it imports torch, and help does not

VIDEO_FPS = 5.0  # in blocks per second, since a block has one image


@dataclass(frozen=True, kw_only=True)
class TaskEvaluationResult:
    """The episodes of an evaluation over tasks."""

    config: TaskEvaluationConfig
    episodes: tuple[EvaluationEpisode, ...]  # in the order of their tickets
    videos: tuple[str, ...] = field(default=())  # file names

    @property
    def success_rate(self) -> SuccessRate:
        return success_rate_of(self.episodes)

    @property
    def tasks(self) -> dict[str, SuccessRate]:
        """The success rate of each task."""
        names = dict.fromkeys(episode.task for episode in self.episodes)
        return {name: success_rate_of(self._of(name)) for name in names}

    @property
    def failures(self) -> tuple[EvaluationEpisode, ...]:
        """The episodes whose workers failed for good."""
        return tuple(episode for episode in self.episodes if episode.failure is not None)

    def to_json(self) -> dict[str, Any]:
        """The keys of an EvaluationResult, and the numbers of each task below "tasks"."""
        return {
            **_numbers(self.episodes),
            "tasks": {name: _numbers(self._of(name)) for name in self.tasks},
            "protocol": self.config.protocol,
            "split": self.config.starts,
            "meaning": self.config.meaning,
            "sampling": self.config.sampling,
            "temperature": self.config.temperature,
            "failed_workers": len(self.failures),
            "videos": list(self.videos),
            "episode_results": [asdict(episode) for episode in self.episodes],
        }

    def __str__(self) -> str:
        lost = f"; {len(self.failures)} lost to failed workers, counted as failures" if self.failures else ""
        return f"{self.success_rate} succeed, {self.config.sampling} ({self.config.meaning}){lost}"

    def _of(self, task: str) -> list[EvaluationEpisode]:
        return [episode for episode in self.episodes if episode.task == task]


def _numbers(episodes: Sequence[EvaluationEpisode]) -> dict[str, Any]:
    rate = success_rate_of(episodes)
    low, high = rate.interval
    return {
        "success": rate.rate,
        "low": low,
        "high": high,
        "episodes": rate.num_episodes,
        "starts": len({(episode.task, episode.start) for episode in episodes}),
        "mean_steps": float(np.mean([one.num_steps for one in episodes if one.failure is None] or [0])),
    }


class TaskEvaluation:
    """An evaluation that one process runs, or several together: each runs some of the tickets, all know the result."""

    def __init__(
        self, runner: TicketRunner, config: TaskEvaluationConfig, *, seed: int, videos: Path | None = None
    ) -> None:
        """Videos of the worst episodes, failures and then long ones first, go to the directory `videos`."""
        self.tickets = evaluation_tickets(runner.suite, runner.tasks, config, seed=seed)
        self._runner, self._config, self._videos = runner, config, videos
        self._episodes: dict[int, EvaluationEpisode] = {}  # that this process ran, by the number of their ticket
        self._worst: list[tuple[tuple[bool, int, int], Rollout]] = []  # of these, the candidates for a video

    def run(
        self,
        policy: BlockPolicy,
        tickets: Sequence[Ticket],
        progress: Callable[[EvaluationEpisode], None] | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """Run these tickets, or those that `sharing` leaves to this process."""
        for rollout in self._runner.stream(tickets, policy, self._config.to_sampling(), sharing=sharing):
            number = rollout.ticket.number
            episode = self._episodes[number] = evaluation_episode(rollout)
            if self._videos is not None and self._config.videos and _has_cameras(rollout.episode):
                heapq.heappush(self._worst, ((not episode.success, episode.num_steps, number), rollout))
                if len(self._worst) > self._config.videos:
                    heapq.heappop(self._worst)
            if progress is not None:
                progress(episode)

    def result(self, ranks: Ranks | None = None) -> TaskEvaluationResult:
        """The episodes of all processes, and their videos. All of them call this."""
        gather: Callable[[Any], list[Any]] = (lambda value: [value]) if ranks is None else ranks.gather_json
        given = gather(
            {
                "episodes": [[number, asdict(episode)] for number, episode in self._episodes.items()],
                "worst": [key for key, _ in self._worst],
            }
        )
        found = {number: EvaluationEpisode(**fields) for part in given for number, fields in part["episodes"]}
        worst = sorted((tuple(key) for part in given for key in part["worst"]), reverse=True)[: self._config.videos]
        names = {number: _video_name(number, found[number]) for _, _, number in worst}
        mine = {rollout.ticket.number: rollout for _, rollout in self._worst}
        for number in names.keys() & mine.keys():
            _write_video(self._videos, names[number], mine[number])
        gather(None)  # all videos are written
        episodes = tuple(found[ticket.number] for ticket in self.tickets)
        return TaskEvaluationResult(config=self._config, episodes=episodes, videos=tuple(names.values()))


def evaluate_tasks(
    runner: TicketRunner,
    policy: BlockPolicy,
    config: TaskEvaluationConfig,
    *,
    seed: int,
    videos: Path | None = None,
    progress: Callable[[EvaluationEpisode], None] | None = None,
) -> TaskEvaluationResult:
    """Run all tasks of the runner's world, in this process."""
    evaluation = TaskEvaluation(runner, config, seed=seed, videos=videos)
    evaluation.run(policy, evaluation.tickets, progress)
    return evaluation.result()


def evaluation_tickets(suite: Suite, tasks: Sequence[Task], config: TaskEvaluationConfig, *, seed: int) -> list[Ticket]:
    """The tickets of an evaluation: as many for each task, or one fewer for the last tasks; starts repeat if needed."""
    tickets: list[Ticket] = []
    for index, task in enumerate(tasks):
        if config.starts == "all":
            starts: Sequence[int] = range(task.num_starts)
        else:
            starts = suite.starts(task, config.starts)
        if not starts:
            raise ConfigError(
                f"split: task {task.name!r} has no starts in {config.starts!r}; use protocol='benchmark', and say so"
            )
        share = config.episodes // len(tasks) + (index < config.episodes % len(tasks))
        for turn in range(share):
            number = len(tickets)
            own = derived_seed(seed, number)
            tickets.append(
                Ticket(
                    number=number,
                    iteration=0,
                    task=task.name,
                    start=starts[turn % len(starts)],
                    seed=own,
                    group=number,
                    slot=0,
                    world_seed=own,
                )
            )
    return tickets


def evaluation_episode(rollout: Rollout) -> EvaluationEpisode:
    return EvaluationEpisode(
        task=rollout.ticket.task,
        start=rollout.ticket.start,
        success=rollout.success,
        num_steps=rollout.num_steps,
        total_reward=rollout.total_reward,
        failure=rollout.failure,
    )


def _has_cameras(episode: Episode | None) -> bool:
    return episode is not None and bool(cameras_of(episode.last_observation))


def _video_name(number: int, episode: EvaluationEpisode) -> str:
    outcome = "success" if episode.success else "failure"
    return video_name(f"{episode.task}-start-{episode.start}-{number}-{outcome}")


def _write_video(directory: Path | None, name: str, rollout: Rollout) -> None:
    assert directory is not None
    assert rollout.episode is not None
    directory.mkdir(parents=True, exist_ok=True)
    write_video(directory / name, draw_episode(rollout.episode), fps=VIDEO_FPS)
