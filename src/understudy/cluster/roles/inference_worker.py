"""Inference: copies of the policy that is trained, beside the simulators, or in workers of their own.

A copy is made from the artefact that the run began with, and takes from the learner what is trained, by reference
into Ray's object store: it travels once to each node, whoever is there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from understudy.core import Spec, StepSpec, Tree
from understudy.core import tree as trees
from understudy.policies import Acted, Evaluated, Sampling
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.single_process import SingleProcess
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_files import load_policy

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class PolicyFacts:
    """What a policy says of itself, to those who only ask it."""

    block_steps: int
    log_prob_size: int
    replay_spec: Spec
    has_value: bool


class Copy:
    """A policy that acts in the precision that it is trained in."""

    def __init__(self, config: OnPolicyConfig, path: Path, spec: StepSpec, *, device: str):
        self._policy = load_policy(replace(config, device=device), path, spec, adapted=True)
        self._policy.forward = SingleProcess(self._policy.model, Ranks(0, 1, device=device), config.engine.precision).forward
        self._version: int | None = None
        self.facts = PolicyFacts(
            block_steps=self._policy.block_steps,
            log_prob_size=self._policy.log_prob_size,
            replay_spec=self._policy.replay_spec,
            has_value=self._policy.has_value,
        )

    def take(self, version: int, weights: Any) -> None:
        """Become a version; `weights` refers to its trained arrays."""
        if version == self._version:
            return
        known = dict(self._policy.model.state_dict(keep_vars=True))
        with torch.no_grad():
            for name, array in ray.get(weights).items():
                known[name].copy_(torch.from_numpy(np.array(array)))
        self._version = self._policy.version = version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class InferenceWorker:
    """One Ray actor. Ray restarts it by itself: all it knows, it is told with each question."""

    def __init__(self, config: OnPolicyConfig, path: Path, spec: StepSpec, *, device: str, threads: int, max_rows: int):
        torch.set_num_threads(threads)
        self._copy = Copy(config, path, spec, device=device)
        self._max_rows = max_rows
        self._turn = threading.Lock()
        self._waiting: list[_Question] = []
        self._guard = threading.Lock()

    def facts(self) -> PolicyFacts:
        return self._copy.facts

    def act(
        self,
        version: int,
        weights: Sequence[Any],
        observation: Tree,
        instructions: Sequence[str],
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
    ) -> tuple[Acted, list[Mapping[str, Any]]]:
        """Decide, together with all who ask for the same meanwhile; also where each generator is afterwards."""
        mine = _Question(
            version=version,
            weights=weights[0],
            observation=observation,
            instructions=tuple(instructions),
            rngs=tuple(rngs),
            sampling=sampling,
        )
        with self._guard:
            self._waiting.append(mine)
        with self._turn:
            if mine.answer is None:
                self._answer(mine)
        assert mine.answer is not None
        return mine.answer, [rng.bit_generator.state for rng in mine.rngs]

    def _answer(self, first: _Question) -> None:
        """All that wait for the same version and sampling, as many as fit, in one forward pass."""
        with self._guard:
            same = [one for one in self._waiting if (one.version, one.sampling) == (first.version, first.sampling)]
            chosen, rows = [first], len(first.rngs)
            for one in same:
                if one is not first and rows + len(one.rngs) <= self._max_rows:
                    chosen.append(one)
                    rows += len(one.rngs)
            self._waiting = [one for one in self._waiting if one not in chosen]
        self._copy.take(first.version, first.weights)
        acted = self._copy.act(
            _joined([one.observation for one in chosen]),
            [text for one in chosen for text in one.instructions],
            rngs=[rng for one in chosen for rng in one.rngs],
            sampling=first.sampling,
        )
        start = 0
        for one in chosen:
            one.answer = _rows(acted, slice(start, start + len(one.rngs)))
            start += len(one.rngs)


@dataclass(eq=False, kw_only=True)
class _Question:
    version: int
    weights: Any
    observation: Tree
    instructions: tuple[str, ...]
    rngs: tuple[np.random.Generator, ...]
    sampling: Sampling
    answer: Acted | None = None


class AskedPolicy:
    """A policy whose choices are made by inference workers, in turn. It cannot be trained."""

    def __init__(self, workers: Sequence[Any]):
        self._workers = list(workers)
        self._turn = 0
        self._weights: Any = None
        self.version = -1
        facts: PolicyFacts = ray.get(self._workers[0].facts.remote())
        self.block_steps, self.log_prob_size = facts.block_steps, facts.log_prob_size
        self.replay_spec, self.has_value = facts.replay_spec, facts.has_value

    def take(self, version: int, weights: Any) -> None:
        self.version, self._weights = version, weights

    def act(
        self, observation: Tree, instructions: Sequence[str], *, rngs: Sequence[np.random.Generator], sampling: Sampling
    ) -> Acted:
        worker = self._workers[self._turn % len(self._workers)]
        self._turn += 1
        asked = worker.act.remote(self.version, [self._weights], observation, list(instructions), list(rngs), sampling)
        acted, states = ray.get(asked)
        assert acted.version == self.version, f"asked version {self.version}, {acted.version} answered"
        for rng, state in zip(rngs, states, strict=True):
            rng.bit_generator.state = state
        return acted  # type: ignore[no-any-return]

    def evaluate(
        self, observation: Tree, instructions: Sequence[str], replay: Mapping[str, Any], *, sampling: Sampling
    ) -> Evaluated:
        raise NotImplementedError("only the learner's own policy is weighed again")


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
