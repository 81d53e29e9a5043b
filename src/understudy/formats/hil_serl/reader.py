"""HilSerlReader: transitions chained into episodes, exactly.

Two transitions are neighbours only if the one's next observation is, bit by bit, the other's observation; where it is
not, the episode is cut there, which its label `cut` says. `dones` ends an episode: with `masks` 0 the task ended, with
1 time was up. HIL-SERL's own scripts set `masks` to 0 in both cases; `max_steps` mends that.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from understudy.core import Episode, EpisodeInfo, Kind, Source, Step, UnderstudyError
from understudy.core import tree as trees
from understudy.core.tree import Tree
from understudy.formats.format import Field, FormatError
from understudy.formats.hil_serl.files import Files, Transition
from understudy.formats.hil_serl.values import UNDERSTUDY, Values, part_of, spec_of, understudy_spec


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to understand what the files leave open."""

    kind: Kind | None = None  # None: by the folder
    source: Source | None = None  # who acted where nothing says it; None: by the folder
    floats: str = "float32"  # or keep
    stack: str = "keep"  # or last: of frames that are stacked, the newest
    max_steps: int | None = None


@dataclass(kw_only=True)
class _Chain:
    """An episode on its way."""

    key: str
    info: EpisodeInfo
    steps: list[Step] = field(default_factory=list)
    led_to: dict[str, Any] = field(default_factory=dict)  # their next observation, as it stands in the file


class HilSerlReader:
    """Files that are open for reading; each `episodes` goes through them anew."""

    def __init__(self, files: Files, options: ReadOptions):
        self._files = files
        first = next(files.transitions(), None)
        if first is None:
            raise FormatError(f"{files.paths[0]}: holds no transitions; there is nothing to read")
        self._ours = f"infos/{UNDERSTUDY}/step" in first.fields
        try:
            if self._ours:
                self.spec = understudy_spec(first.fields)
                stack = "last" if first.fields.get(f"infos/{UNDERSTUDY}/stack") == "add" else "keep"
                options = replace(options, floats="keep", stack=stack, max_steps=None)
            else:
                self.spec = spec_of(first.fields, options.floats, options.stack)
        except UnderstudyError as error:
            raise FormatError(f"{self._place(first)}: {error}") from None
        self._options = options
        self._values = Values(self.spec, options.floats, options.stack)
        has_infos = any(name.startswith("infos") for name in first.fields)
        self._kind: Kind = options.kind or _KINDS.get(files.role) or ("demonstration" if has_infos else "practice")
        by_folder = Source.SCRIPT if self._kind == "demonstration" else Source.POLICY
        self._source = options.source if options.source is not None else _SOURCES.get(files.role, by_folder)
        self.mapping = tuple(self._mapping(first))
        self.num_episodes: int | None = None

    def close(self) -> None:
        """Nothing is held open between episodes."""

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        chain: _Chain | None = None
        for transition in self._files.transitions():
            try:
                if chain is not None and not self._follows(chain, transition):
                    if chain.key not in skip:
                        yield chain.key, self._episode(chain, cut="the next transition does not follow")
                    chain = None
                chain = chain or self._begin(transition)
                done = self._add(chain, transition)
                if done:
                    if chain.key not in skip:
                        yield chain.key, self._episode(chain)
                    chain = None
            except (UnderstudyError, RecursionError) as error:
                raise FormatError(f"{self._place(transition)}: {error}") from None
        if chain is not None and chain.key not in skip:
            yield chain.key, self._episode(chain, cut="the files end here")

    def _place(self, transition: Transition) -> str:
        return f"{self._files.root}/{transition.where}"

    # ---- an episode

    def _begin(self, transition: Transition) -> _Chain:
        if not self._ours:
            return _Chain(key=transition.where, info=EpisodeInfo(kind=self._kind))
        key, info = transition.fields.get(f"infos/{UNDERSTUDY}/key"), transition.fields.get(f"infos/{UNDERSTUDY}/info")
        if not isinstance(key, str) or not isinstance(info, str):
            raise FormatError(f"infos/{UNDERSTUDY}: does not say which episode begins here; the file is damaged")
        try:
            return _Chain(key=key, info=EpisodeInfo(**json.loads(info)))
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"infos/{UNDERSTUDY}/info: {error}; the file is damaged") from None

    def _follows(self, chain: _Chain, transition: Transition) -> bool:
        if self._ours:
            return f"infos/{UNDERSTUDY}/key" not in transition.fields
        found = part_of(transition.fields, "observations")
        return chain.led_to.keys() == found.keys() and all(
            leaf is found[path] or trees.equal_leaf(leaf, found[path]) for path, leaf in chain.led_to.items()
        )

    def _add(self, chain: _Chain, transition: Transition) -> bool:
        """Take a transition in; whether the episode ends with it."""
        fields, values = transition.fields, self._values
        chain.led_to = part_of(fields, "next_observations")
        if self._ours:
            chain.steps.append(values.understudy_step(fields))
            return chain.steps[-1].last
        terminated, truncated = _ends(values.number(fields["masks"], "masks"), values.number(fields["dones"], "dones"))
        reward = values.number(fields["rewards"], "rewards")
        succeed = fields.get("infos/succeed")
        success = bool(values.number(succeed, "infos/succeed")) if succeed is not None else reward > 0
        if terminated and not success and len(chain.steps) + 1 == self._options.max_steps:
            terminated, truncated = False, True
        if terminated or truncated:
            chain.info = replace(chain.info, success=success)
        human = transition.human or "infos/intervene_action" in fields
        if human and chain.info.kind == "practice":
            chain.info = replace(chain.info, kind="correction")
        chain.steps.append(
            Step(
                observation=values.tree(self.spec.observation, fields, "observations"),
                action=values.tree(self.spec.action, fields, "actions"),
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                source=Source.HUMAN if human else self._source,
                extras=values.extras(fields),
            )
        )
        return terminated or truncated

    def _episode(self, chain: _Chain, cut: str | None = None) -> Episode:
        if cut is not None and not self._ours:
            chain.steps[-1] = replace(chain.steps[-1], truncated=True)
            chain.info = replace(chain.info, labels={**chain.info.labels, "cut": cut})
        last: Tree = self._values.tree(self.spec.observation, chain.led_to, "")
        return Episode.from_steps(self.spec, chain.steps, last, chain.info)

    # ---- for people

    def _mapping(self, first: Transition) -> Iterator[Field]:
        rounded = "rounded to float32, as HIL-SERL's buffer does" if self._options.floats == "float32" else "as it is"
        newest = ", the newest of the stack" if self._options.stack == "last" else ""
        parts = (("observation", "observations", self.spec.observation), ("action", "actions", self.spec.action))
        for ours, theirs, spec in parts:
            for path, leaf in spec.leaves():
                how = rounded if leaf.dtype.startswith("float") else "as it is"
                how += newest if ours == "observation" else ""
                yield Field(theirs=trees.join(theirs, path), ours=trees.join(ours, path), how=how)
        yield Field(theirs="next_observations", ours="observation", how="of the next row; where they differ, a cut")
        yield Field(theirs="rewards", ours="reward", how="float32")
        yield Field(theirs="dones, masks", ours="terminated, truncated", how="done with mask 0, done with mask 1")
        if self._ours:
            yield Field(theirs=f"infos/{UNDERSTUDY}", ours="source, policy_version, proposal, extras", how="as it is")
            return
        elsewhere = f"HUMAN there, {self._source.name} elsewhere"
        yield Field(theirs="infos/intervene_action, demo_buffer", ours="source", how=elsewhere)
        yield Field(theirs="infos/succeed", ours="success", how="of the last step; where it is missing, reward > 0")
        for path, _ in self.spec.extras.leaves():
            yield Field(theirs=path if path in first.fields else f"infos/{path}", ours=f"extras/{path}", how="as it is")
        known = ("observations", "actions", "next_observations", *_SCALARS, *self.spec.extras.flat)
        for path in first.fields:
            name = path.partition(trees.SEPARATOR)[0]
            if name not in known and path not in _INFOS and path.removeprefix("infos/") not in self.spec.extras.flat:
                yield Field(theirs=path, ours="", how="left out")


_KINDS: dict[str, Kind] = {"buffer": "practice", "demo_buffer": "correction"}
_SOURCES = {"buffer": Source.POLICY, "demo_buffer": Source.HUMAN}
_SCALARS = ("rewards", "masks", "dones")
_INFOS = ("infos/intervene_action", "infos/succeed")


def _ends(mask: float, done: float) -> tuple[bool, bool]:
    """`terminated` and `truncated` of a step, from theirs."""
    if mask not in (0.0, 1.0):
        raise FormatError(f"masks: expected 0 or 1, got {mask}")
    if mask == 0 and not done:
        raise FormatError("masks: expected 1 where dones is False, got 0; a step that ends the task is also done")
    if not np.isfinite(done):
        raise FormatError(f"dones: expected a truth value, got {done}")
    return mask == 0, bool(done) and mask != 0
