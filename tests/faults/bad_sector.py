"""The child of test_read_faults whose disk cannot read one sector: what each part of the store says of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from workload import say

from understudy.core import DamageError
from understudy.replay import EVERYTHING, Reader, Sampler, Store, compact
from understudy.replay.maintain.repair import repair
from understudy.replay.maintain.verify import verify


def sample(path: Path) -> int:
    with Sampler(path, EVERYTHING, batch_size=256, seed=1) as sampler:
        found = sampler.follow()
        for _ in range(20):
            sampler.sample()
        return found


def error_of(act: Any) -> str:
    try:
        return f"no error: {act()}"
    except DamageError as error:
        return str(error)


def readable(path: Path) -> list[int]:
    found = []
    with Reader(path) as reader:
        for record in reader.episodes():
            try:
                reader.read(record.id)
                found.append(record.id)
            except DamageError:
                pass
    return found


def compacted(path: Path) -> str:
    with Store.open(path) as store:
        store.delete([1])
        try:
            return error_of(lambda: compact(store, min_dead=0.0))
        finally:
            store.restore([1])


def main() -> None:
    path = Path(sys.argv[1])
    report: dict[str, Any] = {
        "sample": error_of(lambda: sample(path)),
        "read": readable(path),
        "compact": compacted(path),
    }
    before = verify(path)
    repaired = repair(path)
    say(
        report
        | {
            "problems": len(before.problems),
            "rows_verified": before.num_rows,
            "dropped": repaired.rows_dropped,
            "problems_after_repair": len(repaired.after.problems),
            "sampled_after_repair": sample(path),
        }
    )


if __name__ == "__main__":
    main()
