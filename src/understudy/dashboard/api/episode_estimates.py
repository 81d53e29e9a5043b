"""Episode estimates: what the value model that judged a store last says of the steps of its episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.core import StoreError
from understudy.dashboard.api.targets import Target
from understudy.replay import EpisodeRecord, Estimates
from understudy.replay.format.paths import ESTIMATES_DIRECTORY

AGAIN = "`understudy improve --by recap` makes new ones"


def estimates_of(target: Target, episode: int, num_steps: int) -> dict[str, Any] | None:
    """Value, advantage and `good` of the first `num_steps` steps; None if there are none.

    `note` is a sentence about estimates that are older than the episode, or cannot be shown: then it stands alone.
    """
    with target.catalog().reader() as reader:
        record, store_id = reader.record(episode), reader.catalog.store_id
    try:
        estimates = Estimates.newest(target.store)
    except (StoreError, OSError) as error:
        return {"note": f"The estimates of the steps cannot be read: {error}"}
    if estimates is None:
        return None
    if estimates.store_id != store_id:
        return {"note": f"The newest estimates are of another store ({estimates.store_id[:8]}); {AGAIN}."}
    return _shown(estimates, record, num_steps)


def _shown(estimates: Estimates, record: EpisodeRecord, num_steps: int) -> dict[str, Any] | None:
    commit, found = estimates.commit, estimates.of(record.id)
    edited = record.changed > commit
    if found is None:
        judged = record.info.success is not None or record.info.kind == "demonstration"
        if not edited or not judged or record.info.split == "eval":
            return None
        return {"note": f"The estimates are of commit {commit}; this episode was recorded or judged later; {AGAIN}."}
    if len(found.value) != record.num_steps:
        return {
            "note": f"The estimates are of commit {commit}, when this episode had {len(found.value)} steps"
            f" and not {record.num_steps}; {AGAIN}."
        }
    since = f"This episode was edited after its estimates were made; if that changed its outcome, {AGAIN}."
    return {
        "value": np.round(found.value[:num_steps].astype(np.float64), 4).tolist(),
        "advantage": np.round(found.advantage[:num_steps].astype(np.float64), 4).tolist(),
        "good": found.good[:num_steps].tolist(),
        "commit": commit,
        "model": estimates.model,
        "note": since if edited else None,
    }


def mean_values(target: Target) -> dict[int, float]:
    """The mean value over the steps of each episode that has estimates; a StoreError if their file is damaged."""
    try:
        written_ns = (target.store / ESTIMATES_DIRECTORY).stat().st_mtime_ns  # a new file need not come with a commit
    except OSError:
        return {}
    return target.cached(f"mean values {written_ns}", lambda: _mean_values(target))


def _mean_values(target: Target) -> dict[int, float]:
    with target.catalog().reader() as reader:
        store_id = reader.catalog.store_id
    try:
        estimates = Estimates.newest(target.store)
    except OSError as error:
        raise StoreError(f"{target.store}: cannot read its estimates ({error}); try again") from None
    if estimates is None or estimates.store_id != store_id:
        return {}
    number = np.repeat(np.arange(len(estimates.episode)), estimates.num_steps)
    sums = np.bincount(number, weights=estimates.value, minlength=len(estimates.episode))
    means = sums / np.maximum(estimates.num_steps, 1)
    return dict(zip(estimates.episode.tolist(), means.tolist(), strict=True))
