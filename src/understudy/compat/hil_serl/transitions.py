"""Transitions: the dicts that HIL-SERL inserts, as steps of a store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from understudy.compat.arrays import conform, number, to_numpy
from understudy.core import Source, Spec, SpecError, Step, StepSpec
from understudy.core.spec import describe
from understudy.core.tree import AnyTree

logger = logging.getLogger(__name__)

FIELDS = ("observations", "actions", "next_observations", "rewards", "masks", "dones")


def step_of(
    spec: StepSpec, transition: Mapping[str, Any], *, human: bool = False, **how: Any
) -> tuple[Step, AnyTree, bool | None]:
    """A transition as a step, its next observation, and the success of the episode if given; `how` goes to Step."""
    included: AnyTree = spec.extras.tree
    for name in FIELDS + tuple(included):
        if name not in transition:
            raise SpecError(f"{name}: expected in every transition, got {describe(transition)}; add it")
    for name in transition:
        if name not in FIELDS and name not in included and name != "infos":
            option = _INCLUDED.get(name)
            _log_unknown(name, f"pass {option}=True to the buffer to keep it" if option else "no buffer keeps it")
    terminated, truncated = _ends(transition["masks"], transition["dones"])
    infos = transition.get("infos") or {}
    succeed = infos.get("succeed")
    step = Step(
        observation=_observation(spec.observation, transition["observations"], "observations"),
        action=conform(spec.action, transition["actions"], "actions"),
        reward=number(transition["rewards"], "rewards"),
        terminated=terminated,
        truncated=truncated,
        source=Source.HUMAN if human or "intervene_action" in infos else Source.POLICY,
        extras={name: _extra(spec, name, transition[name]) for name in included},
        **how,
    )
    next_observation = _observation(spec.observation, transition["next_observations"], "next_observations")
    return step, next_observation, None if succeed is None else bool(to_numpy(succeed, "infos/succeed"))


def _extra(spec: StepSpec, name: str, value: Any) -> AnyTree:
    if name == "next_actions":
        return conform(spec.action, value, name)
    found = number(value, name)
    return {"labels": int, "next_intvn": bool}.get(name, float)(found)


def _observation(spec: Spec, value: AnyTree, path: str) -> AnyTree:
    """The fields of the observation space; others, as a classifier's picture, are left out as they are there."""
    if isinstance(value, Mapping) and isinstance(spec.tree, Mapping):
        value = _without_unknown(spec.tree, value, path)
    return conform(spec, value, path)


def _without_unknown(wanted: Mapping[str, Any], value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    unknown = [name for name in value if name not in wanted]
    for name in unknown:
        _log_unknown(f"{path}/{name}", "it is not in the observation space")
    known = {name: child for name, child in value.items() if name in wanted} if unknown else value
    for name, child in wanted.items():
        inner = known.get(name)
        if isinstance(child, Mapping) and isinstance(inner, Mapping):
            kept = _without_unknown(child, inner, f"{path}/{name}")
            if kept is not inner:
                known = {**known, name: kept}
    return known


_INCLUDED = {
    "grasp_penalty": "include_grasp_penalty",
    "labels": "include_label",
    "next_actions": "include_next_actions",
    "next_intvn": "include_next_actions",
}
_logged: set[str] = set()  # names of fields, so that the log of a robot's loop stays readable


def _log_unknown(name: str, advice: str) -> None:
    if name not in _logged:
        _logged.add(name)
        logger.warning("%s: left out of every transition; %s", name, advice)


def _ends(masks: Any, dones: Any) -> tuple[bool, bool]:
    """`terminated` and `truncated` of a step, from HIL-SERL's `masks` and `dones`."""
    mask, ended = number(masks, "masks"), bool(number(dones, "dones"))
    if mask not in (0.0, 1.0):
        raise SpecError(f"masks: expected 0 or 1, got {mask}; pass 1 - terminated")
    if mask == 0 and not ended:
        raise SpecError("masks: expected 1 where dones is False, got 0; set dones where the task terminates")
    return mask == 0, ended and mask != 0
