"""HilSerlReader: chains transitions into episodes.

Two transitions belong together only if the next observation of the first is bit-identical to the observation of the
second; otherwise the episode is cut there, which its label `cut` says. `dones` ends an episode: `masks` 0 means
terminated, 1 truncated. HIL-SERL's own scripts set `masks` to 0 in both cases; the option `max_steps` corrects that.
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
    """How to interpret what the files do not say."""

    kind: Kind | None = None  # None: by the directory
    source: Source | None = None  # where the files do not say it; None: by the directory
    floats: str = "float32"  # or keep
    stack: str = "keep"  # or last: the newest of stacked frames
    max_steps: int | None = None


@dataclass(kw_only=True)
class _Chain:
    """An unfinished episode."""

    key: str
    info: EpisodeInfo
    steps: list[Step] = field(default_factory=list)
    next_observation: dict[str, Any] = field(default_factory=dict)  # of the last transition


class HilSerlReader:
    """Reads the files again for each call of `episodes`."""

    def __init__(self, files: Files, options: ReadOptions):
        self._files = files
        first = next(files.transitions(), None)
        if first is None:
            raise FormatError(f"{files.paths[0]}: holds no transitions; there is nothing to read")
        self._from_understudy = f"infos/{UNDERSTUDY}/step" in first.fields
        try:
            if self._from_understudy:
                self.spec = understudy_spec(first.fields)
                stack = "last" if first.fields.get(f"infos/{UNDERSTUDY}/stack") == "add" else "keep"
                options = replace(options, floats="keep", stack=stack, max_steps=None)
            else:
                self.spec = spec_of(first.fields, options.floats, options.stack)
        except UnderstudyError as error:
            raise FormatError(f"{self._where(first)}: {error}") from None
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
                if self._add(chain, transition):
                    if chain.key not in skip:
                        yield chain.key, self._episode(chain)
                    chain = None
            except (UnderstudyError, RecursionError) as error:
                raise FormatError(f"{self._where(transition)}: {error}") from None
        if chain is not None and chain.key not in skip:
            yield chain.key, self._episode(chain, cut="the files end here")

    def _where(self, transition: Transition) -> str:
        return f"{self._files.root}/{transition.where}"

    # ---- an episode

    def _begin(self, transition: Transition) -> _Chain:
        if not self._from_understudy:
            return _Chain(key=transition.where, info=EpisodeInfo(kind=self._kind))
        key, info = transition.fields.get(f"infos/{UNDERSTUDY}/key"), transition.fields.get(f"infos/{UNDERSTUDY}/info")
        if not isinstance(key, str) or not isinstance(info, str):
            raise FormatError(f"infos/{UNDERSTUDY}: does not name the episode that begins here; the file is damaged")
        try:
            return _Chain(key=key, info=EpisodeInfo(**json.loads(info)))
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"infos/{UNDERSTUDY}/info: {error}; the file is damaged") from None

    def _follows(self, chain: _Chain, transition: Transition) -> bool:
        if self._from_understudy:
            return f"infos/{UNDERSTUDY}/key" not in transition.fields
        found = part_of(transition.fields, "observations")
        return chain.next_observation.keys() == found.keys() and all(
            leaf is found[path] or trees.equal_leaf(leaf, found[path]) for path, leaf in chain.next_observation.items()
        )

    def _add(self, chain: _Chain, transition: Transition) -> bool:
        """Append a transition; returns whether the episode ends with it."""
        fields, values = transition.fields, self._values
        chain.next_observation = part_of(fields, "next_observations")
        if self._from_understudy:
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
        if cut is not None and not self._from_understudy:
            chain.steps[-1] = replace(chain.steps[-1], truncated=True)
            chain.info = replace(chain.info, labels={**chain.info.labels, "cut": cut})
        last: Tree = self._values.tree(self.spec.observation, chain.next_observation, "")
        return Episode.from_steps(self.spec, chain.steps, last, chain.info)

    # ---- the mapping, for the user

    def _mapping(self, first: Transition) -> Iterator[Field]:
        rounded = "rounded to float32, as HIL-SERL's buffer does" if self._options.floats == "float32" else "as it is"
        newest = ", the newest of the stack" if self._options.stack == "last" else ""
        parts = (("observation", "observations", self.spec.observation), ("action", "actions", self.spec.action))
        for internal, external, spec in parts:
            for path, leaf in spec.leaves():
                how = rounded if leaf.dtype.startswith("float") else "as it is"
                how += newest if internal == "observation" else ""
                yield Field(external=trees.join(external, path), internal=trees.join(internal, path), how=how)
        yield Field(
            external="next_observations",
            internal="observation",
            how="of the next row; the episode is cut where they differ",
        )
        yield Field(external="rewards", internal="reward", how="float32")
        yield Field(
            external="dones, masks", internal="terminated, truncated", how="dones with mask 0, dones with mask 1"
        )
        if self._from_understudy:
            yield Field(
                external=f"infos/{UNDERSTUDY}", internal="source, policy_version, proposal, extras", how="as it is"
            )
            return
        source = f"HUMAN there, {self._source.name} otherwise"
        yield Field(external="infos/intervene_action, demo_buffer", internal="source", how=source)
        yield Field(
            external="infos/succeed", internal="success", how="of the last step; where it is missing, reward > 0"
        )
        for path, _ in self.spec.extras.leaves():
            yield Field(
                external=path if path in first.fields else f"infos/{path}", internal=f"extras/{path}", how="as it is"
            )
        known = ("observations", "actions", "next_observations", *_SCALARS, *self.spec.extras.flat)
        for path in first.fields:
            name = path.partition(trees.SEPARATOR)[0]
            if name not in known and path not in _INFOS and path.removeprefix("infos/") not in self.spec.extras.flat:
                yield Field(external=path, internal="", how="left out")


_KINDS: dict[str, Kind] = {"buffer": "practice", "demo_buffer": "correction"}
_SOURCES = {"buffer": Source.POLICY, "demo_buffer": Source.HUMAN}
_SCALARS = ("rewards", "masks", "dones")
_INFOS = ("infos/intervene_action", "infos/succeed")


def _ends(mask: float, ended: float) -> tuple[bool, bool]:
    """Convert masks and dones of a step to terminated and truncated."""
    if mask not in (0.0, 1.0):
        raise FormatError(f"masks: expected 0 or 1, got {mask}")
    if mask == 0 and not ended:
        raise FormatError("masks: expected 1 where dones is False, got 0; set dones where the task ends")
    if not np.isfinite(ended):
        raise FormatError(f"dones: expected a truth value, got {ended}")
    return mask == 0, bool(ended) and mask != 0
