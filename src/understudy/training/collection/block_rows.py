"""Block rows: a block of actions as one stored row; the rows of many episodes as a batch or in a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core import (
    AnyTree,
    ArraySpec,
    BlockBatch,
    Episode,
    EpisodeError,
    Source,
    Spec,
    SpecError,
    Step,
    StepSpec,
)
from understudy.core import tree as trees
from understudy.core.episode import stack
from understudy.core.spec import describe
from understudy.envs.workers.outcomes import Stepped
from understudy.policies.protocol import Acted, BlockPolicy, PolicyError
from understudy.replay.write.writer import Writer
from understudy.training.collection.rollout import Rollout

Array = np.ndarray[Any, Any]


def block_spec(step_spec: StepSpec, policy: BlockPolicy) -> StepSpec:
    """The rows of a policy that decides on H actions at once.

    A row has one observation, H actions, H rewards, how the actions were chosen and which of them were executed. It has
    `value` and `next_value` if the policy has a value head.
    """
    steps = policy.block_steps
    for path, leaf in step_spec.action.leaves("action"):
        if leaf.ragged:
            raise SpecError(f"{path}: expected a fixed shape, got {leaf}; a block needs actions of one size")
    if step_spec.reward.shape:
        raise SpecError(f"reward: expected float32 [], got {step_spec.reward}; a block needs one reward for each step")
    number = ArraySpec(shape=(), dtype="float32")
    extras = {
        "replay": policy.replay_spec.tree,
        "log_prob": ArraySpec(shape=(steps, policy.log_prob_size), dtype="float32"),
        "executed": ArraySpec(shape=(steps,), dtype="bool"),
    }
    return StepSpec(
        observation=step_spec.observation,
        action=Spec(trees.map_leaves(lambda leaf: _times(leaf, steps), step_spec.action.tree)),
        extras=Spec({**extras, "value": number, "next_value": number} if policy.has_value else extras),
        reward=ArraySpec(shape=(steps,), dtype="float32"),
    )


def _times(leaf: ArraySpec, steps: int) -> ArraySpec:
    return ArraySpec(shape=(steps, *leaf.shape), dtype=leaf.dtype, low=leaf.low, high=leaf.high)


# --- decisions of a policy ---


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """A block of actions that a policy decided on, checked."""

    action: AnyTree  # [H, ...]
    clipped: Array  # [H] bool: which actions were outside of their bounds
    replay: AnyTree
    log_prob: Array  # [H, D] float32
    value: Array | None  # [] float32
    version: int

    def first(self, num_steps: int) -> list[AnyTree]:
        """The first actions, one by one."""
        return [_row(self.action, at) for at in range(num_steps)]


def decisions(acted: Acted, num_rows: int, spec: StepSpec, *, clip: bool) -> list[Decision]:
    """The rows of a policy's answer, checked; raises PolicyError. With `clip`, actions are clipped to their bounds."""
    has_value = "value" in spec.extras.flat
    if has_value != (acted.value is not None):
        wanted, got = ("a value for each row", "None") if has_value else ("None", describe(acted.value))
        raise PolicyError(f"policy/value: expected {wanted}, got {got}; has_value says whether it has a value head")
    parts: dict[str, AnyTree] = {"action": acted.action, "replay": acted.replay, "log_prob": acted.log_prob}
    if has_value:
        parts["value"] = acted.value
    for path, leaf in trees.leaves(parts, "policy"):
        if np.shape(leaf)[:1] != (num_rows,):
            raise PolicyError(f"{path}: expected {num_rows} rows, one for each observation, got {describe(leaf)}")
    return [_decision(_row(parts, at), acted.version, spec, clip=clip) for at in range(num_rows)]


def _row(tree: AnyTree, at: int) -> AnyTree:
    return trees.map_leaves(lambda leaf: np.array(leaf[at]), tree)  # a copy: policies may reuse their memory


def _decision(row: dict[str, AnyTree], version: int, spec: StepSpec, *, clip: bool) -> Decision:
    clipped = np.zeros(spec.reward.fixed_shape, bool)
    if clip:
        row["action"], clipped = _clipped(row["action"], spec.action)
    try:
        action = _checked(spec.action, row["action"], "action")
        extras: AnyTree = spec.extras.tree
        replay = _checked(Spec(extras["replay"]), row["replay"], "replay")
        log_prob = extras["log_prob"].check(row["log_prob"], "log_prob")
        value = extras["value"].check(row["value"], "value") if "value" in row else None
    except SpecError as error:
        raise PolicyError(f"policy/{error}") from None
    numbers = {**trees.flatten(action, "action"), "log_prob": log_prob}
    for path, leaf in (numbers if value is None else {**numbers, "value": value}).items():
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise PolicyError(
                f"policy/{path}: expected finite numbers, got {leaf[~np.isfinite(leaf)][0]}; fix the policy"
            )
    return Decision(action=action, clipped=clipped, replay=replay, log_prob=log_prob, value=value, version=version)


def _checked(spec: Spec, value: AnyTree, path: str) -> AnyTree:
    return trees.unflatten(trees.below(spec.check(value, path), path)) if spec.flat else {}


def _clipped(action: AnyTree, spec: Spec) -> tuple[AnyTree, Array]:
    """The action clipped to its bounds, and which steps were outside. Values that are not arrays are refused later."""
    steps = next(iter(spec.flat.values())).fixed_shape[0]
    outside = np.zeros(steps, bool)
    found = trees.flatten(action)
    for path, leaf in spec.flat.items():
        given = found.get(path)
        if leaf.bounded and isinstance(given, np.ndarray) and given.shape == leaf.shape:
            found[path] = np.clip(given, *leaf.limits).astype(given.dtype, copy=False)
            outside |= ((given < leaf.limits[0]) | (given > leaf.limits[1])).reshape(steps, -1).any(axis=1)
    return trees.unflatten(found), outside


def block_step(observation: AnyTree, decision: Decision, stepped: Stepped, *, cut: bool) -> Step:
    """The row of a block and its outcome; `cut` ends the episode here although the world did not."""
    steps, num_steps = len(decision.log_prob), len(stepped)
    reward = np.zeros(steps, np.float32)
    reward[:num_steps] = stepped.reward
    extras: dict[str, AnyTree] = {
        "replay": decision.replay,
        "log_prob": decision.log_prob,
        "executed": np.arange(steps) < num_steps,
    }
    if decision.value is not None:
        extras |= {"value": decision.value, "next_value": np.zeros((), np.float32)}
    terminated = bool(stepped.terminated[-1])
    return Step(
        observation=observation,
        action=decision.action,
        reward=reward,  # type: ignore[arg-type]  # H of them
        terminated=terminated,
        truncated=bool(stepped.truncated[-1]) or (cut and not terminated),
        source=Source.POLICY,
        policy_version=decision.version,
        extras=extras,
    )


def stacked(observations: Sequence[AnyTree], spec: Spec) -> AnyTree:
    """Observations as a batch [B, ...]; a ragged field is a list."""
    flat = [trees.flatten(observation) for observation in observations]
    return trees.unflatten({path: stack([one[path] for one in flat], leaf) for path, leaf in spec.flat.items()})


# --- whole episodes ---


def write_rollouts(rollouts: Iterable[Rollout], writer: Writer) -> int:
    """Store all episodes in order and return how many; failed tickets have no episode."""
    num_episodes = 0
    for rollout in rollouts:
        if rollout.episode is None:
            continue
        writer.begin(rollout.episode.info, actor=writer.name)
        for step in rollout.episode.steps():
            writer.append(step)
        writer.end(rollout.episode.last_observation)
        num_episodes += 1
    return num_episodes


def to_batch(rollouts: Sequence[Rollout]) -> BlockBatch:
    """All rows of all episodes, in order. A failed ticket is an episode without rows and without success."""
    pairs = [(index, rollout.episode) for index, rollout in enumerate(rollouts) if rollout.episode is not None]
    if not pairs:
        raise EpisodeError(f"rollouts: expected at least one with an episode, got {len(rollouts)} without; see failure")
    episodes = [episode for _, episode in pairs]

    def extra(name: str) -> Array | None:
        return None if name not in episodes[0].extras else np.concatenate([one.extras[name] for one in episodes])

    def part(name: str) -> AnyTree:
        extras: list[AnyTree] = [one.extras for one in episodes]
        return _concatenated([one.get(name, {}) for one in extras])

    return BlockBatch(
        observation=_concatenated([_without_last(episode) for episode in episodes]),
        instruction=tuple(episode.info.instruction or "" for episode in episodes for _ in range(len(episode))),
        replay=part("replay"),
        log_prob=part("log_prob"),
        executed=part("executed"),
        reward=_concatenated([episode.reward for episode in episodes]),
        value=extra("value"),
        next_value=extra("next_value"),
        policy_version=_concatenated([episode.policy_version for episode in episodes]),
        episode=np.concatenate([np.full(len(episode), index, np.int64) for index, episode in pairs]),
        group=np.array([rollout.ticket.group for rollout in rollouts], np.int64),
        success=np.array([rollout.success for rollout in rollouts], bool),
        terminated=np.array([r.episode is not None and not r.truncated for r in rollouts], bool),
    )


def _without_last(episode: Episode) -> AnyTree:
    return trees.map_leaves(lambda column: column[: len(episode)], episode.observation)


def _concatenated(parts: Sequence[AnyTree]) -> AnyTree:
    """The columns of several episodes, concatenated."""
    flat = [trees.flatten(part) for part in parts]

    def join(path: str) -> Any:
        columns = [one[path] for one in flat]
        return (
            [row for column in columns for row in column] if isinstance(columns[0], list) else np.concatenate(columns)
        )

    return trees.unflatten({path: join(path) for path in flat[0]})
