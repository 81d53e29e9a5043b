"""State of an algorithm: the state_dicts of its modules and optimizers as one flat dict of numpy arrays and JSON.

| key | what it is |
|---|---|
| `kind`, `config`, `spec`, `device`, `encoder_digest`, `num_updates` | plain JSON |
| `generator`, `stats/...` | the random generator, and the statistics of the state fields |
| `modules/<module>/<name in its state_dict>` | weights, such as `modules/critic/0/weight` |
| `optimizers/<optimizer>/<number>/<moment>` | `step`, `exp_avg` and `exp_avg_sq` of each parameter |

A state is checked whole before any of it is used. There is no pickle.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from understudy.algorithms.algorithm import AlgorithmError, State
from understudy.core import Spec, StepSpec
from understudy.core import tree as trees
from understudy.core.spec import canonical_json
from understudy.policies.stats import Stats


@dataclass(frozen=True, kw_only=True, eq=False)
class StateParts:
    """Everything that an algorithm's next update depends on, except the number of updates."""

    kind: str
    config: Any  # a dataclass of plain values, or a dict of JSON
    spec: StepSpec | Spec
    stats: Stats
    generator: torch.Generator
    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    encoder_digest: str | None = None  # of frozen weights that are not among the modules' own

    @property
    def config_json(self) -> dict[str, Any]:
        return dict(self.config) if isinstance(self.config, Mapping) else asdict(self.config)

    def tensors(self) -> dict[str, Tensor]:
        """By key; they share memory with the modules and optimizers."""
        found = {
            f"modules/{name}/{key.replace('.', '/')}": tensor
            for name, module in self.modules.items()
            for key, tensor in module.state_dict().items()
        }
        for name, optimizer in self.optimizers.items():
            for number, moments in optimizer.state_dict()["state"].items():
                found |= {f"optimizers/{name}/{number}/{moment}": tensor for moment, tensor in moments.items()}
        return found


class Resumable(abc.ABC):
    """An algorithm with `state` and `restore`: it names the parts of its state and takes statistics into use."""

    num_updates: int

    @abc.abstractmethod
    def _state_parts(self) -> StateParts: ...

    @abc.abstractmethod
    def _set_stats(self, stats: Stats) -> None: ...

    def state(self) -> State:
        """Everything that the next updates depend on, in memory of its own."""
        return _save(self._state_parts(), self.num_updates)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue as the algorithm whose state this is. If the state is refused, nothing has changed."""
        stats, self.num_updates = _restore(self._state_parts(), state)
        self._set_stats(stats)


def _save(parts: StateParts, num_updates: int) -> State:
    return {
        "kind": parts.kind,
        "config": canonical_json(parts.config_json),
        "spec": canonical_json(parts.spec.to_json()),
        "device": parts.generator.device.type,
        "encoder_digest": parts.encoder_digest or "",
        "num_updates": num_updates,
        "generator": parts.generator.get_state().numpy().copy(),
        **{name: array.copy() for name, array in parts.stats.flat().items()},
        **{name: tensor.detach().cpu().numpy().copy() for name, tensor in parts.tensors().items()},
    }


@torch.no_grad()
def _restore(parts: StateParts, state: Mapping[str, Any]) -> tuple[Stats, int]:
    """Fill the tensors and the generator; returns statistics and number of updates."""
    if state.get("kind") != parts.kind:
        raise AlgorithmError(
            f"kind: expected a state of {parts.kind!r}, got {state.get('kind')!r}; restore it with that algorithm"
        )
    _refuse_other("config", _item(state, "config"), canonical_json(parts.config_json))
    _refuse_other("spec", _item(state, "spec"), canonical_json(parts.spec.to_json()))
    device = parts.generator.device.type
    if _item(state, "device") != device:
        raise AlgorithmError(
            f"device: the state was saved on {state['device']}, this run is on {device}; "
            f"resume on {state['device']}, since random numbers differ"
        )
    if _item(state, "encoder_digest") != (parts.encoder_digest or ""):
        raise AlgorithmError(
            f"encoder_digest: the state was saved with the frozen encoder {state['encoder_digest'] or 'none'}, "
            f"this run has {parts.encoder_digest or 'none'}; put the same checkpoint at encoder.pretrained"
        )
    tensors = parts.tensors()
    generator = parts.generator.get_state()
    shapes = {name: tuple(like.shape) for name, like in {**tensors, "generator": generator}.items()}
    shapes |= {name: like.shape for name, like in parts.stats.flat().items()}
    for name, shape in shapes.items():
        if np.shape(_item(state, name)) != shape:
            raise AlgorithmError(
                f"{name}: expected shape {list(shape)}, got {list(np.shape(state[name]))}; "
                f"the state is of another network"
            )
    num_updates, stats = int(_item(state, "num_updates")), Stats.of_flat(state)
    found = {name: torch.from_numpy(np.array(state[name])) for name in tensors}
    parts.generator.set_state(torch.from_numpy(np.array(state["generator"], np.uint8)))
    for name, tensor in tensors.items():
        tensor.copy_(found[name])
    return stats, num_updates


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
