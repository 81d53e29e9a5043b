"""What a store had when it was opened, by content: inserting one of these transitions again adds nothing.

A script that loads its demonstrations at each start would double them otherwise. Each stored transition stands for one
insert, so that equal transitions that were inserted twice are still two. Frames are not read: their checksums are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from understudy.core import Step, StepSpec
from understudy.core.tree import Tree
from understudy.replay import Reader
from understudy.replay.format.layout import checksum_of
from understudy.replay.format.segment import digest, digests

Array = np.ndarray[Any, Any]

_LEFT_OUT = ("source", "policy_version", "has_proposal", "is_step")  # who chose the action is not content


class StoredContent:
    """The transitions of a spec in a store, none of which has been taken yet."""

    def __init__(self, reader: Reader, spec: StepSpec, spec_id: int | None):
        self._observation = sorted(path for path, _ in spec.observation.leaves("observation"))
        self._others = sorted(
            path
            for path in spec.columns
            if path not in self._observation and path not in _LEFT_OUT and not path.startswith("proposal")
        )
        self._spec = spec
        self._counts: Counter[int] = Counter()
        if spec_id is not None and not any(leaf.ragged for leaf in spec.columns.values()):
            self._counts.update(self._read(reader, spec_id))

    def __len__(self) -> int:
        return self._counts.total()

    def take(self, step: Step, next_observation: Tree) -> bool:
        """Whether the store had this transition and it was not taken before; it counts as taken then."""
        if not self._counts:
            return False
        row = self._spec.row(step)
        then = self._spec.observation.check(next_observation, "observation")
        parts = [_digest_of(row[path]) for path in self._observation + self._others]
        after = [_digest_of(then[path]) for path in self._observation]
        key = digest(np.array(parts + after, np.uint64))
        if not self._counts[key]:
            return False
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
        return True

    def _read(self, reader: Reader, spec_id: int) -> list[int]:
        """A number for the content of each step whose next observation is stored."""
        with reader.catalog.transaction(write=False):
            spans = reader.catalog.spans(
                "episode in (select id from episodes where deleted is null and spec = ?)",
                (spec_id,),
                order="episode, first_index",
            )
        found: list[tuple[Array, Array, Array, Array]] = []
        for span in spans:
            segment = reader.segment(int(span["segment"]))
            first, num_rows = int(span["first_row"]), int(span["num_rows"])

            def column(path: str, segment: Any = segment, first: int = first, num_rows: int = num_rows) -> Array:
                if path in segment.layout.large:
                    return np.asarray(segment.read_column(checksum_of(path), first, num_rows))
                rows = np.ascontiguousarray(segment.read_column(path, first, num_rows))
                return digests(rows.reshape(num_rows, -1).view(np.uint8))

            observation = np.stack([column(path) for path in self._observation], axis=1)
            others = np.stack([column(path) for path in self._others], axis=1)
            is_step = np.asarray(segment.read_column("is_step", first, num_rows))
            found.append((observation, others, is_step, np.full(num_rows, span["episode"])))
        if not found:
            return []
        observation, others, is_step, episode = (np.concatenate(parts) for parts in zip(*found, strict=True))
        whole = np.flatnonzero(is_step[:-1] & (episode[:-1] == episode[1:]))
        keys = np.concatenate([observation[whole], others[whole], observation[whole + 1]], axis=1)
        numbers: list[int] = digests(np.ascontiguousarray(keys).view(np.uint8)).tolist()
        return numbers


def _digest_of(value: Any) -> int:
    return digest(np.ascontiguousarray(value))
