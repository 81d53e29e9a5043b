"""Makes the golden store of format 1 and what it holds. It was run once, when the format was fixed.

    python -m tests.golden.make_store_format_1

The archive and the JSON beside this file are kept for ever: every later version must read them.
"""

import hashlib
import itertools
import json
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from understudy.core.examples import CANONICAL
from understudy.replay import Reader, Store

HERE = Path(__file__).parent
ARCHIVE = HERE / "store_format_1.tar.xz"
TRUTH = HERE / "store_format_1.json"
NAMES = ("images", "nested", "text", "one_step", "truncated")


def make(path: Path) -> None:
    """Write the store, the same bytes each time: ids and times are counted."""
    ticks = itertools.count(1_700_000_000)
    numbers = itertools.count(1)
    with (
        patch("uuid.uuid4", lambda: uuid.UUID(int=next(numbers))),
        Store.open(path, segment_bytes=16_384, clock=lambda: float(next(ticks))) as store,
    ):
        for name in NAMES:
            spec, episode = CANONICAL[name]()
            writer = store.writer(f"writer-{name}", spec, commit_steps=7)
            for _ in range(2):
                writer.begin(episode.info)
                for step in episode.steps():
                    writer.append(step)
                writer.end(episode.last_observation)
        store.delete([2])
        store.label([1], {"golden": "yes"})


def describe(path: Path) -> dict[str, Any]:
    """All that a reader gets from a store: attributes as they are, columns as hashes and shapes."""
    found = {}
    with Reader(path) as reader:
        for record in reader.episodes("1"):
            _, columns = reader.rows(record.id)
            info = {name: getattr(record.info, name) for name in record.info.__dataclass_fields__}
            found[str(record.id)] = {
                "info": info,
                "state": record.state,
                "deleted": record.deleted,
                "commits": [record.begun, record.changed],
                "times": [record.begun_at, record.ended_at],
                "columns": {name: column_text(column) for name, column in sorted(columns.items())},
            }
    return found


def column_text(column: Any) -> str:
    """dtype, shape and hash of a column; a ragged one by its values in turn."""
    if isinstance(column, list):
        return " | ".join(value if isinstance(value, str) else column_text(value) for value in column)
    digest = hashlib.sha256(np.ascontiguousarray(column).tobytes()).hexdigest()[:16]
    return f"{column.dtype} {list(column.shape)} {digest}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        make(store)
        TRUTH.write_text(json.dumps(describe(store), indent=1, ensure_ascii=False, sort_keys=True) + "\n")
        (store / "writer.lock").unlink()
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(store, "store_format_1")
