"""Serialization: rollouts as plain JSON and arrays, to save or send to another process, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from understudy.core import Episode, EpisodeInfo
from understudy.core import tree as trees
from understudy.training.collection.groups import Group, group_rollouts
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Plan, Ticket

Facts: TypeAlias = dict[str, Any]  # plain JSON
Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]


def save_collection(
    plan: Mapping[str, Any], carried: Sequence[Group], collected: Sequence[Rollout] = ()
) -> tuple[Facts, Arrays]:
    """The state of collection: that of the plan before an iteration, the groups that were carried over to it, and the
    rollouts that it has collected so far."""
    facts, arrays = serialize_rollouts([rollout for group in carried for rollout in group.rollouts])
    more, more_arrays = serialize_rollouts(collected)
    named = {f"carried/{path}": array for path, array in arrays.items()}
    named |= {f"collected/{path}": array for path, array in more_arrays.items()}
    return {"plan": plan, "carried": facts, "collected": more}, named


def restore_collection(
    plan: Plan, facts: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[tuple[Group, ...], list[Rollout]]:
    """Restore the plan; returns the groups that were carried over, and what the next iteration has collected."""
    rollouts = deserialize_rollouts(facts["carried"], trees.below(arrays, "carried"))
    collected = deserialize_rollouts(facts.get("collected", {"rollouts": []}), trees.below(arrays, "collected"))
    plan.restore(facts["plan"])
    return tuple(group_rollouts(rollouts, plan.config.n_samples)), collected


def serialize_rollouts(rollouts: Sequence[Rollout]) -> tuple[Facts, Arrays]:
    """Rollouts as JSON and arrays. Ragged fields are concatenated; their lengths and all texts are in the JSON."""
    entries: list[Facts] = []
    arrays: Arrays = {}
    for index, rollout in enumerate(rollouts):
        one: Facts = {"ticket": asdict(rollout.ticket), "failure": rollout.failure, "attempts": rollout.attempts}
        if rollout.episode is not None:
            one |= {"info": asdict(rollout.episode.info), "texts": {}, "lengths": {}}
            for path, column in rollout.episode.columns().items():
                if isinstance(column, np.ndarray):
                    arrays[f"{index}/{path}"] = column
                elif isinstance(column[0], str):
                    one["texts"][path] = list(column)
                else:
                    one["lengths"][path] = [len(row) for row in column]
                    arrays[f"{index}/{path}"] = np.concatenate(column)
        entries.append(one)
    return {"rollouts": entries}, arrays


def deserialize_rollouts(facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[Rollout]:
    """The rollouts that `serialize_rollouts` was given."""
    return [_rollout(one, trees.below(arrays, str(index))) for index, one in enumerate(facts["rollouts"])]


def _rollout(one: Mapping[str, Any], arrays: Mapping[str, Any]) -> Rollout:
    episode = None
    if "info" in one:
        columns: dict[str, Any] = {**arrays, **one["texts"]}
        for path, lengths in one["lengths"].items():
            columns[path] = np.split(columns[path], np.cumsum(lengths)[:-1])
        episode = _episode(columns, EpisodeInfo(**one["info"]))
    return Rollout(ticket=Ticket(**one["ticket"]), episode=episode, failure=one["failure"], attempts=one["attempts"])


def _episode(columns: Mapping[str, Any], info: EpisodeInfo) -> Episode:
    names = ("observation", "action", "proposal", "extras")
    parts: dict[str, Any] = {name: trees.unflatten(trees.below(columns, name)) for name in names}
    rest = {name: column for name, column in columns.items() if name.partition(trees.SEPARATOR)[0] not in names}
    return Episode(**parts, **rest, info=info)
