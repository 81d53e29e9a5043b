"""Every call that changes a file fails, one run after the other, in every way in which a disk can fail.

Whatever fails and whenever: nothing acknowledged is lost or there twice, the error names a file and says what to do,
and the store opens again. shim.c makes the calls fail; workload.py lives through them and checks what is left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunChild = Callable[..., list[dict[str, Any]]]

MODES = ("eio", "enospc", "fsync", "short", "short_enospc")

# Calls whose failure may pass without an error, because nothing acknowledged depends on them.
TOLERATED = {
    # A checkpoint between commits: SQLite tries it again after the next one, and till then the log has it all.
    "pwrite catalog.sqlite",
    "ftruncate catalog.sqlite",
    "sync catalog.sqlite",
    "sync catalog.sqlite-wal",
    # The name of SQLite's log, which Store.open syncs itself (test_power_cut would find it missing).
    "sync .",
    # A reader's second way to open the log is without the right to write.
    "open catalog.sqlite-wal",
    # A directory that is there already.
    "mkdir segments",
    # Removing an empty log.
    "unlink catalog.sqlite-wal",
    "unlink catalog.sqlite-shm",
    "unlink catalog.sqlite.new-wal",
    "unlink catalog.sqlite.new-shm",
}


@pytest.mark.parametrize("amount", ["some", pytest.param("all", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("repetition", ["once", "sticky"])
@pytest.mark.parametrize("mode", MODES)
def test_a_failing_call_loses_nothing(
    mode: str, repetition: str, amount: str, run_child: RunChild, tmp_path: Path
) -> None:
    check(run_child("workload.py", tmp_path, mode, repetition, amount), mode, tmp_path)


def test_the_shim_sees_what_python_and_sqlite_do(run_child: RunChild, tmp_path: Path) -> None:
    seen = run_child("workload.py", tmp_path, "eio", "once", "none")[0]["calls"]
    found = {short(call, tmp_path) for call in seen}
    assert len(seen) > 500
    assert found >= {
        "mkdir .",
        "sync .",
        "sync segments",
        "rename catalog.sqlite.new",
        *(f"{call} segments/N.safetensors" for call in ("open", "ftruncate", "pwrite", "sync", "unlink")),
        *(f"{call} catalog.sqlite-wal" for call in ("open", "ftruncate", "pwrite", "sync", "unlink")),
        *(f"{call} catalog.sqlite" for call in ("ftruncate", "pwrite", "sync")),
    }, sorted(found)


def check(reports: list[dict[str, Any]], mode: str, directory: Path) -> None:
    good, *failing = reports
    assert (good["errors"], good["problems"], good["complete"]) == ([], [], True)
    assert len(failing) > 10
    wrong = []
    for report in failing:
        call = short(report["call"], directory)
        texts = [*report["problems"], *wrong_texts(report["errors"], directory)]
        if "unexpected" in report:
            texts.append(report["unexpected"])
        if report["num_calls"] < report["k"]:
            texts.append("the fault did not come about")
        if mode == "short" and report["errors"]:
            texts.append(f"a short write is no error: {report['errors']}")
        if mode != "short" and not report["errors"] and call not in TOLERATED:
            texts.append("no error was raised")
        wrong += [f"call {report['k']} ({call}), then {report['ending']}: {text}" for text in texts]
    assert not wrong, f"{len(wrong)} problems:\n" + "\n".join(wrong[:20])


def wrong_texts(errors: list[str], directory: Path) -> list[str]:
    """Errors that do not name a file of the store, or do not say what to do."""
    return [error for error in errors if not re.match(rf"{re.escape(str(directory))}/case\S*: .+; .+", error)]


def short(call: str, directory: Path) -> str:
    """A traced call with its path within the store; segments are alike, and so are the variants of a call."""
    name, path = call.split(" ", 1)
    name = {"fsync": "sync", "fdatasync": "sync"}.get(name, name.removesuffix("64"))
    return f"{name} {re.sub(r'[0-9]{8}', 'N', os.path.relpath(path, directory / 'case' / 'store'))}"
