"""WorkerProtocol: encodes commands to a worker and checks its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from understudy.core import Spec, StepSpec, Tree
from understudy.core import tree as trees
from understudy.envs.suite import Suite
from understudy.envs.workers.channel import decode_leaf, encode_leaf
from understudy.envs.workers.outcomes import Answer, AskExpert, Command, Observe, Observed, Reset, Stepped, Steps
from understudy.envs.workers.shared_memory import SharedArrays
from understudy.envs.world import ExpertAction, WorldError, checked_options, checked_seed, starts_to_choose

PROTOCOL = 2


@dataclass(frozen=True, kw_only=True)
class WorkerProtocol:
    """What the worker's hello said about its world, and the messages that follow from it.

    An invalid answer raises ValueError, KeyError or TypeError.
    """

    step_spec: StepSpec
    suite: Suite
    has_expert: bool  # whether it answers AskExpert
    deterministic: bool
    simulated: bool
    hz: float | None
    versions: Mapping[str, str]  # of the world's `version_packages`
    block_steps: int

    @staticmethod
    def of(hello: Mapping[str, Any], block_steps: int) -> WorkerProtocol:
        if hello["protocol"] != PROTOCOL:
            raise ValueError(f"protocol: expected {PROTOCOL}, got {hello['protocol']}; use one version of understudy")
        return WorkerProtocol(
            step_spec=StepSpec.from_json(hello["step_spec"]),
            suite=Suite.from_json(hello["suite"]),
            has_expert=bool(hello["has_expert"]),
            deterministic=bool(hello["deterministic"]),
            simulated=hello["simulated"] is True,
            hz=None if hello["hz"] is None else float(hello["hz"]),
            versions=dict(hello["versions"]),
            block_steps=block_steps,
        )

    def checked(self, command: Steps) -> Steps:
        """The command with flat, checked actions; raises if they do not fit the spec."""
        num_steps = len(command.actions)
        if not 1 <= num_steps <= self.block_steps:
            raise WorldError(
                f"actions: expected 1 to {self.block_steps}, got {num_steps}; send several blocks, "
                f"or raise limits.block_steps"
            )
        return replace(command, actions=[self.step_spec.action.check(action, "action") for action in command.actions])

    def request(self, number: int, command: Command, arrays: SharedArrays) -> dict[str, Any]:
        """The message for a command; copies the actions of a checked block into the shared memory."""
        if isinstance(command, Reset):
            options = dict(command.options)
            return {"id": number, "do": "reset", "seed": command.seed, "options": options, "observe": command.observe}
        if isinstance(command, Observe):
            return {"id": number, "do": "observe", "observe": True, "refresh": command.refresh}
        if isinstance(command, AskExpert):
            return {"id": number, "do": "expert_action", "noise": command.noise, "seed": command.seed, "observe": False}
        checked: Sequence[Any] = command.actions  # flat, by `check`
        rows = [arrays.write_action(row, flat) for row, flat in enumerate(checked)]
        ragged = [{path: encode_leaf(leaf) for path, leaf in row.items()} for row in rows if row]
        return {"id": number, "do": "steps", "num_steps": len(rows), "observe": command.observe, "ragged": ragged}

    def answer(self, number: int, command: Command, message: Mapping[str, Any], arrays: SharedArrays) -> Answer:
        """Check a worker's answer and copy it out of the shared memory."""
        if arrays.request != number:
            raise ValueError(f"memory: expected the answer to request {number}, got {arrays.request}")
        if isinstance(command, AskExpert):
            ragged = _decoded(self.step_spec.action, "action", message["ragged_action"])
            return ExpertAction(action=arrays.read_action(0, ragged), progress=float(message["progress"]))
        observation: Any = None
        extras: Any = {}
        labels: dict[str, str] = {}
        if isinstance(command, Observe) or command.observe:
            observation = arrays.read_observation(
                _decoded(self.step_spec.observation, "observation", message["ragged"])
            )
            extras, labels = self._extras(message["extras"]), _checked_labels(message["labels"])
        info = {} if isinstance(command, Observe) else message["info"]
        if not isinstance(info, dict):
            raise ValueError(f"info: expected a dict, got {info!r}")
        if not isinstance(command, Steps):
            return Observed(observation=observation, info=info, extras=extras, labels=labels)
        num_steps, num_requested = message["num_steps"], len(command.actions)
        if type(num_steps) is not int or not 1 <= num_steps <= num_requested:
            raise ValueError(f"num_steps: expected 1 to {num_requested}, got {num_steps!r}")
        flags = arrays.flags[:num_steps].copy()
        _check_flags(flags.tolist(), num_requested)
        columns = flags.view(bool)
        return Stepped(
            observation=observation,
            reward=arrays.reward[:num_steps].copy(),
            terminated=columns[:, 0],
            truncated=columns[:, 1],
            success=columns[:, 2],
            info=info,
            extras=extras,
            labels=labels,
        )

    def _extras(self, coded: Mapping[str, Any]) -> Tree:
        leaves = self.step_spec.extras.leaves("extras")
        flat = {path: decode_leaf(leaf, coded[path], path) for path, leaf in leaves}
        return trees.unflatten(trees.below(flat, "extras"))


def _checked_labels(labels: Any) -> dict[str, str]:
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise ValueError(f"labels: expected a dict of texts, got {labels!r}")
    return labels


def _decoded(spec: Spec, name: str, coded: Mapping[str, Any]) -> dict[str, Any]:
    """The ragged leaves of a tree, which are sent as messages and not in the shared memory."""
    return {path: decode_leaf(leaf, coded[path], path) for path, leaf in spec.leaves(name) if leaf.ragged}


def _check_flags(rows: list[list[int]], num_requested: int) -> None:
    """Refuse invalid flags, and blocks that continue after the episode's end or stop early. Faster than numpy."""
    if any(flag > 1 for row in rows for flag in row):
        raise ValueError(f"flags: expected 0 or 1, got {rows}")
    ended = rows[-1][0] or rows[-1][1]
    if any(row[0] or row[1] for row in rows[:-1]) or (len(rows) < num_requested and not ended):
        raise ValueError(f"num_steps: expected all {num_requested} or up to an end, got {len(rows)}")


def checked_reset(command: Reset, suite: Suite | None) -> Reset:
    """The command with plain numbers; refuses wrong arguments in the caller: in the worker they cost its process."""
    options = dict(checked_options(command.options))
    seed = None if command.seed is None else checked_seed(command.seed)
    start = options.get("start")
    if isinstance(start, np.integer):
        options["start"] = int(start)
    if suite is not None and options.get("task") is not None:
        starts_to_choose(suite, suite.task(options["task"]), start, options.get("split"))
    return replace(command, seed=seed, options=options)
