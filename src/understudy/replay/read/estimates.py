"""Estimates: what a value model thinks of the steps of a store, in files of their own beside the data.

The files lie in the store's directory (`estimates/`), one for each value model, commit and set of options. They say
which model made them and as of which commit, and change nothing in the store: deleting them is always safe.

    estimates = Estimates.newest("runs/practice")
    found = estimates.of(3)         # episode 3, or None
    found.value, found.advantage    # one number for each step
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from understudy.core import StoreError
from understudy.core.spec import canonical_json
from understudy.durable import files
from understudy.replay.format.arrays import Array
from understudy.replay.format.paths import ESTIMATES_DIRECTORY

FORMAT = "understudy-estimates-1"
KEY = "understudy"
ARRAYS = ("episode", "num_steps", "value", "advantage", "good")


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeEstimates:
    """Of the T steps of one episode."""

    value: Array  # [T] float32: how well it will go on, from -1 to 0; 0 is a success that has been reached
    advantage: Array  # [T] float32: how much better the next steps went than expected
    good: Array  # [T] bool: whether the step is worth repeating


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimates:
    """Of the steps of some episodes of a store."""

    store_id: str
    commit: int  # of the store, as of which the episodes were read
    model: str  # digest of the value model's weights
    options: Mapping[str, Any] = field(default_factory=dict)  # plain JSON: what else they depend on
    episode: Array  # [E] int64, rising
    num_steps: Array  # [E] int64
    value: Array  # [N] float32, of all episodes one after the other
    advantage: Array  # [N] float32
    good: Array  # [N] bool

    def __post_init__(self) -> None:
        total = int(np.sum(self.num_steps))
        for name in ("value", "advantage", "good"):
            if len(getattr(self, name)) != total:
                raise StoreError(f"{name}: expected {total} numbers, one a step, got {len(getattr(self, name))}")

    def of(self, episode: int) -> EpisodeEstimates | None:
        """The estimates of an episode, if there are any."""
        at = int(np.searchsorted(self.episode, episode))
        if at == len(self.episode) or self.episode[at] != episode:
            return None
        rows = slice(int(self._first[at]), int(self._first[at] + self.num_steps[at]))
        return EpisodeEstimates(value=self.value[rows], advantage=self.advantage[rows], good=self.good[rows])

    def is_good(self, episode: Array, index: Array) -> Array:
        """[B] bool: whether these steps, by episode and number, are worth repeating; without estimates they are not."""
        at = np.minimum(np.searchsorted(self.episode, episode), max(len(self.episode) - 1, 0))
        if not len(self.episode):
            return np.zeros(len(episode), bool)
        known = (self.episode[at] == episode) & (index < self.num_steps[at])
        return np.asarray(self.good[np.where(known, self._first[at] + index, 0)] & known)

    @cached_property
    def _first(self) -> Array:
        """[E]: where the steps of each episode begin."""
        return np.cumsum(self.num_steps) - self.num_steps

    # ---- files

    @property
    def fingerprint(self) -> str:
        """Of all that the estimates depend on; the name of the file."""
        return fingerprint(store_id=self.store_id, commit=self.commit, model=self.model, options=self.options)

    def write(self, store: str | Path) -> Path:
        """Write the file; a crash leaves none, or all of it."""
        path = estimates_path(Path(store), self.fingerprint)
        path.parent.mkdir(exist_ok=True)
        about = {"store_id": self.store_id, "commit": self.commit, "model": self.model, "options": dict(self.options)}
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ARRAYS}
        about |= {"format": FORMAT, "check": _digest(arrays)}
        files.write_durably(path, save(arrays, {KEY: canonical_json(about)}))
        return path

    @staticmethod
    def read(path: str | Path) -> Estimates:
        """Read a file that `write` has written."""
        path = Path(path)
        try:
            with safe_open(path, framework="np") as file:
                about = json.loads((file.metadata() or {})[KEY])
                arrays = {name: file.get_tensor(name) for name in ARRAYS}
            if about["format"] != FORMAT or about["check"] != _digest(arrays):
                raise ValueError("another format or checksum")
            found = Estimates(
                store_id=about["store_id"],
                commit=about["commit"],
                model=about["model"],
                options=about["options"],
                **arrays,
            )
            if found.fingerprint != path.stem:
                raise ValueError(f"those with the fingerprint {found.fingerprint}")
            return found
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise StoreError(f"{path}: expected estimates of steps, got {error}; delete the file") from None

    @staticmethod
    def newest(store: str | Path) -> Estimates | None:
        """The estimates that were written last, or None."""
        found = [(_written_ns(path), path) for path in (Path(store) / ESTIMATES_DIRECTORY).glob("*.safetensors")]
        return Estimates.read(max(found)[1]) if found else None


def _written_ns(path: Path) -> int:
    """When a file was written; 0 if somebody has deleted it meanwhile."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def fingerprint(*, store_id: str, commit: int, model: str, options: Mapping[str, Any]) -> str:
    """Of what estimates depend on."""
    text = canonical_json({"store_id": store_id, "commit": commit, "model": model, "options": dict(options)})
    return xxhash.xxh3_128_hexdigest(text.encode())


def estimates_path(store: Path, of: str) -> Path:
    """The file of the estimates with this fingerprint."""
    return store / ESTIMATES_DIRECTORY / f"{of}.safetensors"


def _digest(arrays: Mapping[str, Array]) -> str:
    digest = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
