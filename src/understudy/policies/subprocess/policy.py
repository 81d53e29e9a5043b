"""SubprocessPolicy: a BlockPolicy whose code runs in another interpreter. It acts and evaluates, without gradients.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| each call, in the caller | the socket | the answer, or its deadline | the policy's process |
| the policy's own process (child_main.py) | the socket | the next request; the policy | a call |

If the process dies, hangs or answers nonsense, the call raises a typed error with the end of its log or its stack; the
next call starts a new process and gives it the latest weights. A policy may be used by one thread at a time.
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
from understudy.policies.protocol import Acted, Array, Evaluated, PolicyError, Sampling, check_noise
from understudy.policies.subprocess import child_main as process
from understudy.policies.subprocess.child import Ended, Late, PolicyChild
from understudy.policies.subprocess.failures import (
    PolicyProcessDied,
    PolicyProcessGarbage,
    PolicyProcessHung,
    PolicyProcessRaised,
)
from understudy.policies.subprocess.policy_factory import PolicyFactory
from understudy.processes.child import StartError

LOG_BYTES = 2**20  # of the process's output that are kept


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each call may take, by the monotonic clock."""

    build_s: float = 600.0
    """Seconds to import and build the policy with its weights."""
    act_s: float = 120.0
    """Seconds to choose a batch of actions."""
    evaluate_s: float = 600.0
    """Seconds to evaluate a batch of earlier choices."""
    load_s: float = 600.0
    """Seconds to load new weights."""

    def __post_init__(self) -> None:
        for name in ("build_s", "act_s", "evaluate_s", "load_s"):
            if not getattr(self, name) > 0:
                raise PolicyError(f"limits/{name}: expected more than 0, got {getattr(self, name)}; raise it")


@dataclass(frozen=True, kw_only=True)
class _PolicySizes:
    """The sizes that the policy reported when it was built."""

    block_steps: int
    log_prob_size: int
    replay: Spec
    has_value: bool
    noise_shape: tuple[int, ...] | None


class SubprocessPolicy(Closeable):
    """A PlainPolicy in another interpreter. Close it, or use it as a context manager."""

    def __init__(
        self, factory: PolicyFactory, spec: StepSpec, *, limits: Limits | None = None, version: int = NO_VERSION
    ):
        """Start the process and wait until the policy is built; `spec` is that of the world it is to act in."""
        self.factory = factory
        self.spec = spec
        self.limits = limits or Limits()
        self.version = version
        self.num_starts = 0
        self._weights: tuple[str | None, process.Arrays] | None = None
        self._child: PolicyChild | None = None
        self._finalizer: Any = None
        self._closed = False
        self._request = 0
        self._reported: _PolicySizes | None = None
        self._running()

    # ---- a block policy

    @property
    def block_steps(self) -> int:
        return self._sizes.block_steps

    @property
    def log_prob_size(self) -> int:
        return self._sizes.log_prob_size

    @property
    def replay_spec(self) -> Spec:
        return self._sizes.replay

    @property
    def has_value(self) -> bool:
        return self._sizes.has_value

    @property
    def noise_shape(self) -> tuple[int, ...] | None:
        """The shape of `act(noise=)` for one row; None if the policy takes none."""
        return self._sizes.noise_shape

    @property
    def pid(self) -> int | None:
        """Of the process, if one is running."""
        return None if self._child is None else self._child.pid

    def act(
        self,
        observation: Tree,
        instructions: Sequence[str],
        *,
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
        noise: Array | None = None,
    ) -> Acted:
        """Choose in the other process; the generators then have the states in which the policy left them.

        `noise` [B, *noise_shape] replaces the noise that the policy would draw and make its blocks of.
        """
        if len(rngs) != len(instructions):
            raise PolicyError(
                f"rngs: expected {len(instructions)} generators, one for each instruction, got {len(rngs)}"
            )
        request = {**_request_of(instructions, sampling), "rngs": [process.generator_state(rng) for rng in rngs]}
        given = process.under(_flat(observation), "observation")
        if noise is not None:
            given["noise"] = self._checked_noise(noise, len(instructions))
        message, arrays = self._call("act", request, given)
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
        """Recompute earlier choices; the results have no gradients."""
        given = process.under(_flat(observation), "observation") | process.under(dict(replay), "replay")
        _, arrays = self._call("evaluate", _request_of(instructions, sampling), given)
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

    def _checked_noise(self, noise: Array, num: int) -> Array:
        if self.noise_shape is None:
            raise PolicyError(f"noise: {self.factory.label} makes its blocks of none; leave it out")
        return check_noise(noise, (num, *self.noise_shape))

    # ---- weights

    def with_parameters(self, parameters: Tree | str | Path, *, version: int) -> SubprocessPolicy:
        """The same policy with newer weights: a path that the other process can read, or arrays.

        The process keeps one set of weights: the older one is replaced. A process that is started later gets it too.
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
        """End the process; the policy cannot be used afterwards."""
        self._closed = True
        self._drop()

    @property
    def _sizes(self) -> _PolicySizes:
        assert self._reported is not None
        return self._reported

    def _running(self) -> PolicyChild:
        """The process; if there is none, it is started and builds the policy."""
        if self._closed:
            raise PolicyError(f"{self.factory.label}: the policy is closed; make a new one")
        if self._child is None:
            try:
                self._child = PolicyChild(self.factory)
            except StartError as error:
                raise PolicyError(str(error)) from error
            self._finalizer = weakref.finalize(self, self._child.close)
            self.num_starts += 1
            request = {"factory": self.factory.factory, "options": self.factory.options}
            try:
                message, _ = self._ask(self._child, "build", request, {})
                self._check_sizes(message)
                if self._weights is not None:
                    self._load(self._weights)
            except PolicyProcessRaised:
                self._drop()
                raise
        return self._child

    def _check_sizes(self, message: Mapping[str, Any]) -> None:
        try:
            if message["protocol"] != process.PROTOCOL:
                raise ValueError(f"protocol: expected {process.PROTOCOL}, got {message['protocol']}")
            leaves = {
                name: ArraySpec(shape=tuple(shape), dtype=dtype) for name, (shape, dtype) in message["replay"].items()
            }
            sizes = _PolicySizes(
                block_steps=message["block_steps"],
                log_prob_size=message["log_prob_size"],
                replay=Spec(leaves),
                has_value=message["has_value"],
                noise_shape=None if message["noise_shape"] is None else tuple(map(int, message["noise_shape"])),
            )
            if min(sizes.block_steps, sizes.log_prob_size) < 1:
                raise ValueError(f"expected sizes from 1, got {sizes}")
            if self._reported not in (None, sizes):
                raise ValueError(f"expected the same policy at each start, got {sizes}; build it from its options")
        except (SpecError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise self._garbage("build", error) from error
        self._reported = sizes

    def _load(self, weights: tuple[str | None, process.Arrays]) -> None:
        path, arrays = weights
        self._ask(self._running(), "load", {"path": path}, arrays)

    def _call(self, do: str, request: dict[str, Any], arrays: process.Arrays) -> tuple[dict[str, Any], process.Arrays]:
        return self._ask(self._running(), do, request, arrays)

    def _ask(
        self, child: PolicyChild, do: str, request: dict[str, Any], arrays: process.Arrays
    ) -> tuple[dict[str, Any], process.Arrays]:
        """Send one request and wait for its answer until the deadline."""
        self._request += 1
        try:
            parts = process.encode({"id": self._request, "do": do, **request}, arrays)
        except (process.Garbage, TypeError, ValueError) as error:
            raise PolicyError(f"{do}: the arguments cannot be sent: {error}") from None
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
            raise PolicyProcessHung(name=self.factory.label, doing=do, limit_s=limit_s, stack=stack) from None
        except Ended:
            exit_code, log = child.reap(), child.log_tail()
            if exit_code is None:
                raise self._garbage(do, ValueError("it closed its socket and is still running")) from None
            self._drop()
            raise PolicyProcessDied(name=self.factory.label, doing=do, exit_code=exit_code, log=log) from None
        except process.Garbage as error:
            raise self._garbage(do, error) from None
        except BaseException:  # Ctrl-C in the middle of a message: the next bytes would be the rest of it
            self._drop()
            raise
        child.trim_log(LOG_BYTES)
        if "raised" in message:
            if do == "load":  # it may have loaded a part of them
                self._drop()
            raise PolicyProcessRaised(
                name=self.factory.label, doing=do, error=str(message["raised"]), traceback=str(message["traceback"])
            )
        return message, given

    def _garbage(self, do: str, error: Exception) -> PolicyProcessGarbage:
        """The answer makes no sense, so later answers cannot be trusted: end the process."""
        log = "" if self._child is None else self._child.log_tail()
        self._drop()
        problem = str(error) if isinstance(error, ValueError | process.Garbage) else f"{type(error).__name__}: {error}"
        return PolicyProcessGarbage(name=self.factory.label, doing=do, problem=problem, log=log)

    def _drop(self) -> None:
        if self._child is not None:
            self._finalizer()
        self._child = None


def _request_of(instructions: Sequence[str], sampling: Sampling) -> dict[str, Any]:
    return {"instructions": list(instructions), "temperature": sampling.temperature, "greedy": sampling.greedy}


def _flat(tree: Tree) -> dict[str, Array]:
    """The arrays of a tree by their paths; a tree that is one array has the path ''."""
    return {path: np.asarray(leaf) for path, leaf in trees.leaves(tree)}


def _checked(found: Mapping[str, Array], spec: Spec, lead: tuple[int, ...], where: str) -> dict[str, Array]:
    """Arrays with these leading dimensions whose rows fit the spec."""
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
