"""Multi-task evaluation of block policies: all tasks, all episodes counted, and what the success rate measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.unit.training.collection.faulty_worlds import faulty
from tests.unit.training.collection.scripted import Scripted

from understudy.envs import Suite, Task
from understudy.policies import PolicyError, Sampling
from understudy.training.collection.collector import Collector
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.onpolicy.multi_task_evaluation import (  # type: ignore[attr-defined]
    EvaluationEpisode,
    TaskEvaluationResult,
    evaluate_tasks,
    evaluation_tickets,
)
from understudy.training.runs.config import ConfigError, from_json, to_json
from understudy.training.runs.wilson_interval import wilson_interval


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector("toy?cameras=false", num_parallel_envs=2) as collector:
        yield collector


def test_all_tasks_are_played_evenly_from_held_out_starts(collector: Collector) -> None:
    seen: list[EvaluationEpisode] = []
    found = evaluate_tasks(collector, Scripted(), TaskEvaluationConfig(episodes=23), seed=0, progress=seen.append)
    names = collector.suite.task_names
    assert [sum(trial.task == name for trial in found.episodes) for name in names] == [3] * 3 + [2] * 7
    assert all(collector.suite.split_of(trial.task, trial.start) == "eval" for trial in found.episodes)
    assert [trial.start for trial in found.episodes if trial.task == names[0]] == [400, 401, 402]
    assert sorted(seen, key=lambda trial: (names.index(trial.task), trial.start)) == list(found.episodes)
    said = json.loads(json.dumps(found.to_json()))
    won = sum(trial.success for trial in found.episodes)
    assert (said["success"], said["episodes"], said["starts"]) == (won / 23, 23, 23)
    assert (said["low"], said["high"]) == wilson_interval(won, 23)
    assert list(said["tasks"]) == names
    first = [trial for trial in found.episodes if trial.task == names[0]]
    assert said["tasks"][names[0]] == {
        "success": 1.0,
        "low": wilson_interval(3, 3)[0],
        "high": wilson_interval(3, 3)[1],
        "episodes": 3,
        "starts": 3,
        "mean_steps": sum(trial.num_steps for trial in first) / 3,
    }
    assert (said["protocol"], said["sampling"], said["failed_workers"]) == ("held-out", "greedy", 0)
    assert len(said["episode_results"]) == 23
    assert said["episode_results"][0]["total_reward"] == 1.0
    assert "held-out: starts of the eval split, which training never sees" in str(found)


def test_one_task_is_played_if_the_world_names_it() -> None:
    with Collector("toy:press_button?cameras=false", num_parallel_envs=1) as one:
        found = evaluate_tasks(one, Scripted(), TaskEvaluationConfig(episodes=3), seed=0)
    assert {trial.task for trial in found.episodes} == {"press_button"}
    assert found.success_rate.num_successes == 3


SUITE = Suite(name="small", tasks=(Task(name="a", instruction="do a", num_starts=10, max_steps=9),))


@pytest.mark.parametrize(
    ("options", "starts", "words"),
    [
        ({}, [8, 9, 8, 9], "held-out: starts of the eval split, which training never sees"),
        ({"protocol": "benchmark"}, [0, 1, 2, 3], "benchmark: all starts, as in published scores, those included"),
        ({"protocol": "benchmark", "episodes": 12}, [*range(10), 0, 1], "benchmark: all starts"),
        ({"protocol": "benchmark", "split": "train", "episodes": 9}, [*range(8), 0], "benchmark: starts of the train"),
    ],
)
def test_a_protocol_says_which_starts_and_says_so_in_words(
    options: dict[str, Any], starts: list[int], words: str
) -> None:
    config = TaskEvaluationConfig(**{"episodes": 4, **options})
    tickets = evaluation_tickets(SUITE, SUITE.tasks, config, seed=0)
    assert [ticket.start for ticket in tickets] == starts
    said = TaskEvaluationResult(config=config, episodes=()).to_json()
    assert said["meaning"].startswith(words)
    assert said["protocol"] == config.protocol
    assert said["split"] == config.starts


def test_seeds_are_the_trials_own() -> None:
    config = TaskEvaluationConfig(episodes=5)
    one, same, other = (evaluation_tickets(SUITE, SUITE.tasks, config, seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert not {ticket.seed for ticket in one} & {ticket.seed for ticket in other}
    assert len({ticket.world_seed for ticket in one}) == 5


def test_greedy_draws_nothing_and_sampled_draws(collector: Collector) -> None:
    config = TaskEvaluationConfig(episodes=10)
    greedy = [evaluate_tasks(collector, Scripted(noise=0.5), config, seed=seed).episodes for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    sampled = replace(config, sampling="sampled", temperature=0.5)
    policy = Scripted(noise=0.5)
    drawn = [evaluate_tasks(collector, policy, sampled, seed=seed) for seed in (0, 0, 1)]
    assert set(policy.samplings) == {Sampling(temperature=0.5)}
    assert drawn[0].episodes == drawn[1].episodes
    assert drawn[0].episodes != drawn[2].episodes
    assert drawn[0].to_json()["sampling"] == "sampled"
    assert drawn[0].to_json()["temperature"] == 0.5


def test_a_failed_worker_counts_and_is_listed(tmp_path: Path) -> None:
    world = faulty(place=str(tmp_path), share=0.4, times=9, faults="exit")
    with Collector(world, num_parallel_envs=2, max_attempts=1) as other:
        found = evaluate_tasks(other, Scripted(), TaskEvaluationConfig(episodes=20), seed=0)
    lost = found.failures
    assert 2 < len(lost) < 15
    assert found.success_rate.num_episodes == len(found.episodes) == 20
    assert found.success_rate.num_successes <= 20 - len(lost)
    assert all(trial.failure and "ended with exit code 3" in trial.failure and not trial.success for trial in lost)
    said = found.to_json()
    assert said["failed_workers"] == len(lost)
    assert sum("exit code 3" in (trial["failure"] or "") for trial in said["episode_results"]) == len(lost)
    assert said["mean_steps"] == sum(trial.num_steps for trial in found.episodes) / (20 - len(lost))
    assert f"{len(lost)} lost to failed workers, counted as failures" in str(found)


def test_the_worst_are_filmed_with_a_picture_for_each_block(tmp_path: Path) -> None:
    with Collector("toy:press_button?size=16", num_parallel_envs=2, max_steps=12) as other:
        found = evaluate_tasks(
            other, Scripted(), TaskEvaluationConfig(episodes=6, videos=2), seed=0, videos=tmp_path / "videos"
        )
        none = evaluate_tasks(
            other, Scripted(), TaskEvaluationConfig(episodes=1, videos=0), seed=0, videos=tmp_path / "none"
        )
    failures = [trial for trial in found.episodes if not trial.success]
    assert len(failures) >= 2  # few are done in twelve steps
    assert len(found.videos) == 2
    assert found.to_json()["videos"] == list(found.videos)
    assert {name.split("-")[-1] for name in found.videos} == {"failure.gif"}
    for name in found.videos:
        with Image.open(tmp_path / "videos" / name) as film:
            assert getattr(film, "n_frames", 0) == 4  # three blocks and what they led to
    assert none.videos == ()
    assert not (tmp_path / "none").exists()


def test_a_world_without_cameras_has_no_videos(collector: Collector, tmp_path: Path) -> None:
    assert (
        evaluate_tasks(
            collector, Scripted(), TaskEvaluationConfig(episodes=1, videos=1), seed=0, videos=tmp_path
        ).videos
        == ()
    )


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="episodes from 1 and videos from 0, got 0 and 0"):
        TaskEvaluationConfig(episodes=0)
    with pytest.raises(ConfigError, match="split: expected eval with protocol 'held-out', got 'train'; only eval is"):
        TaskEvaluationConfig(split="train")
    with pytest.raises(ConfigError, match="split: expected train or all with protocol 'benchmark', got 'eval'"):
        TaskEvaluationConfig(protocol="benchmark", split="eval")
    with pytest.raises(PolicyError, match="temperature: expected more than 0, got 0"):
        TaskEvaluationConfig(temperature=0.0)
    with pytest.raises(ConfigError, match=r"temperature: has no effect on greedy actions, got 0\.5; leave it out"):
        TaskEvaluationConfig(temperature=0.5)
    with pytest.raises(ConfigError, match="sampling: expected one of greedy, sampled, got 'best'"):
        TaskEvaluationConfig(sampling="best")  # type: ignore[arg-type]
    alone = Suite(name="one", tasks=(Task(name="a", instruction="do a", num_starts=1, max_steps=9),))
    with pytest.raises(ConfigError, match="task 'a' has no starts in 'eval'; use protocol='benchmark'"):
        evaluation_tickets(alone, alone.tasks, TaskEvaluationConfig(), seed=0)
    config = TaskEvaluationConfig(protocol="benchmark", split="train", sampling="sampled")
    assert from_json(TaskEvaluationConfig, json.loads(json.dumps(to_json(config)))) == config
