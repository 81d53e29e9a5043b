"""WorkerProtocol: encodes commands to a worker and checks its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from understudy.core import Spec, StepSpec
from understudy.envs.suite import Suite
from understudy.envs.workers.channel import decode_leaf, encode_leaf
from understudy.envs.workers.outcomes import Answer, AskExpert, Command, Observe, Observed, Reset, Stepped, Steps
from understudy.envs.workers.shared_memory import SharedArrays
from understudy.envs.world import OPTIONS, ExpertAction, WorldError

PROTOCOL = 1


@dataclass(frozen=True, kw_only=True)
class WorkerProtocol:
    """What can be said to a worker, as it said itself when it started. What is wrong with an answer is a ValueError,
    KeyError or TypeError."""

    step_spec: StepSpec
    suite: Suite
    has_expert: bool  # whether it can be asked for advice
    versions: Mapping[str, str]  # of what the world stands on
    block_steps: int

    @staticmethod
    def of(hello: Mapping[str, Any], block_steps: int) -> WorkerProtocol:
        if hello["protocol"] != PROTOCOL:
            raise ValueError(f"protocol: expected {PROTOCOL}, got {hello['protocol']}; use one version of understudy")
        return WorkerProtocol(
            step_spec=StepSpec.from_json(hello["step_spec"]),
            suite=Suite.from_json(hello["suite"]),
            has_expert=bool(hello["has_expert"]),
            versions=dict(hello["versions"]),
            block_steps=block_steps,
        )

    def checked(self, command: Steps) -> Steps:
        """The command with its actions flat and checked, or the error that says what is wrong with them."""
        num_steps = len(command.actions)
        if not 1 <= num_steps <= self.block_steps:
            raise WorldError(
                f"actions: expected 1 to {self.block_steps}, got {num_steps}; send several blocks, "
                f"or raise limits.block_steps"
            )
        return replace(command, actions=[self.step_spec.action.check(action, "action") for action in command.actions])

    def request(self, number: int, command: Command, arena: SharedArrays) -> dict[str, Any]:
        """The message; the actions of a checked block are copied into the shared memory."""
        if isinstance(command, Reset):
            options = dict(command.options)
            return {"id": number, "do": "reset", "seed": command.seed, "options": options, "look": command.look}
        if isinstance(command, Observe):
            return {"id": number, "do": "observe", "look": True}
        if isinstance(command, AskExpert):
            return {"id": number, "do": "expert_action", "noise": command.noise, "seed": command.seed, "look": False}
        checked: Sequence[Any] = command.actions  # flat, by `check`
        rows = [arena.write_action(row, flat) for row, flat in enumerate(checked)]
        ragged = [{path: encode_leaf(leaf) for path, leaf in row.items()} for row in rows if row]
        return {"id": number, "do": "steps", "num_steps": len(rows), "look": command.look, "ragged": ragged}

    def answer(self, number: int, command: Command, message: Mapping[str, Any], arena: SharedArrays) -> Answer:
        """The answer in a message and the shared memory, from which it is copied."""
        if arena.request != number:
            raise ValueError(f"memory: expected the answer to request {number}, got {arena.request}")
        if isinstance(command, AskExpert):
            ragged = _decoded(self.step_spec.action, "action", message["advised"])
            return ExpertAction(action=arena.read_action(0, ragged), progress=float(message["progress"]))
        observation: Any = None
        if isinstance(command, Observe) or command.look:
            observation = arena.read_observation(_decoded(self.step_spec.observation, "observation", message["ragged"]))
        info = {} if isinstance(command, Observe) else message["info"]
        if not isinstance(info, dict):
            raise ValueError(f"info: expected a dict, got {info!r}")
        if not isinstance(command, Steps):
            return Observed(observation=observation, info=info)
        num_steps, num_asked = message["num_steps"], len(command.actions)
        if type(num_steps) is not int or not 1 <= num_steps <= num_asked:
            raise ValueError(f"num_steps: expected 1 to {num_asked}, got {num_steps!r}")
        flags = arena.flags[:num_steps].copy()
        _check_flags(flags.tolist(), num_asked)
        columns = flags.view(bool)
        return Stepped(
            observation=observation,
            reward=arena.reward[:num_steps].copy(),
            terminated=columns[:, 0],
            truncated=columns[:, 1],
            success=columns[:, 2],
            info=info,
        )


def _decoded(spec: Spec, name: str, coded: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a tree that have no place in the shared memory."""
    return {path: decode_leaf(leaf, coded[path], path) for path, leaf in spec.leaves(name) if leaf.ragged}


def _check_flags(rows: list[list[int]], num_asked: int) -> None:
    """Refuse flags that are none, and a block that went on after its end or stopped before; faster than numpy is."""
    if any(flag > 1 for row in rows for flag in row):
        raise ValueError(f"flags: expected 0 or 1, got {rows}")
    ended = rows[-1][0] or rows[-1][1]
    if any(row[0] or row[1] for row in rows[:-1]) or (len(rows) < num_asked and not ended):
        raise ValueError(f"num_steps: expected all {num_asked} or up to an end, got {len(rows)}")


def check_reset(command: Reset, suite: Suite | None) -> None:
    """Refuse here what the world would refuse there, since that would cost the process."""
    for name in command.options:
        if name not in OPTIONS:
            raise WorldError(f"options: no option {name!r}; reset knows {', '.join(OPTIONS)}")
    task, start = command.options.get("task"), command.options.get("start")
    if suite is not None and task is not None:
        known = suite.task(task)
        if start is not None:
            suite.split_of(known, int(start))
