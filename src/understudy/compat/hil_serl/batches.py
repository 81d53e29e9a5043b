"""What HIL-SERL's scripts do with buffers and batches: fill one from pickles, and join two."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from understudy.compat.arrays import freeze
from understudy.core.tree import AnyTree
from understudy.formats.safe_pickle import load_items

logger = logging.getLogger(__name__)


def populate_data_store(data_store: Any, demos_path: Iterable[str | Path]) -> Any:
    """Insert the transitions of HIL-SERL's pickles, in which nothing is run; returns the data store."""
    for path in demos_path:
        for transition in load_items(Path(path)):
            data_store.insert(transition)
        logger.info("%s: loaded; the data store has %d transitions", path, len(data_store))
    return data_store


def concat_batches(offline_batch: AnyTree, online_batch: AnyTree, axis: int = 1) -> AnyTree:
    """Two batches of equal structure as one, joined along `axis`: of numpy, of torch or of jax.

    Of two FrozenDicts of flax it is one too.
    """
    joined = _concat(offline_batch, online_batch, axis)
    is_frozen = isinstance(offline_batch, Mapping) and not isinstance(offline_batch, dict)
    return freeze(joined) if is_frozen else joined


def _concat(offline_batch: AnyTree, online_batch: AnyTree, axis: int) -> AnyTree:
    if isinstance(offline_batch, Mapping):
        return {name: _concat(value, online_batch[name], axis) for name, value in offline_batch.items()}
    library = type(offline_batch).__module__.partition(".")[0]
    if library == "torch":
        return importlib.import_module("torch").cat((offline_batch, online_batch), axis)
    if library in ("jax", "jaxlib"):
        return importlib.import_module("jax.numpy").concatenate((offline_batch, online_batch), axis)
    return np.concatenate((offline_batch, online_batch), axis)
