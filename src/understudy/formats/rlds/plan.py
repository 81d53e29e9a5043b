"""Plan: which of a data set's fields becomes which of ours, and how that is said to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from understudy.core import ArraySpec, Source, Spec, StepSpec
from understudy.core import tree as trees
from understudy.formats.format import Field, FormatError
from understudy.formats.rlds.dataset import SPEC_FILE
from understudy.formats.rlds.features import Leaf
from understudy.formats.rlds.rows import RowReader

UNDERSTUDY = (
    "understudy"  # steps/understudy/...: what RLDS has no field for; episode_metadata/understudy: the attributes
)
METADATA = f"episode_metadata/{UNDERSTUDY}"
EXTRAS = "extras"
FLAGS = ("is_first", "is_last", "is_terminal")
HUMAN = ("is_human", "is_intervention")
INSTRUCTION = ("language_instruction", "natural_language_instruction")
SUCCESS, ACTOR = ("success", "episode_metadata/success"), ("agent_id", "episode_metadata/agent_id")
OWN_COLUMNS = {"source": "uint8", "policy_version": "int64", "has_proposal": "bool", "truncated": "bool"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How rows become steps. Data that we wrote carries all of a step; other data leaves some of it open."""

    spec: StepSpec
    places: Mapping[str, str]  # by our path, theirs below "steps"
    ours: bool


def make_plan(reader: RowReader) -> Plan:
    steps, where = reader.steps, str(reader.dataset.path)
    ours = METADATA in reader.metadata and all(f"{UNDERSTUDY}/{name}" in steps for name in OWN_COLUMNS)
    places = _places(steps, ours)
    for name in ("observation", "action"):
        if not any(path.partition("/")[0] == name for path in places):
            raise FormatError(
                f"{where}: its steps have no {name} that can be read; they have {', '.join(sorted(steps))}"
            )
    for name in (*FLAGS, *(f"{UNDERSTUDY}/{name}" for name in OWN_COLUMNS)) if ours else (*FLAGS, *HUMAN):
        dtype = OWN_COLUMNS.get(name.partition("/")[2], "bool")
        if name in steps and steps[name].array_spec != ArraySpec(shape=(), dtype=dtype):
            raise FormatError(f"{where}: steps/{name} is {steps[name].array_spec}, and {dtype} [] is wanted")
    leaves = {path: steps[theirs].array_spec for path, theirs in places.items()}
    part = partial(_part, leaves)
    try:
        spec = StepSpec(
            observation=part("observation"),
            action=part("action"),
            extras=part(EXTRAS),
            reward=leaves.get("reward", ArraySpec(shape=(), dtype="float32")),
        )
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from None
    if ours and part("proposal") != spec.action:
        raise FormatError(f"{where}: steps/{UNDERSTUDY}/proposal is not like steps/action; write the data again")
    if ours and reader.dataset.spec is not None:
        spec = _bounded(spec, reader.dataset.spec, where)
    return Plan(spec=spec, places=places, ours=ours)


def _places(steps: Mapping[str, Leaf], ours: bool) -> dict[str, str]:
    places: dict[str, str] = {}
    for path in steps:
        top = path.partition("/")[0]
        if top in ("observation", "action") or path == "reward" or (ours and top == EXTRAS):
            places[path] = path
        elif ours and path.startswith(f"{UNDERSTUDY}/proposal"):
            places[path.removeprefix(f"{UNDERSTUDY}/")] = path
        elif not ours and path not in (*FLAGS, *HUMAN):
            places[f"{EXTRAS}/{path}"] = path
    return places


def _part(leaves: Mapping[str, ArraySpec], name: str) -> Spec:
    found = trees.below(leaves, name)
    return Spec(trees.unflatten(found) if found else {})


def _bounded(found: StepSpec, said: StepSpec, where: str) -> StepSpec:
    """The spec that was written with the data, if it says the same and more."""
    if said.columns.keys() != found.columns.keys():
        raise FormatError(f"{where}/{SPEC_FILE}: has other fields than features.json; remove it")
    for path, leaf in found.columns.items():
        other = said.columns[path]
        if (other.shape, other.dtype) != (leaf.shape, leaf.dtype):
            raise FormatError(f"{where}/{SPEC_FILE}: {path} is {other}, and {leaf} in features.json; remove it")
    return said


def mapping(plan: Plan, reader: RowReader, who: Source, last_reward: float) -> Iterator[Field]:
    """What becomes of each field. `last_reward` is that of the first episode's last row, where it is left out."""
    steps = reader.steps
    for ours, theirs in plan.places.items():
        note = ", also the instruction" if theirs in INSTRUCTION and not plan.ours else ""
        if ours == "reward" and last_reward:
            note = f"; the last row's is left out, and the first episode's is {last_reward:g}: see the option `last`"
        yield Field(theirs=f"steps/{theirs}", ours=ours, how=_how(steps[theirs]) + note)
    if "reward" not in plan.places:
        yield Field(theirs="", ours="reward", how="0.0: there is none")
    for flag, ours, how in (
        ("is_terminal", "terminated", "of the last row"),
        ("is_last", "truncated", "where it is not terminal"),
    ):
        yield Field(theirs=f"steps/{flag}" if flag in steps else "", ours=ours, how=how)
    human = [name for name in HUMAN if name in steps]
    if plan.ours:
        for name in OWN_COLUMNS:
            yield Field(theirs=f"steps/{UNDERSTUDY}/{name}", ours=name, how="as it is")
    else:
        how = f"human where it is, else {who.name.lower()}" if human else f"{who.name.lower()}: nobody is named"
        yield Field(theirs=f"steps/{human[0]}" if human else "", ours="source", how=how)
    for path in reader.metadata:
        yield Field(
            theirs=path, ours=_attribute(path, plan.ours), how="" if _attribute(path, plan.ours) else "not needed"
        )
    for path, why in reader.unread.items():
        yield Field(theirs=path, ours="", how=f"left out: {why}")


def _attribute(path: str, ours: bool) -> str:
    if ours:
        return "all attributes" if path == METADATA else ""
    return "success" if path in SUCCESS else "actor" if path in ACTOR else f"labels/{path}"


def _how(leaf: Leaf) -> str:
    if leaf.kind == "image":
        return f"{leaf.encoding.upper() or 'image'}, decoded"
    return "unpacked" if leaf.encoding in ("bytes", "zlib") else "as it is"
