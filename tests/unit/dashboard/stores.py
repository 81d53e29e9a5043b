"""Stores for the tests of the page: small, real, with cameras, people and proposals."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from understudy.core import ArraySpec, EpisodeInfo, Source, Spec, Step, StepSpec
from understudy.replay import Estimates, Reader, Store, Writer

SPEC = StepSpec(
    observation=Spec(
        {
            "front": ArraySpec(shape=(48, 64, 3), dtype="uint8"),
            "state": ArraySpec(shape=(3,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(4,), dtype="float32")),
    extras=Spec({"value": ArraySpec(shape=(), dtype="float32")}),
)
TASKS = ("press", "pick", None)
ACTORS = ("local", "arm-1")


def observation(number: int, index: int) -> dict[str, np.ndarray]:
    """A image in one colour that tells the episode and the row."""
    image = np.full((48, 64, 3), (number * 37 % 256, index * 11 % 256, 90), np.uint8)
    return {"front": image, "state": np.float32([number, index, 0])}


def step(number: int, index: int, source: Source, *, last: bool) -> Step:
    action = np.float32([np.sin(index), index / 10, number, 1])
    proposal = action + np.float32(0.5) if source == Source.HUMAN else None
    return Step(
        observation=observation(number, index),
        action=action,
        reward=float(index),
        source=source,
        policy_version=number,
        proposal=proposal,
        extras={"value": np.float32(-index)},
        terminated=last,
    )


def info(number: int) -> EpisodeInfo:
    """Attributes that differ from one episode to the next."""
    labels = {}
    if number % 4 == 1:
        labels = {"intervention_count": "2", "takeover_latency_ms": f"{number}.5", "takeover_reasons": "no progress"}
    if number % 5 == 0:
        labels["look"] = "again"
    return EpisodeInfo(
        task=TASKS[number % 3],
        instruction=f"do number {number}",
        actor=ACTORS[number % 2],
        seed=number,
        operator="ada" if number % 4 == 1 else None,
        success=(True, False, None)[number % 3 - 1],
        kind="demonstration" if number < 3 else "practice",
        split="eval" if number == 7 else "train",
        labels=labels,
    )


def live(writer: Writer, number: int, *, num_steps: int = 6, end: bool = True) -> None:
    """One episode; every fourth has human steps."""
    writer.begin(info(number))
    for index in range(num_steps):
        human = number % 4 == 1 and index >= 4
        source = Source.HUMAN if human else Source.SCRIPT if number < 3 else Source.POLICY
        writer.append(step(number, index, source, last=end and index == num_steps - 1))
    if end:
        writer.end(observation(number, num_steps), success=info(number).success)


def make_store(path: Path, num_episodes: int = 12, **options: int) -> Path:
    with Store.open(path, **options) as store:
        writer = store.writer("w", SPEC, commit_steps=4, background=False)
        for number in range(num_episodes):
            live(writer, number)
    return path


def write_estimates(path: Path, *episodes: int, model: str = "0123456789abcdef") -> Path:
    """A file of estimates as of now: the value rises by the step to 0, and the second half of each episode is good."""
    with Reader(path) as reader:
        num_steps = [reader.record(episode).num_steps for episode in episodes]
        store_id, commit = reader.catalog.store_id, reader.last_commit()
    left = [np.arange(number, 0, -1) / number for number in num_steps]
    return Estimates(
        store_id=store_id,
        commit=commit,
        model=model,
        episode=np.array(episodes, np.int64),
        num_steps=np.array(num_steps, np.int64),
        value=-np.concatenate(left).astype(np.float32),
        advantage=np.concatenate([0.25 - part / 2 for part in left]).astype(np.float32),
        good=np.concatenate([part <= 0.5 for part in left]),
    ).write(path)


def copy_of(source: Path, target: Path) -> Path:
    """A copy of a store or a run without the space that its segments have reserved: 300 MB of zeros each."""
    subprocess.run(["cp", "-r", "--sparse=always", source, target], check=True)
    return target
