"""Inference: copies of the policy that is trained, beside the simulators or in workers of their own.

A copy is loaded from the file that the run began with. The learner then sends the trained weights of each version by
reference into Ray's object store, so they travel once to each node, however many processes there use them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from understudy.cluster.roles.process import location
from understudy.core import Spec, StepSpec, Tree
from understudy.core import tree as trees
from understudy.policies import Acted, Evaluated, Sampling
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_copy import PolicyCopy
from understudy.training.runs.stack_dump import dump_stacks

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """What a rollout worker must know of a policy that it does not have."""

    block_steps: int
    log_prob_size: int
    replay_spec: Spec
    has_value: bool


class PublishedPolicy:
    """A copy of the policy, with the weights that the learner has published."""

    def __init__(self, config: OnPolicyConfig, path: Path, spec: StepSpec, *, device: str):
        self._copy = PolicyCopy(config, path, spec, device=device)
        self._policy = self._copy.policy
        self._version: int | None = None
        self.info = PolicyInfo(
            block_steps=self._policy.block_steps,
            log_prob_size=self._policy.log_prob_size,
            replay_spec=self._policy.replay_spec,
            has_value=self._policy.has_value,
        )

    def load(self, version: int, weights: Any) -> None:
        """Load a version; `weights` refers to its trained arrays."""
        if version != self._version:
            self._copy.set_weights(version, ray.get(weights))
            self._version = version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@dataclass(frozen=True, kw_only=True)
class InferenceStatus:
    """What an inference worker answers to a poll."""

    location: tuple[str, int]
    busy_s: float  # since the present forward pass began
    stack: str | None  # if that is longer than it may be


class InferenceWorker:
    """One Ray actor. Ray itself restarts it and sends its calls again: each request carries all that is needed."""

    def __init__(self, config: OnPolicyConfig, path: Path, spec: StepSpec, *, device: str, threads: int, max_rows: int):
        self._load = partial(PublishedPolicy, config, path, spec, device=device)
        self._batch_wait_s = config.workers.batch_wait_ms / 1e3
        self._threads, self._max_rows = threads, max_rows
        self._copy: PublishedPolicy | None = None
        self._turn = threading.Lock()  # held while the policy is loaded or runs
        self._busy_since: float | None = None
        self._guard = threading.Condition()  # guards what follows; notified of each request
        self._waiting: list[_Request] = []

    def location(self) -> tuple[str, int]:
        return location()

    def info(self) -> PolicyInfo:
        """Load the policy, if it is not loaded yet, and describe it."""
        with self._turn:
            return self._loaded().info

    @ray.method(concurrency_group="control")  # type: ignore[arg-type]  # Ray's stub knows only async methods here
    def poll(self, *, progress_timeout_s: float) -> InferenceStatus:
        since = self._busy_since
        busy_s = 0.0 if since is None else time.monotonic() - since
        stack = dump_stacks() if busy_s > progress_timeout_s else None
        return InferenceStatus(location=location(), busy_s=busy_s, stack=stack)

    def act(
        self,
        version: int,
        weights: Sequence[Any],
        observation: Tree,
        instructions: Sequence[str],
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
    ) -> tuple[Acted, list[Mapping[str, Any]]]:
        """Choose actions, batched with waiting requests; also returns the state of each generator afterwards."""
        mine = _Request(
            version=version,
            weights=weights[0],
            observation=observation,
            instructions=tuple(instructions),
            rngs=tuple(rngs),
            sampling=sampling,
        )
        with self._guard:
            self._waiting.append(mine)
            self._guard.notify()
        with self._turn:
            if mine.reply is None:
                policy = self._loaded()
                self._wait_for_rows(until_s=mine.arrived_s + self._batch_wait_s)
                self._busy_since = time.monotonic()
                try:
                    self._run(policy, mine)
                finally:
                    self._busy_since = None
        assert mine.reply is not None
        return mine.reply, [rng.bit_generator.state for rng in mine.rngs]

    def _run(self, policy: PublishedPolicy, first: _Request) -> None:
        """One forward pass for all requests of the same version and sampling, as many as fit."""
        with self._guard:
            same = [one for one in self._waiting if (one.version, one.sampling) == (first.version, first.sampling)]
            chosen, rows = [first], len(first.rngs)
            for one in same:
                if one is not first and rows + len(one.rngs) <= self._max_rows:
                    chosen.append(one)
                    rows += len(one.rngs)
            self._waiting = [one for one in self._waiting if one not in chosen]
        policy.load(first.version, first.weights)
        acted = policy.act(
            _joined([one.observation for one in chosen]),
            [text for one in chosen for text in one.instructions],
            rngs=[rng for one in chosen for rng in one.rngs],
            sampling=first.sampling,
        )
        start = 0
        for one in chosen:
            one.reply = _rows(acted, slice(start, start + len(one.rngs)))
            start += len(one.rngs)

    def _wait_for_rows(self, until_s: float) -> None:
        """Wait for more requests, until there are as many rows as one forward pass takes, or it is late."""
        with self._guard:
            while sum(len(one.rngs) for one in self._waiting) < self._max_rows:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._guard.wait(left_s)

    def _loaded(self) -> PublishedPolicy:
        if self._copy is None:
            torch.set_num_threads(self._threads)
            self._copy = self._load()
        return self._copy


@dataclass(eq=False, kw_only=True)
class _Request:
    version: int
    weights: Any
    observation: Tree
    instructions: tuple[str, ...]
    rngs: tuple[np.random.Generator, ...]
    sampling: Sampling
    arrived_s: float = field(default_factory=time.monotonic)
    reply: Acted | None = None


class RemotePolicy:
    """A policy that inference workers run, in turn. It cannot be trained."""

    def __init__(self, workers: Sequence[Any]):
        self._workers = list(workers)
        self._turn = 0
        self._weights: Any = None
        self.version = -1
        info: PolicyInfo = ray.get(self._workers[0].info.remote())
        self.block_steps, self.log_prob_size = info.block_steps, info.log_prob_size
        self.replay_spec, self.has_value = info.replay_spec, info.has_value

    def load(self, version: int, weights: Any) -> None:
        self.version, self._weights = version, weights

    def act(
        self, observation: Tree, instructions: Sequence[str], *, rngs: Sequence[np.random.Generator], sampling: Sampling
    ) -> Acted:
        worker = self._workers[self._turn % len(self._workers)]
        self._turn += 1
        call = worker.act.remote(self.version, [self._weights], observation, list(instructions), list(rngs), sampling)
        acted, states = ray.get(call)
        assert acted.version == self.version, f"asked for version {self.version}, got {acted.version}"
        for rng, state in zip(rngs, states, strict=True):
            rng.bit_generator.state = state
        return acted  # type: ignore[no-any-return]

    def evaluate(
        self, observation: Tree, instructions: Sequence[str], replay: Mapping[str, Any], *, sampling: Sampling
    ) -> Evaluated:
        raise NotImplementedError("only the learner's own policy evaluates actions")


def _joined(parts: Sequence[Tree]) -> Tree:
    flat = [trees.flatten(part) for part in parts]
    return trees.unflatten({path: np.concatenate([one[path] for one in flat]) for path in flat[0]})


def _rows(acted: Acted, at: slice) -> Acted:
    return replace(
        acted,
        action=trees.map_leaves(lambda leaf: leaf[at], acted.action),
        replay={name: column[at] for name, column in acted.replay.items()},
        log_prob=acted.log_prob[at],
        value=None if acted.value is None else acted.value[at],
    )
