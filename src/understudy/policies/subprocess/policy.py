"""ElsewherePolicy: a BlockPolicy whose code runs in another interpreter. It acts and judges; it has no gradients.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| each call, in the caller | the socket | the answer, or its deadline | the policy's process |
| the policy's own process (process.py) | the socket | the next request; the policy | a call |

A process that died, hung or talked nonsense is a typed error with its last words; the next call starts another, which
is given the weights that were set last. A policy belongs to one thread at a time.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from understudy.core import NO_VERSION, ArraySpec, Spec, SpecError, StepSpec, Tree
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.core.spec import describe
from understudy.policies.protocol import Acted, Array, Evaluated, PolicyError, Sampling
from understudy.policies.subprocess import child_main as process
from understudy.policies.subprocess.child import Ended, Late, PolicyChild
from understudy.policies.subprocess.failures import (
    PolicyProcessDied,
    PolicyProcessGarbage,
    PolicyProcessHung,
    PolicyProcessRaised,
)
from understudy.policies.subprocess.policy_factory import PolicySource
from understudy.processes.child import StartError

LOG_BYTES = 2**20  # of what it prints, the end is kept


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each call may take, by the monotonic clock."""

    build_s: float = 600.0  # importing and building the policy, with its weights
    act_s: float = 120.0
    evaluate_s: float = 600.0
    load_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("build_s", "act_s", "evaluate_s", "load_s"):
            if not getattr(self, name) > 0:
                raise PolicyError(f"limits/{name}: expected more than 0, got {getattr(self, name)}; raise it")


@dataclass(frozen=True, kw_only=True)
class _Hello:
    """What the policy said of itself."""

    block_steps: int
    log_prob_size: int
    replay: Spec
    has_value: bool


class ElsewherePolicy(Closeable):
    """A PlainPolicy of another interpreter. Close it, or use it as a context."""

    def __init__(
        self, source: PolicySource, spec: StepSpec, *, limits: Limits | None = None, version: int = NO_VERSION
    ):
        """Start the process and wait until the policy is built; `spec` is that of the world it is to act in."""
        self.source = source
        self.spec = spec
        self.limits = limits or Limits()
        self.version = version
        self.num_starts = 0
        self._weights: tuple[str | None, process.Arrays] | None = None
        self._child: PolicyChild | None = None
        self._finalizer: Any = None
        self._closed = False
        self._request = 0
        self._hello: _Hello | None = None
        self._running()

    # ---- a block policy

    @property
    def block_steps(self) -> int:
        return self._said.block_steps

    @property
    def log_prob_size(self) -> int:
        return self._said.log_prob_size

    @property
    def replay_spec(self) -> Spec:
        return self._said.replay

    @property
    def has_value(self) -> bool:
        return self._said.has_value

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one just now."""
        return None if self._child is None else self._child.pid

    def act(
        self, observation: Tree, instructions: Sequence[str], *, rngs: Sequence[np.random.Generator], sampling: Sampling
    ) -> Acted:
        """Choose, there; the generators go on from where the policy left theirs."""
        if len(rngs) != len(instructions):
            raise PolicyError(
                f"rngs: expected {len(instructions)} generators, one for each instruction, got {len(rngs)}"
            )
        request = {**_asked(instructions, sampling), "rngs": [process.generator_state(rng) for rng in rngs]}
        message, arrays = self._call("act", request, process.under(_flat(observation), "observation"))
        lead = (len(instructions), self.block_steps)
        try:
            action = _checked(process.below(arrays, "action"), self.spec.action, lead, "action")
            replay = _checked(process.below(arrays, "replay"), self.replay_spec, lead[:1], "replay")
            log_prob = _exact(arrays, "log_prob", (*lead, self.log_prob_size))
            value = _exact(arrays, "value", lead[:1]) if self.has_value else None
            states = message["rngs"]
            for rng, state in zip(rngs, states, strict=True):
                process.set_generator_state(rng, state)
        except (SpecError, KeyError, ValueError, TypeError) as error:
            raise self._garbage("act", error) from error
        return Acted(
            action=trees.unflatten(action), replay=replay, log_prob=log_prob, value=value, version=self.version
        )

    def evaluate(
        self, observation: Tree, instructions: Sequence[str], replay: Mapping[str, Any], *, sampling: Sampling
    ) -> Evaluated:
        """Weigh earlier choices again; what comes back wants no gradients."""
        given = process.under(_flat(observation), "observation") | process.under(dict(replay), "replay")
        _, arrays = self._call("evaluate", _asked(instructions, sampling), given)
        shape = (len(instructions), self.block_steps, self.log_prob_size)
        try:
            log_prob, entropy = _exact(arrays, "log_prob", shape), _exact(arrays, "entropy", shape)
            value = _exact(arrays, "value", shape[:1]) if self.has_value else None
        except (SpecError, KeyError) as error:
            raise self._garbage("evaluate", error) from error
        return Evaluated(
            log_prob=torch.from_numpy(log_prob),
            entropy=torch.from_numpy(entropy),
            value=None if value is None else torch.from_numpy(value),
        )

    # ---- weights

    def with_parameters(self, parameters: Tree | str | Path, *, version: int) -> ElsewherePolicy:
        """The same policy, with newer weights: a path that the other process can read, or arrays.

        There is one set of weights, in the process, and the older one is gone. A process started later gets them too.
        """
        if isinstance(parameters, str | Path):
            weights: tuple[str | None, process.Arrays] = (os.fspath(Path(parameters).absolute()), {})
        else:
            weights = (None, process.under(_flat(parameters), "parameters"))
        self._load(weights)
        self._weights = weights
        self.version = version
        return self

    # ---- the process

    def close(self) -> None:
        """End the process; the policy cannot be used after."""
        self._closed = True
        self._drop()

    @property
    def _said(self) -> _Hello:
        assert self._hello is not None
        return self._hello

    def _running(self) -> PolicyChild:
        """The process, started and built if there is none."""
        if self._closed:
            raise PolicyError(f"{self.source.label}: it is closed; make a new one")
        if self._child is None:
            try:
                self._child = PolicyChild(self.source)
            except StartError as error:
                raise PolicyError(str(error)) from error
            self._finalizer = weakref.finalize(self, self._child.close)
            self.num_starts += 1
            asked = {"factory": self.source.factory, "options": self.source.options}
            try:
                message, _ = self._ask(self._child, "build", asked, {})
                self._greet(message)
                if self._weights is not None:
                    self._load(self._weights)
            except PolicyProcessRaised:
                self._drop()
                raise
        return self._child

    def _greet(self, message: Mapping[str, Any]) -> None:
        try:
            if message["protocol"] != process.PROTOCOL:
                raise ValueError(f"protocol: expected {process.PROTOCOL}, got {message['protocol']}")
            leaves = {
                name: ArraySpec(shape=tuple(shape), dtype=dtype) for name, (shape, dtype) in message["replay"].items()
            }
            hello = _Hello(
                block_steps=message["block_steps"],
                log_prob_size=message["log_prob_size"],
                replay=Spec(leaves),
                has_value=message["has_value"],
            )
            if min(hello.block_steps, hello.log_prob_size) < 1:
                raise ValueError(f"expected sizes from 1, got {hello}")
            if self._hello not in (None, hello):
                raise ValueError(f"expected the same policy at each start, got {hello}; build it from its options")
        except (SpecError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise self._garbage("build", error) from error
        self._hello = hello

    def _load(self, weights: tuple[str | None, process.Arrays]) -> None:
        path, arrays = weights
        self._ask(self._running(), "load", {"path": path}, arrays)

    def _call(self, do: str, request: dict[str, Any], arrays: process.Arrays) -> tuple[dict[str, Any], process.Arrays]:
        return self._ask(self._running(), do, request, arrays)

    def _ask(
        self, child: PolicyChild, do: str, request: dict[str, Any], arrays: process.Arrays
    ) -> tuple[dict[str, Any], process.Arrays]:
        """One request and its answer, in time."""
        self._request += 1
        try:
            parts = process.encode({"id": self._request, "do": do, **request}, arrays)
        except (process.Garbage, TypeError, ValueError) as error:
            raise PolicyError(f"{do}: what was given cannot be sent: {error}") from None
        limit_s = getattr(self.limits, f"{do}_s")
        deadline = time.monotonic() + limit_s
        try:
            child.send(parts, deadline)
            message, given = child.receive(deadline)
            if message.get("id") != self._request:
                raise process.Garbage(f"an answer to request {message.get('id')}, which nobody sent")
        except Late:
            stack = child.where()
            self._drop()
            raise PolicyProcessHung(name=self.source.label, doing=do, limit_s=limit_s, stack=stack) from None
        except Ended:
            exit_code, log = child.reap(), child.log_tail()
            if exit_code is None:
                raise self._garbage(do, ValueError("it closed its channel and goes on running")) from None
            self._drop()
            raise PolicyProcessDied(name=self.source.label, doing=do, exit_code=exit_code, log=log) from None
        except process.Garbage as error:
            raise self._garbage(do, error) from None
        except BaseException:  # Ctrl-C in the middle of a message: what comes next would be the rest of it
            self._drop()
            raise
        child.trim_log(LOG_BYTES)
        if "raised" in message:
            if do == "load":  # who knows what it has taken of them
                self._drop()
            raise PolicyProcessRaised(
                name=self.source.label, doing=do, error=str(message["raised"]), traceback=str(message["traceback"])
            )
        return message, given

    def _garbage(self, do: str, error: Exception) -> PolicyProcessGarbage:
        """What was said makes no sense; nor will what is said next, so the process is done with."""
        log = "" if self._child is None else self._child.log_tail()
        self._drop()
        problem = str(error) if isinstance(error, ValueError | process.Garbage) else f"{type(error).__name__}: {error}"
        return PolicyProcessGarbage(name=self.source.label, doing=do, problem=problem, log=log)

    def _drop(self) -> None:
        if self._child is not None:
            self._finalizer()
        self._child = None


def _asked(instructions: Sequence[str], sampling: Sampling) -> dict[str, Any]:
    return {"instructions": list(instructions), "temperature": sampling.temperature, "greedy": sampling.greedy}


def _flat(tree: Tree) -> dict[str, Array]:
    """The arrays of a tree by their paths; a tree that is one array has the path ''."""
    return {path: np.asarray(leaf) for path, leaf in trees.leaves(tree)}


def _checked(found: Mapping[str, Array], spec: Spec, lead: tuple[int, ...], where: str) -> dict[str, Array]:
    """Arrays with these leading dimensions, each row of which fits the spec."""
    for path in found:
        if path not in spec.flat:
            raise SpecError(f"{trees.join(where, path)}: expected no such field, got {describe(found[path])}")
    checked = {}
    for path, leaf in spec.flat.items():
        name = trees.join(where, path)
        whole = ArraySpec(shape=(*lead, *leaf.fixed_shape), dtype=leaf.dtype, low=leaf.low, high=leaf.high)
        if path not in found:
            raise SpecError(f"{name}: expected {whole}, got nothing")
        checked[path] = whole.check(found[path], name)
    return checked


def _exact(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """A float32 array of this shape without NaN."""
    whole = ArraySpec(shape=shape, dtype="float32", low=-np.inf, high=np.inf)
    if name not in arrays:
        raise SpecError(f"{name}: expected {whole}, got nothing")
    checked: Array = whole.check(arrays[name], name)
    return checked
