"""The child of test_read_faults: does one thing with a store again and again, each time with another read failing.

    LD_PRELOAD=shim.so python read_workload.py <directory> <mode> <once|sticky> <all|some>

The store is the one that workload.py fills, closed cleanly or left behind by a killed process. Each run is a forked
process that works on a copy of it. This process never arms the shim; it checks that the copy still holds everything,
and prints one JSON line per run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from workload import NEVER, SEGMENT_BYTES, SHIM, STICKY, Run, missing, problems_of, read_trace, say, wrong_rows

from understudy.core import UnderstudyError
from understudy.core.tree import flatten
from understudy.replay import EVERYTHING, Reader, Sampler, Store, compact
from understudy.replay.maintain.backup import backup
from understudy.replay.maintain.repair import repair
from understudy.replay.maintain.verify import verify

MODES = {"eio": 5, "short": 6, "eintr": 7}
STRIDE = 1999  # of `some`: every so many calls, beside the first of each kind


# ---- what is done; each returns what is wrong with its result


def do_open(path: Path) -> list[str]:
    with Store.open(path, segment_bytes=SEGMENT_BYTES):
        return []


def do_read(path: Path) -> list[str]:
    with Reader(path) as reader:
        records = list(reader.episodes("not purged"))
        found = {record.info.seed: record for record in reader.episodes("1")}
        return [text for record in records for text in wrong_rows(reader, record)] + list(missing(found, PROMISED))


def do_sample(path: Path) -> list[str]:
    found = batches(path)
    return [] if found == BATCHES else ["the batches are not those of the whole store"]


def do_verify(path: Path) -> list[str]:
    found = verify(path)
    if found.problems:
        raise Noticed(found.problems)
    return []


def do_repair(path: Path) -> list[str]:
    report = repair(path)
    if report.before.problems:
        raise Noticed(report.before.problems)
    return [f"repair did something: {report.actions}"] if report.actions or report.rows_dropped else []


def do_backup(path: Path) -> list[str]:
    copy = path.with_name("copy")
    with Store.open(path, segment_bytes=SEGMENT_BYTES) as store:
        backup(store, copy)
    SHIM.fault_disarm()
    return problems_of(copy, PROMISED)


def do_compact(path: Path) -> list[str]:
    with Store.open(path, segment_bytes=SEGMENT_BYTES) as store:
        compact(store, min_dead=0.0)
    return []


ACTIONS: dict[str, Callable[[Path], list[str]]] = {
    name.removeprefix("do_"): act for name, act in list(globals().items()) if name.startswith("do_")
}


class Noticed(Exception):
    """Verify or repair has reported something, as it should."""


def batches(path: Path) -> list[list[str]]:
    """Some batches of each spec, as text."""
    found = []
    with Reader(path) as reader:
        for spec in reader.catalog.spec_ids():
            with Sampler(reader, EVERYTHING, batch_size=16, seed=1, spec=spec, num_threads=1) as sampler:
                sampler.follow()
                for _ in range(3):
                    batch = sampler.sample()
                    parts = {**flatten(batch.observation), **flatten(batch.next_observation, "next")}
                    found.append([str(np.asarray(part).tolist()) for part in (*parts.values(), batch.reward)])
    return found


# ---- one run


def run(path: Path, action: str, mode: int, k: int, trace: Path | None = None) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        report: dict[str, Any] = {"errors": [], "problems": [], "noticed": []}
        try:
            if trace is not None:
                SHIM.fault_trace(os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
            SHIM.fault_arm(str(path).encode(), k, mode)
            try:
                report["problems"] = ACTIONS[action](path)
            except UnderstudyError as error:
                report["errors"] = [str(error)]
            except Noticed as noticed:
                report["noticed"] = noticed.args[0]
            except BaseException:  # noqa: BLE001 (reported, and the parent fails)
                report["unexpected"] = traceback.format_exc()
            SHIM.fault_disarm()
            report["num_calls"] = SHIM.fault_count()
            os.write(write_end, json.dumps(report).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return dict(json.loads(text)) if text else {"unexpected": f"the process ended with status {status}"}


def fault(templates: dict[str, Path], state: str, action: str, mode: int, k: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=templates[state].parent) as place:
        store = Path(shutil.copytree(templates[state], Path(place) / "store"))
        trace = Path(place) / "trace" if k == NEVER else None
        report = run(store, action, mode, k, trace)
        after = problems_of(store, PROMISED)
        counted = [call for call in read_trace(trace) if call.counted] if trace else []
        calls = [f"{call.name} {Path(call.path).relative_to(store)}" for call in counted]
    return {"state": state, "action": action, "k": k, "calls": calls, "after": after, **report}


def make_templates(directory: Path) -> dict[str, Path]:
    """The same store, closed and left behind by a process that was killed."""
    this = Run(directory / "clean", "crash")
    this.live()
    with Store.open(directory / "clean", segment_bytes=SEGMENT_BYTES) as store, Reader(directory / "clean") as reader:
        store.delete([next(reader.episodes("seed = 3")).id])  # something to compact
    PROMISED.update(this.promised | {"deleted": [*this.promised["deleted"], 3]})
    shutil.copytree(directory / "clean", directory / "killed")
    pid = os.fork()
    if pid == 0:
        store = Store.open(directory / "killed", segment_bytes=SEGMENT_BYTES)
        store.label([1], {"seen": "yes"})
        os._exit(0)
    os.waitpid(pid, 0)
    BATCHES.extend(batches(directory / "clean"))
    return {"clean": directory / "clean", "killed": directory / "killed"}


def chosen(calls: list[str], amount: str) -> list[int]:
    if amount == "all":
        return list(range(1, len(calls) + 1))
    kinds = [re.sub(r"\d{8}", "", call) for call in calls]
    first = {kind: k for k, kind in reversed(list(enumerate(kinds, 1)))}
    return sorted({*first.values(), *range(STRIDE, len(calls) + 1, STRIDE)})


def main() -> None:
    directory, mode_name, repetition, amount = Path(sys.argv[1]), *sys.argv[2:]
    mode = MODES[mode_name] | (STICKY if repetition == "sticky" else 0)
    templates = make_templates(directory)
    for state in templates:
        for action in ACTIONS:
            if action == "repair" and repetition == "sticky":
                continue  # it keeps what it can read: if the disk gives nothing, that is nothing
            good = fault(templates, state, action, mode, NEVER)
            say(good)
            for k in chosen(good["calls"], amount):
                say(fault(templates, state, action, mode, k) | {"call": good["calls"][k - 1]})


PROMISED: dict[str, Any] = {}
BATCHES: list[list[str]] = []

if __name__ == "__main__":
    main()
