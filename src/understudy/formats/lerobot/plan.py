"""Plan: which column of a LeRobot dataset becomes which field of an Episode, and the reverse.

Foreign datasets are mapped by the names of their columns. On export, each field that LeRobot can store becomes a column
with LeRobot's usual name; the others go into the sidecar (`sidecar.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from understudy.core import ArraySpec, Spec, StepSpec, UnderstudyError, text
from understudy.core import tree as trees
from understudy.formats.format import Field, FormatError
from understudy.formats.lerobot.info import NUMBERS, Feature, Info

# LeRobot's column names for each role, the most common first
SPECIAL: Mapping[str, tuple[str, ...]] = {
    "reward": ("next.reward", "reward"),
    "episode_end": ("next.done", "done"),
    "terminated": ("next.terminated", "terminated"),
    "truncated": ("next.truncated", "truncated"),
    "success": ("next.success", "success", "is_success"),
    "intervention": ("intervention", "is_intervention", "complementary_info.is_intervention"),
}

LEAST_CAMERA = 8  # pixels per side; smaller arrays are not cameras


@dataclass(frozen=True, kw_only=True)
class Plan:
    spec: StepSpec
    columns: Mapping[str, Feature]  # field of the Episode: its column
    special: Mapping[str, Feature]  # by role, "reward", "success", ...: its column
    mapping: tuple[Field, ...]


def plan_reading(info: Info, *, several_tasks: bool) -> Plan:
    """Plan the reading of a foreign dataset. `several_tasks`: some episodes have more than one task."""
    features = dict(info.features)
    if several_tasks:
        features["task_index"] = Feature(key="task_index", dtype="int64", shape=(1,))
    special = {}
    for what, names in SPECIAL.items():
        found = next((features[name] for name in names if name in features and _is_flag(features[name], what)), None)
        if found is not None:
            special[what] = features.pop(found.key)
    action = [key for key in features if key == "action"] or [key for key in features if key.startswith("action.")]
    observation = [key for key in features if key == "observation" or key.startswith("observation.")]
    for name, keys in (("observation.*", observation), ("action", action)):
        if not keys:
            raise FormatError(f"{info.root}: meta/info.json has no feature {name}; rename yours")
    extras = [key for key in features if key not in (*action, *observation)]
    columns = {
        **_paths("observation", {key: key.removeprefix("observation").removeprefix(".images") for key in observation}),
        **_paths("action", {key: key.removeprefix("action") for key in action}),
        **_paths("extras", {key: f".{key}" for key in extras}),
    }
    found_at = {path: features[key] for path, key in columns.items()}
    reward = special.get("reward")
    numbers = ArraySpec(shape=(), dtype="float32")
    if reward is not None:
        dtype = "float32" if reward.dtype == "bool" else reward.dtype
        numbers = ArraySpec(shape=() if reward.shape == (1,) else reward.shape, dtype=dtype)
    try:
        leaves = {path: _leaf(feature) for path, feature in found_at.items()}
        spec = StepSpec(
            reward=numbers,
            **{name: Spec(trees.unflatten(trees.below(leaves, name))) for name in ("observation", "action", "extras")},
        )
    except UnderstudyError as error:
        raise FormatError(f"{info.root}: meta/info.json: {error}") from None
    return Plan(spec=spec, columns=found_at, special=special, mapping=_mapping(found_at, special))


def _is_flag(feature: Feature, what: str) -> bool:
    if feature.dtype not in NUMBERS:
        return False
    return feature.shape == (1,) or (what == "reward" and len(feature.shape) == 1)


def _paths(group: str, names: Mapping[str, str]) -> dict[str, str]:
    """The Episode path of each key; dots become levels, unless a name would be both a leaf and a branch."""
    for split in (True, False):
        paths: dict[str, str] = {}
        for key, name in names.items():
            parts = name.removeprefix(".").split(".") if split else [name.removeprefix(".")]
            paths["/".join([group, *parts]) if parts != [""] else group] = key
        whole = len(paths) == len(names) and all("" not in path.split("/") for path in paths)
        if whole and not any(other.startswith(f"{path}/") for path in paths for other in paths):
            return paths
    return {f"{group}/{key}": key for key in names}


def _leaf(feature: Feature) -> ArraySpec:
    if feature.dtype == "string":
        return text()
    return ArraySpec(shape=feature.shape, dtype="uint8" if feature.is_camera else feature.dtype)


def mapping_of(columns: Mapping[str, Feature], paths: Iterable[str]) -> tuple[Field, ...]:
    """The mapping of a dataset that Understudy wrote; `paths` are in the sidecar."""
    lines = [Field(external=feature.key, internal=path, how=_how(feature)) for path, feature in columns.items()]
    beside = [path for path in paths if path not in columns]
    lines += [Field(external="meta/understudy/rest.parquet", internal=path, how="as it is") for path in beside]
    return tuple(lines)


_HOW = {"video": "video, decoded", "image": "images, decoded"}


def _mapping(columns: Mapping[str, Feature], special: Mapping[str, Feature]) -> tuple[Field, ...]:
    lines = [Field(external=feature.key, internal=path, how=_how(feature)) for path, feature in columns.items()]

    def line(what: str, internal: str, how: str, otherwise: str) -> None:
        found = special.get(what)
        lines.append(Field(external=found.key if found else "", internal=internal, how=how if found else otherwise))

    line("reward", "reward", "as it is", "0 where there is none")
    ends = "terminated" if "terminated" in special else "episode_end" if "episode_end" in special else "success"
    line(ends, "terminated", "as the last frame has it", "never: no column says that the task ended")
    line("truncated", "truncated", "of the last frame", "where the episode ends without termination")
    line("success", "info/success", "as the last frame has it", "unknown")
    line("intervention", "source", "human where it is true, else policy", "human: a demonstration")
    lines.append(Field(external="task_index", internal="info/instruction", how="the text of the first frame's task"))
    lines.append(Field(external="timestamp", internal="", how="left out: it counts frames"))
    facts = "fps, robot_type and the features' names"
    lines.append(Field(external=facts, internal="info/labels", how="the labels fps, robot_type and names"))
    return tuple(lines)


def _how(feature: Feature) -> str:
    return _HOW.get(feature.dtype, "as it is")


# --- writing -----------------------------------------------------------------------------------------------------


def plan_writing(spec: StepSpec, camera: str) -> dict[str, Feature]:
    """The LeRobot columns by field of the Episode; `camera` is "video" or "image"."""
    columns: dict[str, Feature] = {}
    taken = {name for names in SPECIAL.values() for name in names}
    for path, leaf in (
        *spec.observation.leaves("observation"),
        *spec.action.leaves("action"),
        *spec.extras.leaves("extras"),
        ("reward", spec.reward),
    ):
        shape = _feature_shape(leaf)
        if shape is None:
            continue
        dtype = "string" if leaf.dtype == "str" else leaf.dtype
        if is_camera(path, leaf):
            dtype = camera
        key = "next.reward" if path == "reward" else _free(_key(path, dtype == camera), taken)
        taken.add(key)
        columns[path] = Feature(key=key, dtype=dtype, shape=shape)
    return columns


def is_camera(path: str, leaf: ArraySpec) -> bool:
    if not path.startswith("observation") or leaf.dtype != "uint8" or leaf.ragged or len(leaf.shape) != 3:
        return False
    height, width, channels = leaf.fixed_shape
    return channels == 3 and min(height, width) >= LEAST_CAMERA


def _feature_shape(leaf: ArraySpec) -> tuple[int, ...] | None:
    """The shape of the column; None if LeRobot cannot store it."""
    if leaf.dtype == "str":
        return (1,)
    if leaf.ragged or leaf.dtype in _NO_TENSOR or 0 in leaf.shape or len(leaf.shape) > 5:
        return None
    return leaf.fixed_shape or (1,)


_NO_TENSOR = ("uint64",)  # torch has no such tensor


def _key(path: str, camera: bool) -> str:
    group, _, rest = path.partition("/")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", rest.replace("/", "."))
    if not camera:
        name = name.replace("image", "img")  # LeRobot treats any name with "image" as a camera
    if group == "observation":
        if camera:
            return f"observation.images.{name}" if name else "observation.image"
        return f"observation.{name or 'state'}"
    if group == "action":
        return f"action.{name}" if name else "action"
    return f"complementary_info.{name or 'value'}"


def _free(key: str, taken: Iterable[str]) -> str:
    while key in taken:
        key += "_"
    return key
