"""IsolatedWorld: a World that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core import Tree
from understudy.envs.suite import Task
from understudy.envs.workers.outcomes import AskExpert, Observe, Observed, Reset, Stepped, Steps
from understudy.envs.workers.restarting_worker import Limits, Worker
from understudy.envs.world import ExpertAction, World, WorldError
from understudy.envs.world_factory import WorldFactory


class IsolatedWorld(World):
    """Runs the world of `source` in a process. A failed call raises a WorkerFailure; the next reset restarts it."""

    def __init__(self, source: WorldFactory, *, limits: Limits | None = None):
        self.worker = Worker(source, limits=limits)
        try:
            self.worker.start()
        except BaseException:
            self.worker.close()
            raise
        self.step_spec = self.worker.step_spec
        self.suite = self.worker.suite
        self.deterministic = self.worker.deterministic
        self.simulated = self.worker.simulated
        self.hz = self.worker.hz
        self._stale = False  # whether the next observation is to be of its time
        self._extras: Tree = {}
        self._labels: dict[str, str] = {}

    def choose(self, task: str) -> None:
        self._state = "running" if self.worker.in_episode else "not reset"
        super().choose(task)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        return self._reset(Reset(seed=seed, options=self._with_task(options)))

    def reset_without_observation(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._reset(Reset(seed=seed, options=self._with_task(options), observe=False))[1]

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, dict[str, Any]]:
        stepped = self.step_block([action])
        return stepped.observation, *_outcome(stepped)

    def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        return _outcome(self.step_block([action], observe=False))

    def step_block(self, actions: list[Tree], *, observe: bool = True) -> Stepped:
        """Execute several actions in one round trip, up to the end of the episode, and observe once after the last."""
        stepped = self.worker.call(Steps(actions=actions, observe=observe))
        assert isinstance(stepped, Stepped)
        if observe:
            self._extras, self._labels = stepped.extras, stepped.labels
        return stepped

    def observe(self) -> Tree:
        observed = self.worker.call(Observe(refresh=self._stale))
        self._stale = False
        assert isinstance(observed, Observed)
        self._extras, self._labels = observed.extras, observed.labels
        return observed.observation

    def refresh(self) -> None:
        self._stale = True

    def extras(self) -> Tree:
        return self._extras

    def labels(self) -> dict[str, str]:
        return self._labels

    @property
    def has_expert(self) -> bool:
        return self.worker.has_expert

    def versions(self) -> dict[str, str]:
        return self.worker.versions

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        if noise and rng is None:
            raise WorldError("rng: noise needs a random generator, got None; pass np.random.default_rng(seed)")
        seed = 0 if rng is None else int(rng.integers(2**63))
        answer = self.worker.call(AskExpert(noise=noise, seed=seed))
        assert isinstance(answer, ExpertAction)
        return answer

    def close(self) -> None:
        self.worker.close()

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        raise WorldError("begin: a random generator cannot be sent to another process; call reset with a seed")

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        return self.step_without_observation(action)

    def _with_task(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """Without a task in the options, the episode keeps the last one, also in a restarted process."""
        given = dict(options or {})
        if given.get("task") is None:
            given["task"] = self.task.name
        return given

    def _reset(self, command: Reset) -> tuple[Tree, dict[str, Any]]:
        observed = self.worker.call(command)
        assert isinstance(observed, Observed)
        self._extras, self._labels = observed.extras, observed.labels
        self._task = self.suite.task(observed.info["task"])
        return observed.observation, observed.info


def _outcome(stepped: Stepped) -> tuple[float, bool, bool, dict[str, Any]]:
    return stepped.reward[-1].item(), bool(stepped.terminated[-1]), bool(stepped.truncated[-1]), stepped.info
