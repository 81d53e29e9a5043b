"""Trials: a block policy alone on all tasks of a world; every episode counts, those whose workers failed too."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from understudy.core import Episode
from understudy.envs.suite import Suite, Task
from understudy.policies.protocol import BlockPolicy, Sampling
from understudy.training.collection.collector import Living
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.ticket_plan import Ticket, derived_seed
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import Trial
from understudy.training.runs.score import Score
from understudy.training.runs.video import cameras_of, film, write_film

FILM_FPS = 5.0  # of blocks, since a block has one picture

_MEANING = {
    "eval": "held-out: starts of the eval split, which training never sees",
    "train": "benchmark: starts of the train split, which training may have seen; says nothing about new ones",
    "all": "benchmark: all starts, as in published scores, those included that training may have seen; says little "
    "about new ones",
}


@dataclass(frozen=True, kw_only=True)
class TrialsConfig:
    """How many episodes, from where, and how the policy acts in them."""

    episodes: int = 100  # in all, shared out evenly over the tasks
    protocol: Literal["held-out", "benchmark"] = "held-out"
    split: Literal["eval", "train", "all"] | None = None  # None: eval if held-out, all if benchmark
    sampling: Literal["greedy", "sampled"] = "greedy"
    temperature: float = 1.0  # of the draws, if sampled
    videos: int = 0  # of the worst episodes, if the world has cameras

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.videos < 0:
            raise ConfigError(
                f"trials: expected episodes from 1 and videos from 0, got {self.episodes} and {self.videos}"
            )
        for name, known in (
            ("protocol", ("held-out", "benchmark")),
            ("sampling", ("greedy", "sampled")),
            ("split", (None, "eval", "train", "all")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: expected one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
        if self.split is not None and (self.protocol == "held-out") != (self.split == "eval"):
            raise ConfigError(
                f"split: expected {'eval' if self.protocol == 'held-out' else 'train or all'} with protocol "
                f"{self.protocol!r}, got {self.split!r}; only eval is held out"
            )
        self.drawn()  # refuses a temperature that is none

    @property
    def starts(self) -> Literal["eval", "train", "all"]:
        """Which are played."""
        return self.split or ("eval" if self.protocol == "held-out" else "all")

    @property
    def meaning(self) -> str:
        """What the score is a score of, in words."""
        return _MEANING[self.starts]

    def drawn(self) -> Sampling:
        return Sampling(temperature=self.temperature, greedy=self.sampling == "greedy")


@dataclass(frozen=True, kw_only=True)
class BlockTrial(Trial):
    """One episode; one whose worker failed for good has no steps, no success, and the reason."""

    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What came of them."""

    config: TrialsConfig
    trials: tuple[BlockTrial, ...]  # in the order of their tickets
    films: tuple[str, ...] = field(default=())

    @property
    def score(self) -> Score:
        return _score(self.trials)

    @property
    def tasks(self) -> dict[str, Score]:
        return {name: _score(self._of(name)) for name in dict.fromkeys(trial.task for trial in self.trials)}

    @property
    def failures(self) -> tuple[BlockTrial, ...]:
        """Those whose workers failed for good."""
        return tuple(trial for trial in self.trials if trial.failure is not None)

    def to_json(self) -> dict[str, Any]:
        """The keys of an Evaluation, and those of each task below "tasks"."""
        return {
            **_numbers(self.trials),
            "tasks": {name: _numbers(self._of(name)) for name in self.tasks},
            "protocol": self.config.protocol,
            "split": self.config.starts,
            "meaning": self.config.meaning,
            "sampling": self.config.sampling,
            "temperature": self.config.temperature,
            "failed_workers": len(self.failures),
            "films": list(self.films),
            "trials": [asdict(trial) for trial in self.trials],
        }

    def __str__(self) -> str:
        lost = f"; {len(self.failures)} lost to failed workers, counted as failures" if self.failures else ""
        return f"{self.score} succeed, {self.config.sampling} ({self.config.meaning}){lost}"

    def _of(self, task: str) -> list[BlockTrial]:
        return [trial for trial in self.trials if trial.task == task]


def _score(trials: Sequence[BlockTrial]) -> Score:
    return Score(num_successes=sum(trial.success for trial in trials), num_episodes=len(trials))


def _numbers(trials: Sequence[BlockTrial]) -> dict[str, Any]:
    score = _score(trials)
    low, high = score.interval
    return {
        "success": score.rate,
        "low": low,
        "high": high,
        "episodes": score.num_episodes,
        "starts": len({(trial.task, trial.start) for trial in trials}),
        "mean_steps": float(np.mean([trial.num_steps for trial in trials if trial.failure is None] or [0])),
    }


def run_trials(
    collector: Living,
    policy: BlockPolicy,
    config: TrialsConfig,
    *,
    seed: int,
    films: Path | None = None,
    progress: Callable[[BlockTrial], None] | None = None,
) -> Trials:
    """Play all tasks of the collector's world. The worst episodes, failures first and long ones among them, go to the
    directory `films`."""
    tickets = trial_tickets(collector.suite, collector.tasks, config, seed=seed)
    worst: list[tuple[tuple[bool, int, int], Rollout]] = []
    found: dict[int, BlockTrial] = {}
    for rollout in collector.stream(tickets, policy, config.drawn()):
        trial = found[rollout.ticket.number] = trial_of(rollout)
        if films is not None and config.videos and _has_cameras(rollout.episode):
            heapq.heappush(worst, ((not trial.success, trial.num_steps, rollout.ticket.number), rollout))
            if len(worst) > config.videos:
                heapq.heappop(worst)
        if progress is not None:
            progress(trial)
    written = [] if films is None else _write_films(films, (rollout for _, rollout in sorted(worst, reverse=True)))
    return Trials(config=config, trials=tuple(found[ticket.number] for ticket in tickets), films=tuple(written))


def trial_tickets(suite: Suite, tasks: Sequence[Task], config: TrialsConfig, *, seed: int) -> list[Ticket]:
    """As many for each task, or one fewer for the last ones; with more of them than starts, these are used again."""
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


def trial_of(rollout: Rollout) -> BlockTrial:
    return BlockTrial(
        task=rollout.ticket.task,
        start=rollout.ticket.start,
        success=rollout.success,
        num_steps=rollout.num_steps,
        total_reward=rollout.total_reward,
        failure=rollout.failure,
    )


def _has_cameras(episode: Episode | None) -> bool:
    return episode is not None and bool(cameras_of(episode.last_observation))


def _write_films(directory: Path, rollouts: Iterable[Rollout]) -> list[str]:
    names = []
    for rollout in rollouts:
        assert rollout.episode is not None
        ticket, outcome = rollout.ticket, "success" if rollout.success else "failure"
        directory.mkdir(parents=True, exist_ok=True)
        names.append(f"{ticket.task}-start-{ticket.start}-{ticket.number}-{outcome}.gif".replace("/", "-"))
        write_film(directory / names[-1], film(rollout.episode), fps=FILM_FPS)
    return names
