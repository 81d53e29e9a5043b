"""Trim: keeps a part of an episode as a new episode that says where it comes from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from understudy.core import Episode, EpisodeInfo, Source, StoreError
from understudy.core import tree as trees
from understudy.replay.read.reader import Reader
from understudy.replay.write.store import Store

WRITER = "trim"
TRIMMED_FROM = "trimmed_from"  # label of the new episode


def trim(store: Store, episode: int, first: int, stop: int) -> int:
    """Store the steps from `first` up to `stop` (without it) as a new episode, and soft-delete the old one.

    Returns the id of the new episode. It has the attributes of the old one and the label `trimmed_from`. Unless it ends
    where the old one ended, its last step is truncated. A crash in between leaves both episodes.
    """
    with Reader(store.path) as reader:
        record = reader.record(episode)
        if record.state == "open":
            raise StoreError(f"episode {episode}: is still being recorded; trim it when it has ended")
        whole, spec = reader.read(episode), reader.spec(record.spec)
    if not (0 <= first < stop <= len(whole) and stop - first < len(whole)):
        raise StoreError(
            f"trim: expected a part of episode {episode}, which has steps 0 to {len(whole) - 1}, "
            f"got steps {first} to {stop - 1}"
        )
    writer = store.writer(WRITER, spec)
    writer.begin(_info(whole, episode, first, stop))
    for index in range(first, stop - 1):
        writer.append(whole.step(index))
    last, cut_off = whole.step(stop - 1), stop < len(whole)
    writer.append(replace(last, terminated=False, truncated=True) if cut_off else last)
    end = writer.end if cut_off or last.last else writer.cut
    end(trees.map_leaves(lambda column: column[stop], whole.observation))
    with Reader(store.path) as reader:
        new = reader.catalog.last_episode_id()
    store.delete([episode])
    return new


def _info(whole: Episode, episode: int, first: int, stop: int) -> EpisodeInfo:
    labels = {**whole.info.labels, TRIMMED_FROM: f"episode {episode}, steps {first} to {stop - 1}"}
    human = whole.source[first:stop] == Source.HUMAN
    if "intervention_count" in labels:
        labels["intervention_count"] = str(int((np.diff(human.astype(int), prepend=0) == 1).sum()))
        labels["intervention_steps"] = str(int(human.sum()))
    kind = "practice" if whole.info.kind == "correction" else whole.info.kind  # it may have no human step any more
    return replace(whole.info, labels=labels, kind=kind)
