"""The main program of a worker's process: it builds one world and serves the caller's requests one at a time.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the channel, a socket | the next request; the world | the caller; the caller's end closes the channel |

The process ends when the channel is closed, or the lifeline (processes/child_main.py).
What the world prints goes to the log; the channel has a file descriptor of its own.

This file runs in the simulator's interpreter and needs only numpy and the standard library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core import SpecError, StepSpec
from understudy.envs.workers.channel import Channel, ChannelClosed, decode_leaf, encode_leaf
from understudy.envs.workers.protocol import PROTOCOL
from understudy.envs.workers.shared_memory import Layout, SharedArrays
from understudy.envs.world import World
from understudy.envs.world_factory import build
from understudy.processes.child_main import enter
from understudy.processes.messages import raised


class BrokenContract(Exception):
    """The world returned something that its contract forbids."""


def main() -> None:
    """Serve one caller."""
    stream, (memory_fd,) = enter()
    try:
        serve(Channel(stream, blocking=True), memory_fd)
    except ChannelClosed:
        os._exit(0)  # the caller is gone: do not wait for threads or exit handlers


def serve(channel: Channel, memory_fd: int) -> None:
    """Build the world, then answer requests until one of them is "close"."""
    request = channel.receive()
    try:
        world = build(request["factory"], request["options"])
        hello = {
            "protocol": PROTOCOL,
            "step_spec": world.step_spec.to_json(),
            "suite": world.suite.to_json(),
            "has_expert": world.has_expert,
            "deterministic": world.deterministic,
            "simulated": world.simulated,
            "hz": world.hz,
            "versions": world.versions(),
        }
    except Exception as error:  # noqa: BLE001 (the outermost loop of a process)
        channel.send({"id": 0, **raised(error)})
        return
    channel.send({"id": 0, "hello": hello})
    ready = channel.receive()  # the caller has sized the shared memory
    assert ready["do"] == "serve"
    server = WorldServer(world, SharedArrays(Layout(world.step_spec, request["block_steps"]), memory_fd))
    os.close(memory_fd)
    while True:
        request = channel.receive()
        try:
            answer = {"id": request["id"], **server.answer(request)}
        except BrokenContract as error:
            answer = {"id": request["id"], "invalid": str(error)}
        except Exception as error:  # noqa: BLE001 (the outermost loop of a process)
            answer = {"id": request["id"], **raised(error)}
        try:
            channel.send(answer)
        except (TypeError, ValueError) as error:
            channel.send({"id": request["id"], "invalid": f"info: expected values that JSON knows, got {error}"})
        if request["do"] == "close":
            return


class WorldServer:
    """Executes requests on the world and writes the results into the shared memory."""

    def __init__(self, world: World, arrays: SharedArrays):
        self._world = world
        self._arrays = arrays
        self._spec: StepSpec = world.step_spec
        free = self._spec.reward.dtype.startswith("float") and not self._spec.reward.bounded
        # Python floats up to this size need no further check; -1 where the spec has bounds or a shape.
        self._plain_reward = (
            float(np.finfo(self._spec.reward.dtype).max) if free and not self._spec.reward.shape else -1.0
        )
        self._ragged_actions = {path: leaf for path, leaf in self._spec.action.leaves("action") if leaf.ragged}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do = request["do"]
        answer: dict[str, Any] = {}
        if do == "steps":
            answer = self._steps(request["num_steps"], request["ragged"])
        elif do == "reset":
            info = self._world.reset_without_observation(seed=request["seed"], options=request["options"])
            answer = {"info": _checked_info(info)}
        elif do == "expert_action":
            answer = self._expert_action(request["noise"], request["seed"])
        elif do == "observe" and request["refresh"]:
            self._world.refresh()
        elif do == "close":
            self._world.close()
        if request["observe"]:
            answer |= self._observe()
        self._arrays.request = request["id"]
        return answer

    def _steps(self, num_steps: int, coded: list[dict[str, Any]]) -> dict[str, Any]:
        ragged: list[Mapping[str, Any]] = [
            {path: decode_leaf(leaf, row[path], path) for path, leaf in self._ragged_actions.items()} for row in coded
        ]
        rewards, flags = [], []
        info: dict[str, Any] = {}
        for row in range(num_steps):
            action = self._arrays.read_action(row, ragged[row] if ragged else {})
            given: Any = self._world.step_without_observation(action)
            if not isinstance(given, tuple) or len(given) != 4:
                raise BrokenContract(f"step_without_observation: expected 4 values, got {str(given)[:60]!r}; see World")
            info = _checked_info(given[3])
            self._check_reward(given[0])
            rewards.append(given[0])
            flags.append((bool(given[1]), bool(given[2]), bool(info.get("success", False))))
            if given[1] or given[2]:
                break
        self._arrays.reward[: len(rewards)] = rewards
        self._arrays.flags[: len(flags)] = flags
        return {"num_steps": len(flags), "info": info}

    def _expert_action(self, noise: float, seed: int) -> dict[str, Any]:
        expert = self._world.expert_action(noise=noise, rng=np.random.default_rng(seed))
        try:
            flat = self._spec.action.check(expert.action, "action")
        except SpecError as error:
            raise BrokenContract(f"expert_action: {error}") from None
        ragged = self._arrays.write_action(0, flat)
        return {
            "ragged_action": {path: encode_leaf(leaf) for path, leaf in ragged.items()},
            "progress": float(expert.progress),
        }

    def _check_reward(self, reward: Any) -> None:
        if type(reward) is float and -self._plain_reward <= reward <= self._plain_reward:
            return
        try:
            value = self._spec.reward.check(reward.item() if isinstance(reward, np.generic) else reward, "reward")
        except SpecError as error:
            raise BrokenContract(str(error)) from None
        if not (math.isfinite(value) if value.ndim == 0 else np.isfinite(value).all()):
            raise BrokenContract(f"reward: expected a finite number, got {reward}; check the world")

    def _observe(self) -> dict[str, Any]:
        """Write the observation into the shared memory; returns what is sent as a message: ragged leaves, extras and
        labels."""
        observation = self._world.observe()
        try:
            flat = self._spec.observation.check(observation, "observation")
            extras = self._spec.extras.check(self._world.extras(), "extras")
        except SpecError as error:
            raise BrokenContract(str(error)) from None
        ragged = self._arrays.write_observation(flat)
        return {
            "ragged": {path: encode_leaf(leaf) for path, leaf in ragged.items()},
            "extras": {path: encode_leaf(leaf) for path, leaf in extras.items()},
            "labels": self._world.labels(),
        }


def _checked_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise BrokenContract(f"info: expected a dict, got {type(info).__name__}; return one")
    return info
