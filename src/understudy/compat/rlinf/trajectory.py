"""Parses a trajectory of RLinf: checked flat arrays [T, B, ...] by path, and the layout from which it is built again.

A trajectory is a mapping or an object with fields [T, B, ...] (T steps of each of B environments), of torch or numpy.
What has not these two dimensions (None, text, lists) is kept beside them, and is in no batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from understudy.compat.rlinf.tensors import encode_value, is_tensor, to_array, to_tensor
from understudy.core import ArraySpec, Spec, SpecError, StepSpec
from understudy.core import tree as trees
from understudy.core.spec import canonical_json, describe
from understudy.core.tree import AnyTree

Array = np.ndarray[Any, Any]

BEFORE = ("terminations", "truncations", "dones")  # may have a row for the reset of each epoch, before its steps
AFTER = ("prev_values",)  # may have a row for the end of each epoch, after its steps
EDGES = "_edges"  # extras/_edges/dones: those rows, each beside the step that it is next to
_LABELS = ("max_episode_length", "model_weights_id")
_LENGTHS = ("prev_logprobs", "rewards")  # the first that is there tells T, B and the shape in the index


@dataclass
class Trajectory:
    """A trajectory with RLinf's names. A field that is None is not there; others may be set, and are kept too."""

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Any = None  # [T, B, ...], as all that follow
    intervene_flags: Any = None
    rewards: Any = None
    terminations: Any = None  # [T, B, ...], or with a row more for the reset before each epoch
    truncations: Any = None
    dones: Any = None
    prev_logprobs: Any = None
    prev_values: Any = None  # [T, B, ...], or with a row more for the end of each epoch
    versions: Any = None
    forward_inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    curr_obs: dict[str, Any] = dataclasses.field(default_factory=dict)
    next_obs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Field:
    """An array field of each step."""

    path: str  # for example curr_obs/states
    library: str  # "torch" or "numpy": what it is given back as
    dtype: str  # bfloat16 is kept as float32
    shape: tuple[int, ...]  # without [T, B]
    num_edges: int = 0  # rows between the epochs

    @property
    def stored(self) -> ArraySpec:
        return ArraySpec(shape=self.shape, dtype="float32" if self.dtype == "bfloat16" else self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Layout:
    """The fields of a trajectory in their order, and the paths of the other values that stand among them."""

    fields: tuple[Field, ...]
    order: tuple[str, ...]  # the paths of all, also of values

    @cached_property
    def by_path(self) -> dict[str, Field]:
        return {field.path: field for field in self.fields}

    def to_json(self) -> str:
        rows = [[f.path, f.library, f.dtype, list(f.shape), f.num_edges] for f in self.fields]
        return canonical_json({"fields": rows, "order": list(self.order)})

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Layout:
        found = tuple(
            Field(path=path, library=library, dtype=dtype, shape=tuple(shape), num_edges=num_edges)
            for path, library, dtype, shape, num_edges in value["fields"]
        )
        return Layout(found, tuple(value["order"]))

    @staticmethod
    def of_spec(spec: StepSpec) -> Layout:
        """The layout of a trajectory that was stored by a version that kept none."""
        leaves = {
            "actions": spec.action.flat.get(""),
            "rewards": spec.reward,
            **spec.extras.flat,
            **dict(spec.observation.leaves("curr_obs")),
            **dict(spec.observation.leaves("next_obs")),
        }
        found = tuple(
            Field(path=path, library="numpy", dtype=leaf.dtype, shape=leaf.fixed_shape)
            for path, leaf in leaves.items()
            if leaf is not None
        )
        return Layout(found, tuple(leaves))

    @cached_property
    def paired(self) -> bool:
        """Whether next_obs has the fields of curr_obs, so that each observation is stored once."""
        now, then = ({f.path.partition("/")[2]: f.stored for f in self.fields if top(f.path) == name} for name in _OBS)
        return bool(now) and now == then

    @cached_property
    def spec(self) -> StepSpec:
        """The spec of its steps. What a step must have and this has not is a placeholder."""
        leaves = {field.path: field.stored for field in self.fields}
        taken = {"actions", "rewards"}
        observation: AnyTree = {"step": ArraySpec(shape=(), dtype="int32")}
        if self.paired:
            observation = trees.unflatten(trees.below(leaves, "curr_obs"))
            taken |= {path for path in leaves if top(path) in _OBS}
        extras = {path: leaf for path, leaf in leaves.items() if path not in taken}
        for field in self.fields:
            if field.num_edges:
                extras[f"{EDGES}/{field.path}"] = field.stored
        return StepSpec(
            observation=Spec(observation),
            action=Spec(leaves.get("actions", ArraySpec(shape=(), dtype="uint8"))),
            reward=leaves.get("rewards", ArraySpec(shape=(), dtype="float32")),
            extras=Spec(trees.unflatten(extras) if extras else {}),
        )


_OBS = ("curr_obs", "next_obs")


@dataclass(frozen=True, kw_only=True)
class ParsedTrajectory:
    """T steps of each of B environments; an episode ends where an environment was reset."""

    arrays: dict[str, Array]  # [T, B, ...] by path, as they are stored
    edges: dict[str, Array]  # [num_edges, B, ...] by path
    layout: Layout
    values: dict[str, Any]  # what is no array field, as JSON, by path
    labels: dict[str, str]
    shape: tuple[int, ...]  # of the field that tells the length, with [T, B]

    @property
    def length(self) -> int:
        return self.shape[0]

    @property
    def batch(self) -> int:
        return self.shape[1]

    @property
    def num_steps(self) -> int:
        return self.length * self.batch


def parse_trajectory(trajectory: Any, where: str) -> ParsedTrajectory | None:
    """Parse a mapping, or an object with attributes; None if it has no steps to speak of, as RLinf's empty ones."""
    given = _flat(trajectory, where)
    arrays: dict[str, Any] = {}
    values: dict[str, Any] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for path, value in given.items():
        if _num_dimensions(value) >= 2:
            array, dtype = to_array(value)
            if array.dtype.kind not in "bfiu":
                raise SpecError(f"{where}/{path}: expected an array of numbers, got {describe(array)}; leave it out")
            arrays[path], kinds[path] = array, ("torch" if is_tensor(value) else "numpy", dtype)
        else:
            values[path] = encode_value(value, f"{where}/{path}")
    shape = next((arrays[name].shape for name in _LENGTHS if name in arrays), None)
    if shape is None:
        if arrays:
            raise SpecError(
                f"{where}: expected rewards or prev_logprobs, which tell its length, got {', '.join(arrays)}; add one"
            )
        return None
    length, batch = shape[:2]
    if not length * batch:
        raise SpecError(f"{where}: expected at least one step, got {list(shape)}; leave it out")
    edges: dict[str, Array] = {}
    for path, array in arrays.items():
        steps, edge = _split_edges(array, length, path)
        if steps.shape[:2] != (length, batch):
            raise SpecError(
                f"{where}/{path}: expected [{length}, {batch}, ...] as its length has, got {describe(array)}"
            )
        arrays[path] = steps
        if edge is not None:
            edges[path] = edge
    if "rewards" in arrays and not np.isfinite(arrays["rewards"]).all():
        raise SpecError(f"{where}/rewards: expected finite numbers, got others; check the environment")
    found = tuple(
        Field(
            path=path,
            library=kinds[path][0],
            dtype=kinds[path][1],
            shape=array.shape[2:],
            num_edges=len(edges.get(path, ())),
        )
        for path, array in arrays.items()
    )
    return ParsedTrajectory(
        arrays=arrays,
        edges=edges,
        layout=Layout(found, tuple(given)),
        values=values,
        labels={name: str(given[name]) for name in _LABELS if isinstance(given.get(name), int | str)},
        shape=tuple(int(size) for size in shape),
    )


def check_same_fields(found: Layout, known: Mapping[str, Field], where: str) -> None:
    """Refuse a field that has another shape or dtype than in the trajectories before. Fields may come and go."""
    for field in found.fields:
        before = known.get(field.path)
        if before is not None and (before.shape, before.dtype) != (field.shape, field.dtype):
            raise SpecError(
                f"{where}/{field.path}: expected {before} as in the trajectories before, got {field}; "
                f"use another buffer for other fields"
            )


def build(layout: Layout, arrays: Mapping[str, Array], edges: Mapping[str, Array], values: Mapping[str, Any]) -> Any:
    """The trajectory as a nested dict: tensors and arrays [T, B, ...] as they were given, the other values beside."""
    flat: dict[str, Any] = {}
    by_path = layout.by_path
    for path in layout.order:
        field = by_path.get(path)
        if field is None:
            flat[path] = values[path]
        else:
            flat[path] = as_given(field, join_edges(arrays[path], edges.get(path), path))
    return trees.unflatten(flat)


def as_given(field: Field, array: Array, device: Any = None) -> Any:
    """The array as the library that the field was given in, or as a tensor on `device`."""
    if field.library == "torch" or device is not None:
        return to_tensor(array, field.dtype, device)
    return array


def top(path: str) -> str:
    return path.partition(trees.SEPARATOR)[0]


def _num_dimensions(value: Any) -> int:
    """Of a tensor or an array; 0 of anything else."""
    if not is_tensor(value) and not hasattr(value, "__array__"):
        return 0
    return len(value.shape) if hasattr(value, "shape") else np.ndim(value.numpy())


def _flat(trajectory: Any, where: str) -> dict[str, Any]:
    """All values by path. Fields of an object that are None are left out, as RLinf leaves them out of its files."""
    flat: dict[str, Any] = {}
    for name, value in (trajectory if isinstance(trajectory, Mapping) else vars(trajectory)).items():
        if value is not None:
            _flatten_into(flat, value, name, where)
    return flat


def _flatten_into(flat: dict[str, Any], value: Any, path: str, where: str) -> None:
    if not isinstance(value, Mapping) or not value:  # an empty dict is a value
        flat[path] = dict(value) if isinstance(value, Mapping) else value
        return
    for name, child in value.items():
        if not isinstance(name, str) or not name or trees.SEPARATOR in name:
            raise SpecError(f"{where}/{path}: field names are text without '/', got {name!r}; rename it")
        _flatten_into(flat, child, f"{path}/{name}", where)


# ---- rows between epochs


def _split_edges(array: Array, length: int, path: str) -> tuple[Array, Array | None]:
    """The rows that belong to steps, and those between: fields known between steps have one row more per epoch."""
    extra = len(array) - length
    if path not in BEFORE + AFTER or extra < 1 or length % extra:
        return array, None
    epochs = array.reshape(extra, length // extra + 1, *array.shape[1:])
    steps, edge = (epochs[:, 1:], epochs[:, 0]) if path in BEFORE else (epochs[:, :-1], epochs[:, -1])
    return steps.reshape(length, *array.shape[1:]), edge


def join_edges(steps: Array, edge: Array | None, path: str) -> Array:
    if edge is None:
        return steps
    epochs = steps.reshape(len(edge), -1, *steps.shape[1:])
    pieces = [edge[:, None], epochs] if path in BEFORE else [epochs, edge[:, None]]
    joined: Array = np.concatenate(pieces, axis=1)
    return joined.reshape(-1, *steps.shape[1:])


def edge_steps(num_edges: int, length: int, path: str) -> slice:
    """The steps beside which the rows between epochs are stored: the first of each epoch, or the last."""
    epoch = length // num_edges
    return slice(0 if path in BEFORE else epoch - 1, None, epoch)
