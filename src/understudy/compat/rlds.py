"""The three functions of TF-Agents that read RLDS data, without TensorFlow, and write it to a store.

    data = read_rlds("kitchen/1.0.0")                        # or a tf.data.Dataset, or any iterable of episodes
    create_trajectory_data_spec(data)                        # a Trajectory of ArraySpecs
    for trajectory in convert_rlds_to_trajectories(data): ...
    push_rlds_to_replay(data, store)                         # a Store, a Remote, or a writer of either
    push_rlds_to_reverb(data, observer)                      # an observer of TF-Agents

An episode is a dict whose "steps" are columns [N, ...] or a sequence of step dicts. Deliberate differences from
TF-Agents: nested observations are split step by step; the discount into a terminal state is 0 (discount="original" has
theirs: 0 at the terminal step itself); a first step that is not the last must not be followed by another first;
policy_info is checked; an episode is pushed whole or not at all; the returned number counts pairs, each of which can be
sampled; float64 discounts are accepted.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from understudy.compat.arrays import tree_to_numpy
from understudy.compat.rlds_steps import open_episodes
from understudy.core import ArraySpec, EpisodeError, EpisodeInfo, Spec, SpecError, Step, StepSpec
from understudy.core import tree as trees
from understudy.core.tree import AnyTree
from understudy.replay import Store, Writer

if TYPE_CHECKING:
    from understudy.service import Remote

FIRST, MID, LAST = np.int32(0), np.int32(1), np.int32(2)
_WRITER = "rlds"

PolicyInfoFn = Callable[[dict[str, Any], dict[str, Any]], AnyTree]
Discount = Literal["transition", "original"]  # 0 on the way into a terminal state, or at the terminal step itself


class Trajectory(NamedTuple):
    """A step and its successor's type, with the fields and the order of TF-Agents; as a spec, it holds ArraySpecs."""

    step_type: Any
    observation: AnyTree
    action: AnyTree
    policy_info: AnyTree
    next_step_type: Any
    reward: Any
    discount: Any


def create_trajectory_data_spec(rlds_data: Iterable[Mapping[str, Any]]) -> Trajectory:
    """The spec of each trajectory; reads the first episode unless the data has a spec."""
    spec, _ = open_episodes(rlds_data)
    return _trajectory_spec(spec, ())


def convert_rlds_to_trajectories(
    rlds_data: Iterable[Mapping[str, Any]],
    policy_info_fn: PolicyInfoFn | None = None,
    *,
    discount: Discount = "transition",
) -> Trajectories:
    """A trajectory for each step, from overlapping pairs of adjacent steps; a zero first step is added at the end.

    `policy_info_fn(step, next_step)` returns the policy_info of each. They can be iterated as often as the data can.
    """
    return Trajectories(rlds_data, policy_info_fn, _check_discount(discount))


class Trajectories(Iterable[Trajectory]):
    """Trajectories that are made from RLDS data as they are iterated, from the beginning each time."""

    def __init__(self, rlds_data: Iterable[Mapping[str, Any]], policy_info_fn: PolicyInfoFn | None, discount: Discount):
        self._data = rlds_data
        self._policy_info_fn = policy_info_fn
        self._discount = discount
        self._opened: tuple[Spec, Iterator[dict[str, Any]]] | None = open_episodes(rlds_data)  # refuses wrong data now
        self._own: Iterator[Trajectory] | None = None  # of `next`

    def __iter__(self) -> Iterator[Trajectory]:
        if self._opened is None and iter(self._data) is self._data:
            raise EpisodeError(
                "rlds_data: it is an iterator, and was read already; pass a list or a data set to iterate twice"
            )
        spec, episodes = self._opened or open_episodes(self._data)
        self._opened = None
        return _trajectories(spec, episodes, self._policy_info_fn, discount=self._discount)

    def __next__(self) -> Trajectory:
        if self._own is None:
            self._own = iter(self)
        return next(self._own)


def push_rlds_to_replay(
    rlds_data: Iterable[Mapping[str, Any]],
    replay: Store | Remote | Writer,
    policy_info_fn: PolicyInfoFn | None = None,
    *,
    discount: Discount = "transition",
) -> int:
    """Write the episodes to a local or remote store; returns how many pairs of steps were written.

    Each episode is checked before it is written, and a Store gets it in one commit. A Writer must have the spec of the
    data (`replay_spec`). The discount and the policy_info of each step are in `extras`.
    """
    spec, episodes = open_episodes(rlds_data)
    push = _EpisodeWriter(replay)
    pairs = 0
    try:
        for number, columns in _begun_rightly(episodes):
            where = f"episode {number}"
            made = _trajectories(spec, [columns], policy_info_fn, first=number, discount=_check_discount(discount))
            trajectories = list(made)
            length = len(trajectories) - 1  # the last is the last observation
            if length:
                push.episode(_step_spec(spec, trajectories[0].policy_info), columns, trajectories, where)
            pairs += length
    finally:
        push.close()  # also if an episode was refused: a remote writer has threads
    return pairs


def _begun_rightly(episodes: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The episodes with their numbers; refuses one that does not begin with a first step after another's last."""
    last = -1  # the last step of the episode before
    for number, columns in enumerate(episodes):
        if number and not columns["is_first"][0]:
            raise EpisodeError(f"episode {number - 1}, step {last}: {_NO_FIRST}")
        yield number, columns
        last = len(columns["is_first"]) - 1


def _check_discount(discount: Discount) -> Discount:
    if discount not in ("transition", "original"):
        raise SpecError(f"discount: expected 'transition' or 'original', got {discount!r}")
    return discount


def replay_spec(rlds_data: Iterable[Mapping[str, Any]], policy_info_fn: PolicyInfoFn | None = None) -> StepSpec:
    """The spec of the steps that `push_rlds_to_replay` writes."""
    spec, episodes = open_episodes(rlds_data)
    first = next(iter(_trajectories(spec, itertools.islice(episodes, 1), policy_info_fn)), None)
    return _step_spec(spec, () if first is None else first.policy_info)


def push_rlds_to_reverb(
    rlds_data: Iterable[Mapping[str, Any]],
    reverb_observer: Any,
    policy_info_fn: PolicyInfoFn | None = None,
    *,
    discount: Discount = "transition",
) -> int:
    """Write the data through an observer of TF-Agents, episode by episode; returns the number of pairs of steps.

    Where TF-Agents is not installed, an observer of your own gets Trajectory as it is defined here.
    """
    try:
        theirs = importlib.import_module("tf_agents.trajectories.trajectory").Trajectory
    except ModuleNotFoundError:
        theirs = Trajectory
    spec, episodes = open_episodes(rlds_data)
    signature = _signature(reverb_observer)
    pairs = 0
    for number, columns in _begun_rightly(episodes):
        made = _trajectories(spec, [columns], policy_info_fn, first=number, discount=_check_discount(discount))
        trajectories = list(made)
        if number == 0:
            _same_signature(_trajectory_spec(spec, _spec_of(trajectories[0].policy_info)), signature)
        for trajectory in trajectories:
            reverb_observer(theirs(*trajectory))
        pairs += len(trajectories) - 1
    return pairs


# ---- pairs

_NO_FIRST = "is the last, and no first step follows; begin the next episode with is_first"


def _trajectories(
    spec: Spec,
    episodes: Iterable[dict[str, Any]],
    policy_info_fn: PolicyInfoFn | None,
    first: int = 0,
    discount: Discount = "transition",
) -> Iterator[Trajectory]:
    """A trajectory for each step of the episodes, one after the other, and at the very end a zero first step."""
    pad = {**trees.unflatten({path: leaf.zero() for path, leaf in spec.flat.items()}), "is_first": np.bool_(True)}
    before: tuple[dict[str, Any], str] | None = None
    wanted: Spec | None = None
    for step, where in itertools.chain(_steps(episodes, first), [(pad, "the end")]):
        if before is not None:
            current, at = before
            info = () if policy_info_fn is None else tree_to_numpy(policy_info_fn(current, step), "policy_info")
            wanted = wanted or _policy_info_spec(info)
            wanted.check(info or {}, f"{at}: policy_info")
            yield _pair(current, step, info, at, discount)
        before = (step, where)


def _steps(episodes: Iterable[dict[str, Any]], first: int) -> Iterator[tuple[dict[str, Any], str]]:
    for number, columns in enumerate(episodes, first):
        for row in range(len(columns["is_first"])):
            step: AnyTree = trees.unflatten({path: column[row] for path, column in columns.items()})
            yield step, f"episode {number}, step {row}"


def _pair(
    step: dict[str, Any], after: dict[str, Any], policy_info: AnyTree, where: str, discount: Discount
) -> Trajectory:
    last, terminal, next_first = bool(step["is_last"]), bool(step["is_terminal"]), bool(after["is_first"])
    if terminal and not last:
        raise EpisodeError(f"{where}: is terminal and not the last of its episode; set is_last, or clear is_terminal")
    if next_first and not last:
        raise EpisodeError(f"{where}: is not the last, and a first step follows; end the episode with is_last")
    if last and not next_first:
        raise EpisodeError(f"{where}: {_NO_FIRST}")
    kind, next_kind = _step_type(step), _step_type(after)
    if kind == FIRST and next_kind == FIRST:  # an episode of one step
        kind = next_kind = LAST
    into = discount == "transition" and not last and bool(after["is_terminal"])  # the next state is terminal
    return Trajectory(
        step_type=kind,
        observation=step["observation"],
        action=step["action"],
        policy_info=policy_info,
        next_step_type=next_kind,
        reward=step["reward"],
        discount=np.float32(0.0 if terminal or into else step["discount"]),
    )


def _step_type(step: Mapping[str, Any]) -> np.int32:
    return FIRST if step["is_first"] else LAST if step["is_last"] else MID


# ---- specs


def _trajectory_spec(spec: Spec, policy_info: AnyTree) -> Trajectory:
    kind = ArraySpec(shape=(), dtype="int32")
    tree: AnyTree = spec.tree
    return Trajectory(
        step_type=kind,
        observation=tree["observation"],
        action=tree["action"],
        policy_info=policy_info,
        next_step_type=kind,
        reward=tree["reward"],
        discount=ArraySpec(shape=(), dtype="float32", low=0, high=1),
    )


def _spec_of(policy_info: AnyTree) -> AnyTree:
    """The ArraySpecs of a policy_info; () if there is none."""
    if isinstance(policy_info, tuple) and not policy_info:
        return ()
    return _policy_info_spec(policy_info).tree


def _policy_info_spec(policy_info: AnyTree) -> Spec:
    if isinstance(policy_info, tuple) and not policy_info:
        return Spec({})
    leaf: Callable[[Any], ArraySpec] = lambda x: ArraySpec(shape=np.shape(x), dtype=str(np.asarray(x).dtype))  # noqa: E731
    return Spec(trees.map_leaves(leaf, policy_info))


def _step_spec(spec: Spec, policy_info: AnyTree) -> StepSpec:
    extras: dict[str, Any] = {"discount": ArraySpec(shape=(), dtype="float32", low=0, high=1)}
    info = _policy_info_spec(policy_info).tree
    if not isinstance(info, Mapping) or info:
        extras["policy_info"] = info
    tree: AnyTree = spec.tree
    return StepSpec(
        observation=Spec(tree["observation"]),
        action=Spec(tree["action"]),
        reward=tree["reward"],
        extras=Spec(extras),
    )


def _signature(observer: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    """The shape and dtype of each field of the observer's table, by path."""
    return _flat_signature(observer.get_table_signature(), lambda leaf: (tuple(leaf.shape)[1:], leaf.dtype.name))


def _same_signature(spec: Trajectory, signature: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    ours = _flat_signature(spec, lambda leaf: (leaf.shape, leaf.dtype))
    for path in sorted(ours.keys() | signature.keys()):
        if ours.get(path) != signature.get(path):
            raise SpecError(
                f"{path}: expected {signature.get(path)} as in the table, got {ours.get(path)}; make the table with "
                f"create_trajectory_data_spec of this data"
            )


def _flat_signature(nest: Any, of: Callable[[Any], Any], path: str = "") -> dict[str, Any]:
    """The leaves of a nest of dicts and named tuples, by path."""
    if isinstance(nest, Mapping):
        children: Iterable[tuple[str, Any]] = nest.items()
    elif hasattr(nest, "_asdict"):
        children = nest._asdict().items()
    elif isinstance(nest, Sequence) and not isinstance(nest, str):
        children = ((str(number), child) for number, child in enumerate(nest))
    else:
        return {path: of(nest)}
    found: dict[str, Any] = {}
    for name, child in children:
        found |= _flat_signature(child, of, trees.join(path, name))
    return found


# ---- into a store


class _EpisodeWriter:
    """Writes whole episodes, each in one chunk: for a Store or a Remote it makes a writer with large enough chunks."""

    def __init__(self, replay: Store | Remote | Writer):
        self._replay = replay
        self._writer = replay if isinstance(replay, Writer) else None
        self._rows = 0

    def episode(self, spec: StepSpec, columns: dict[str, Any], trajectories: list[Trajectory], where: str) -> None:
        writer = self._writer_of(spec, len(trajectories), where)
        length = len(trajectories) - 1
        steps = [_step(trajectory) for trajectory in trajectories[:-1]]
        terminal = bool(columns["is_terminal"][length])
        steps[-1] = replace(steps[-1], terminated=terminal, truncated=not terminal)
        try:
            for step in steps:
                writer.spec.row(step)
            last = writer.spec.observation.check(trajectories[-1].observation, "observation")
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
        # An episode is in split "eval" until its last row is written, so that no training view sees a part of it.
        info = EpisodeInfo(actor=_WRITER)
        writer.begin(replace(info, split="eval"))
        for step in steps:
            writer.append(step)
        writer.end(trees.unflatten(trees.below(last, "observation")), split=info.split)
        getattr(writer, "wait_delivered", writer.flush)()  # a RemoteWriter has a queue, which must not overflow

    def _writer_of(self, spec: StepSpec, num_rows: int, where: str) -> Writer:
        if isinstance(self._replay, Writer):
            if self._replay.spec != spec:
                raise SpecError(f"{where}: the writer's spec is not that of the data; make it with replay_spec(data)")
            return self._replay
        if self._writer is None or self._writer.spec != spec or num_rows > self._rows:
            self.close()
            self._rows = max(num_rows, 2 * self._rows)
            self._writer = self._replay.writer(_WRITER, spec, commit_steps=self._rows)
        return self._writer

    def close(self) -> None:
        """Close the writer, unless the caller passed it."""
        if self._writer is not self._replay:
            getattr(self._writer, "close", lambda: None)()  # only a RemoteWriter has `close`


def _step(trajectory: Trajectory) -> Step:
    extras: dict[str, Any] = {"discount": np.asarray(trajectory.discount)}
    if isinstance(trajectory.policy_info, Mapping) or not isinstance(trajectory.policy_info, tuple):
        extras["policy_info"] = trees.map_leaves(np.asarray, trajectory.policy_info)
    return Step(
        observation=_as_given(trajectory.observation),
        action=_as_given(trajectory.action),
        reward=trajectory.reward,
        extras=extras,
    )


def _as_given(tree: AnyTree) -> AnyTree:
    return trees.map_leaves(lambda leaf: leaf if isinstance(leaf, str) else np.asarray(leaf), tree)
