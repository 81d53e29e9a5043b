"""Saved: an algorithm's state as a flat dict of numpy arrays and plain JSON, checked whole before any of it is used."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.algorithms.algorithm import AlgorithmError, State
from understudy.algorithms.offpolicy.flat_adam import Trained
from understudy.core import Spec, StepSpec
from understudy.core import tree as trees
from understudy.core.spec import canonical_json
from understudy.policies import Stats


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """All of an algorithm that its next update depends on, but for the number of updates."""

    kind: str
    config: Any  # a dataclass of plain values
    spec: StepSpec | Spec
    stats: Stats
    generator: torch.Generator
    trained: Mapping[str, Trained]
    tensors: Mapping[str, Tensor]  # others than those that are trained

    def all_tensors(self) -> dict[str, Tensor]:
        """By path."""
        named = {f"{name}/{path}": one for name, t in self.trained.items() for path, one in t.tensors().items()}
        return {**named, **self.tensors}


class Saves(abc.ABC):
    """An algorithm that can be saved and gone on with: it names its parts, and takes statistics into use."""

    num_updates: int

    @abc.abstractmethod
    def _parts(self) -> Parts: ...

    @abc.abstractmethod
    def _use(self, stats: Stats) -> None: ...

    def state(self) -> State:
        """All that the next updates depend on, in memory of its own."""
        return _save(self._parts(), self.num_updates)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the algorithm that the state was taken of would have. If it refuses, nothing changed."""
        stats, self.num_updates = _restore(self._parts(), state)
        self._use(stats)


def _save(parts: Parts, num_updates: int) -> State:
    return {
        "kind": parts.kind,
        "config": canonical_json(asdict(parts.config)),
        "spec": canonical_json(parts.spec.to_json()),
        "device": parts.generator.device.type,
        "num_updates": num_updates,
        "generator": parts.generator.get_state().numpy().copy(),
        **{name: array.copy() for name, array in parts.stats.flat().items()},
        **{name: tensor.detach().cpu().numpy().copy() for name, tensor in parts.all_tensors().items()},
    }


def _restore(parts: Parts, state: Mapping[str, Any]) -> tuple[Stats, int]:
    """Fill the tensors and the generator; returns statistics and number of updates."""
    if state.get("kind") != parts.kind:
        raise AlgorithmError(
            f"kind: expected a state of {parts.kind!r}, got {state.get('kind')!r}; restore it where it is from"
        )
    _refuse_other("config", _item(state, "config"), canonical_json(asdict(parts.config)))
    _refuse_other("spec", _item(state, "spec"), canonical_json(parts.spec.to_json()))
    device = parts.generator.device.type
    if _item(state, "device") != device:
        raise AlgorithmError(
            f"device: the state was saved on {state['device']}, this run is on {device}; "
            f"resume on {state['device']}, since random numbers differ"
        )
    tensors = parts.all_tensors()
    shapes = {name: tuple(like.shape) for name, like in tensors.items()}
    shapes |= {name: like.shape for name, like in parts.stats.flat().items()}
    for name, shape in shapes.items():
        if np.shape(_item(state, name)) != shape:
            raise AlgorithmError(
                f"{name}: expected shape {list(shape)}, got {list(np.shape(state[name]))}; "
                f"the state is of another network"
            )
    num_updates = int(_item(state, "num_updates"))
    parts.generator.set_state(torch.from_numpy(np.array(_item(state, "generator"), np.uint8)))
    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(np.array(state[name])))
    return Stats.of_flat(state), num_updates


def _item(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise AlgorithmError(f"{name}: expected it in the saved state, got nothing; save all of state()")
    return state[name]


def _refuse_other(name: str, saved: str, mine: str) -> None:
    if saved == mine:
        return
    before, now = (trees.flatten(json.loads(text), name) for text in (saved, mine))
    for path in {**before, **now}:
        if before.get(path) != now.get(path):
            raise AlgorithmError(
                f"{path}: the state was saved with {before.get(path)!r}, this run has {now.get(path)!r}; "
                f"resume with the saved {name}, or begin a new run"
            )
