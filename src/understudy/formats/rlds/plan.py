"""Plan: which field of an RLDS dataset becomes which field of an Episode, and the mapping that the user sees."""

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

# steps/understudy/... has the fields that RLDS does not have, episode_metadata/understudy the attributes.
UNDERSTUDY = "understudy"
METADATA = f"episode_metadata/{UNDERSTUDY}"
EXTRAS = "extras"
FLAGS = ("is_first", "is_last", "is_terminal")
HUMAN = ("is_human", "is_intervention")
INSTRUCTION = ("language_instruction", "natural_language_instruction")
SUCCESS, ACTOR = ("success", "episode_metadata/success"), ("agent_id", "episode_metadata/agent_id")
UNDERSTUDY_COLUMNS = {"source": "uint8", "policy_version": "int64", "has_proposal": "bool", "truncated": "bool"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How rows become steps. Only datasets that Understudy wrote have all fields of a step."""

    spec: StepSpec
    fields: Mapping[str, str]  # field of the Episode: field below "steps"
    from_understudy: bool


def make_plan(reader: RowReader) -> Plan:
    steps, where = reader.steps, str(reader.dataset.path)
    from_understudy = METADATA in reader.metadata and all(
        f"{UNDERSTUDY}/{name}" in steps for name in UNDERSTUDY_COLUMNS
    )
    fields = _find_fields(steps, from_understudy=from_understudy)
    for name in ("observation", "action"):
        if not any(path.partition("/")[0] == name for path in fields):
            raise FormatError(
                f"{where}: its steps have no {name} that can be read; they have {', '.join(sorted(steps))}"
            )
    for name in (
        (*FLAGS, *(f"{UNDERSTUDY}/{name}" for name in UNDERSTUDY_COLUMNS)) if from_understudy else (*FLAGS, *HUMAN)
    ):
        dtype = UNDERSTUDY_COLUMNS.get(name.partition("/")[2], "bool")
        if name in steps and steps[name].array_spec != ArraySpec(shape=(), dtype=dtype):
            raise FormatError(f"{where}: steps/{name} is {steps[name].array_spec}, and {dtype} [] is wanted")
    leaves = {path: steps[external].array_spec for path, external in fields.items()}
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
    if from_understudy and part("proposal") != spec.action:
        raise FormatError(f"{where}: steps/{UNDERSTUDY}/proposal is not like steps/action; write the data again")
    if from_understudy and reader.dataset.spec is not None:
        spec = _bounded(spec, reader.dataset.spec, where)
    return Plan(spec=spec, fields=fields, from_understudy=from_understudy)


def _find_fields(steps: Mapping[str, Leaf], *, from_understudy: bool) -> dict[str, str]:
    fields: dict[str, str] = {}
    for path in steps:
        top = path.partition("/")[0]
        if top in ("observation", "action") or path == "reward" or (from_understudy and top == EXTRAS):
            fields[path] = path
        elif from_understudy and path.startswith(f"{UNDERSTUDY}/proposal"):
            fields[path.removeprefix(f"{UNDERSTUDY}/")] = path
        elif not from_understudy and path not in (*FLAGS, *HUMAN):
            fields[f"{EXTRAS}/{path}"] = path
    return fields


def _part(leaves: Mapping[str, ArraySpec], name: str) -> Spec:
    found = trees.below(leaves, name)
    return Spec(trees.unflatten(found) if found else {})


def _bounded(found: StepSpec, declared: StepSpec, where: str) -> StepSpec:
    """The declared spec, which adds bounds; refuses it if its fields differ from the dataset's."""
    if declared.columns.keys() != found.columns.keys():
        raise FormatError(f"{where}/{SPEC_FILE}: has other fields than features.json; remove it")
    for path, leaf in found.columns.items():
        other = declared.columns[path]
        if (other.shape, other.dtype) != (leaf.shape, leaf.dtype):
            raise FormatError(f"{where}/{SPEC_FILE}: {path} is {other}, and {leaf} in features.json; remove it")
    return declared


def mapping(plan: Plan, reader: RowReader, default_source: Source, last_reward: float) -> Iterator[Field]:
    """The mapping of each field. `last_reward` is that of the first episode's last row, if it is left out."""
    steps = reader.steps
    for internal, external in plan.fields.items():
        note = ", also the instruction" if external in INSTRUCTION and not plan.from_understudy else ""
        if internal == "reward" and last_reward:
            note = f"; the last row's is left out, and the first episode's is {last_reward:g}: see the option `last`"
        yield Field(external=f"steps/{external}", internal=internal, how=_how(steps[external]) + note)
    if "reward" not in plan.fields:
        yield Field(external="", internal="reward", how="0.0: there is none")
    for flag, internal, how in (
        ("is_terminal", "terminated", "of the last row"),
        ("is_last", "truncated", "where it is not terminal"),
    ):
        yield Field(external=f"steps/{flag}" if flag in steps else "", internal=internal, how=how)
    human = [name for name in HUMAN if name in steps]
    if plan.from_understudy:
        for name in UNDERSTUDY_COLUMNS:
            yield Field(external=f"steps/{UNDERSTUDY}/{name}", internal=name, how="as it is")
    else:
        how = (
            f"human where it is, else {default_source.name.lower()}"
            if human
            else f"{default_source.name.lower()}: no field says it"
        )
        yield Field(external=f"steps/{human[0]}" if human else "", internal="source", how=how)
    for path in reader.metadata:
        yield Field(
            external=path,
            internal=_attribute(path, plan.from_understudy),
            how="" if _attribute(path, plan.from_understudy) else "not needed",
        )
    for path, why in reader.unread.items():
        yield Field(external=path, internal="", how=f"left out: {why}")


def _attribute(path: str, from_understudy: bool) -> str:
    if from_understudy:
        return "all attributes" if path == METADATA else ""
    return "success" if path in SUCCESS else "actor" if path in ACTOR else f"labels/{path}"


def _how(leaf: Leaf) -> str:
    if leaf.kind == "image":
        return f"{leaf.encoding.upper() or 'image'}, decoded"
    return "unpacked" if leaf.encoding in ("bytes", "zlib") else "as it is"
