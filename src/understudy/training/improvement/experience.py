"""Experience: blocks of several views of several stores as one stream, each view with its share of the steps.

What a method learns from is a choice of views; no data is copied.

| method | demonstrations | other episodes |
|---|---|---|
| cloning | all that succeeded | all steps |
| filtered-cloning | all that succeeded | all steps of episodes that succeeded |
| hg-dagger | all that succeeded | steps of the human |
| recap | all that succeeded, as good ones | of episodes with an outcome: the human's steps as good, others judged |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.algorithms.sft import Blocks
from understudy.core import SequenceBatch, Source, StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.resize import ResizeOption
from understudy.policies.protocol import Array
from understudy.replay import Clause, Estimates, Reader, View
from understudy.replay.sample.mixture import shares
from understudy.training.improvement.config import Method
from understudy.training.onpolicy.sft import Demonstrations

# Held-out episodes are in none of these, so that nobody trains on what is evaluated on.
HUMAN = frozenset({Source.HUMAN})
OTHERS = frozenset(Source) - HUMAN
PRACTICE = "split = 'train' and kind != 'demonstration'"
SUCCEEDED = "split = 'train' and coalesce(success, kind = 'demonstration') = 1"
FAILED = "split = 'train' and success = 0"

DEMONSTRATED = View(name="demonstrated", clauses=(Clause(where=f"{SUCCEEDED} and kind = 'demonstration'"),))
PRACTICED: dict[str, tuple[View, ...]] = {  # by method: views of the episodes that are no demonstrations
    "cloning": (View(name="all", clauses=(Clause(where=PRACTICE),)),),
    "filtered-cloning": (View(name="succeeded", clauses=(Clause(where=f"{PRACTICE} and success = 1"),)),),
    "hg-dagger": (View(name="corrections", clauses=(Clause(where=PRACTICE, sources=HUMAN),)),),
    "recap": (
        View(name="corrections", clauses=(Clause(where=f"{PRACTICE} and success is not null", sources=HUMAN),)),
        View(name="others", clauses=(Clause(where=f"{PRACTICE} and success is not null", sources=OTHERS),)),
    ),
}
NOTHING: dict[str, str] = {
    "cloning": "has no episodes to learn from; record some with `understudy rollout`",
    "filtered-cloning": "has no successful episodes; record more with `understudy rollout`, or use --by hg-dagger",
    "hg-dagger": "has no steps of a human; record some with `understudy rollout --human`, or use --by filtered-cloning",
    "recap": "has no episodes with an outcome; judge some on the page (`understudy watch`), or use --by hg-dagger",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The steps of one view of one store."""

    name: str
    steps: Demonstrations
    estimates: Estimates | None = None  # which say what is good; without them everything is


class Experience:
    """Batches of all parts together: every step of every part is as likely as any other."""

    def __init__(self, parts: Sequence[Part], *, batch_size: int):
        self.parts = tuple(parts)
        self.batch_size = batch_size
        self._num_batches = 0

    def __len__(self) -> int:
        """Number of steps that a block can start at."""
        return sum(len(part.steps) for part in self.parts)

    @property
    def num_steps(self) -> dict[str, int]:
        """The number of steps of the parts, by name."""
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.name] = found.get(part.name, 0) + len(part.steps)
        return found

    @property
    def spec(self) -> StepSpec:
        return self.parts[0].steps.spec

    def draw(self, size: int | None = None) -> list[tuple[Part, SequenceBatch]]:
        """The next batch, part by part."""
        sizes = [len(part.steps) for part in self.parts]
        if not any(sizes):
            raise StoreError("experience: there are no steps to learn from; record some episodes first")
        counts = shares(sizes, size or self.batch_size, self._num_batches if size is None else 0)
        if size is None:
            self._num_batches += 1
        return [(part, part.steps.draw(count)) for part, count in zip(self.parts, counts, strict=True) if count]

    def sample(self) -> Blocks:
        """The next batch of blocks to imitate."""
        return joined([_blocks(part, batch) for part, batch in self.draw()])

    def state(self) -> dict[str, Any]:
        return {"num_batches": self._num_batches, "parts": [part.steps.state() for part in self.parts]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; only on one that was just made, of the same parts."""
        if len(state["parts"]) != len(self.parts):
            raise StoreError(
                f"experience: the state has {len(state['parts'])} parts and this run {len(self.parts)}; "
                f"resume it with the same stores"
            )
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.steps.restore(saved)
        self._num_batches = int(state["num_batches"])

    def close(self) -> None:
        for part in self.parts:
            part.steps.close()


def open_experience(
    by: Method,
    demos: Path,
    experience: Sequence[Path],
    open_reader: Callable[[Path], Reader],
    *,
    block_steps: int,
    batch_size: int,
    seed: int,
    resize: ResizeOption | None = None,
    estimates: Mapping[Path, Estimates] | None = None,
) -> Experience:
    """What a method learns from, of a store of demonstrations and of others. Readers are closed by who opens them."""
    parts: list[Part] = []

    def add(name: str, store: Path, view: View, found: Estimates | None) -> None:
        spec = parts[0].steps.spec if parts else None
        steps = Demonstrations(
            open_reader(store),
            view,
            block_steps=block_steps,
            batch_size=batch_size,
            seed=seed + (len(parts) << 32),
            spec=spec,
            resize=resize,
        )
        parts.append(Part(name=name, steps=steps, estimates=found))

    for store in dict.fromkeys([demos, *experience]):
        add("demonstrations", store, DEMONSTRATED, None)
    for store in dict.fromkeys(experience):
        for view in PRACTICED[by]:
            judged = estimates[store] if estimates is not None and view.name == "others" else None
            add(view.name, store, view, judged)
    return Experience(parts, batch_size=batch_size)


def _blocks(part: Part, batch: SequenceBatch) -> Blocks:
    blocks = part.steps.blocks(batch)
    good = None if part.estimates is None else part.estimates.is_good(batch.episode, batch.index)
    return replace(blocks, good=good)


def joined(some: Sequence[Blocks]) -> Blocks:
    """Several batches as one. Where one of them says what is good, everything in the others is."""
    if len(some) == 1:
        return some[0]

    def join(pick: Callable[[Blocks], Any]) -> Any:
        flat = [trees.flatten(pick(one)) for one in some]
        return trees.unflatten({path: np.concatenate([each[path] for each in flat]) for path in flat[0]})

    def goodness(one: Blocks) -> Array:
        return np.ones(len(one.instruction), bool) if one.good is None else one.good

    return Blocks(
        observation=join(lambda one: one.observation),
        instruction=tuple(text for one in some for text in one.instruction),
        action=join(lambda one: one.action),
        weight=np.concatenate([one.weight for one in some]),
        good=None if all(one.good is None for one in some) else np.concatenate([goodness(one) for one in some]),
    )
