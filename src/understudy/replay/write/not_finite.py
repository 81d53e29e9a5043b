"""Not finite: NaN and infinity in the small float fields of observations and actions, of which a writer is told once.

They are stored as they are, because a sensor may mean something by them. Large fields are not looked at: a depth
camera has NaN in most frames, and a look at all of its pixels would cost time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import numpy as np

from understudy.core import StepSpec
from understudy.core.episode import Column
from understudy.replay.format.arrays import Array
from understudy.replay.format.chunk import Chunk

logger = logging.getLogger(__name__)

MAX_ROW_BYTES = 1024  # of a field that is looked at


def not_finite_rows(spec: StepSpec, columns: Mapping[str, Column]) -> Iterator[tuple[str, Array]]:
    """The small float fields of observation and action that have NaN or infinity, each with the rows that do."""
    for path, leaf in spec.columns.items():
        if path.partition("/")[0] not in ("observation", "action") or not leaf.dtype.startswith("float"):
            continue
        if leaf.ragged or leaf.row_bytes > MAX_ROW_BYTES:
            continue
        finite = np.isfinite(columns[path])
        if not finite.all():
            yield path, np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))


class NotFiniteWarnings:
    """Logs one warning for each writer and field. To be called where no control loop waits for it."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()  # writer and field

    def look(self, chunk: Chunk) -> None:
        for path, rows in not_finite_rows(chunk.spec, chunk.columns):
            if (chunk.writer, path) in self._said:
                continue
            self._said.add((chunk.writer, path))
            first = int(rows[0])
            column, start = chunk.columns[path], 0
            for part in chunk.parts:
                if first < start + part.num_rows:
                    break
                start += part.num_rows
            row = np.asarray(column[first])
            logger.warning(
                "writer %r, episode %d, step %d: %s has %s. It is stored as it is, and training on it makes a network "
                "NaN; replace such values in your world, or take the field out of the spec. This is said once for "
                "each field and writer; `understudy verify` counts such steps",
                chunk.writer,
                part.episode,
                part.first_index + first - start,
                path,
                row[~np.isfinite(row)][0],
            )
