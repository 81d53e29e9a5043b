"""Every read fails, one run after the other: with an error, with fewer bytes, with an interrupt; and for good.

Whatever fails and whenever: nothing wrong is returned, nothing is lost, the error names a file and says what to do.
shim.c makes the reads fail; read_workload.py opens, reads, samples, verifies, repairs, backs up and compacts a store.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.writing import write_episode

from understudy.core import StoreError
from understudy.core.examples import random_episode, robot_spec
from understudy.replay import EVERYTHING, Reader, Store
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import read_layout
from understudy.service import RemoteSampler, connect

RunChild = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("amount", ["some", pytest.param("all", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("mode", "repetition"), [("eio", "once"), ("eio", "sticky"), ("short", "sticky"), ("eintr", "once")]
)
def test_a_failing_read_loses_nothing(
    mode: str, repetition: str, amount: str, run_child: RunChild, tmp_path: Path
) -> None:
    reports = run_child("read_workload.py", tmp_path, mode, repetition, amount)
    wrong = []
    for report in reports:
        texts = [*report["after"], *report.get("problems", ()), *filter(None, [report.get("unexpected")])]
        errors = [*report.get("errors", ()), *report.get("noticed", ())]
        texts += [f"no file: {error}" for error in errors if not re.match(r"/\S+: .+", error)]
        texts += [f"no advice: {error}" for error in report.get("errors", ()) if "; " not in error]
        if mode != "eio" or "call" not in report:
            texts += [f"this is no error: {error}" for error in errors]
        wrong += [f"{report['state']} {report['action']}, {report.get('call')} ({report['k']}): {t}" for t in texts]
    assert not wrong, f"{len(wrong)} problems:\n" + "\n".join(wrong[:20])
    failing = [report for report in reports if "call" in report]
    assert {report["action"] for report in failing} >= {"open", "read", "sample", "verify", "backup", "compact"}
    called = {re.sub(r"\d{8}", "N", report["call"].split(" ", 1)[1]) for report in failing}
    assert called >= {"catalog.sqlite", "catalog.sqlite-wal", "catalog.seal", "segments/N.safetensors"}
    if mode == "eio" and repetition == "once":  # what can be read the second time is no damage
        assert not [r for r in failing if "segments/" in r["call"] and (r["errors"] or r["noticed"])]


@pytest.fixture(params=["action", "row/checksum", "row/record"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A store of six episodes, and where the disk cannot read a sector of the third."""
    path = tmp_path / "store"
    with Store.open(path) as store:
        writer = store.writer("w", robot_spec(20))
        for seed in range(6):
            write_episode(writer, random_episode(robot_spec(20), 299, seed))
    (file,) = segment_files(path)
    return path, f"{read_layout(file).columns[request.param].at(2 * 300 + 150)} segments/{file.name}"


def test_an_unreadable_sector_is_damaged_rows_for_everyone(
    run_child: RunChild, damaged: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sector = damaged
    monkeypatch.setenv("UNDERSTUDY_BAD_SECTOR", sector)
    (report,) = run_child("bad_sector.py", path)
    named = rf"{path}/segments/00000001.safetensors: .* run `understudy verify`"
    assert re.search(named, report["sample"]), report
    assert re.search(rf"{path}/segments/00000001.safetensors: .* `understudy repair`", report["compact"]), report
    assert 3 not in report["read"]
    assert {*report["read"]} >= {1, 5, 6}  # a page of the disk holds rows of the neighbours at most
    assert report["problems"] > 0
    assert report["rows_verified"] == 6 * 300  # not only those before the sector
    assert 0 < report["dropped"] <= 4096 // 8
    assert report["problems_after_repair"] == 0
    with Reader(path) as reader:
        assert report["sampled_after_repair"] == sum(record.num_rows - 1 for record in reader.episodes())
        kept = {record.id: record.num_steps for record in reader.episodes()}
        assert [kept[episode] for episode in report["read"]] == [299] * len(report["read"])


@pytest.mark.parametrize("damaged", ["action"], indirect=True)
def test_a_server_goes_on_serving_the_others(shim: Path, damaged: tuple[Path, str], tmp_path: Path) -> None:
    path, sector = damaged
    server = subprocess.Popen(
        [sys.executable, "-m", "understudy", "serve", path, "--port", "0"],
        env={**os.environ, "LD_PRELOAD": str(shim), "UNDERSTUDY_BAD_SECTOR": sector},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].strip()
        with connect(address) as remote, remote.writer("w2", robot_spec(20), spool=tmp_path / "spool") as writer:
            for seed in range(3):
                with remote.sampler(EVERYTHING, batch_size=256, seed=seed) as sampler:
                    assert re.search(r"00000001.safetensors: .* run `understudy verify`", error_of(sampler))
                write_episode(writer, random_episode(robot_spec(20), 5, seed))
                assert writer.wait_delivered(timeout_s=60)
            assert server.poll() is None
            remote.status()
    finally:
        server.terminate()
        _, _ = server.communicate(timeout=60)
    assert server.returncode == 0


def error_of(sampler: RemoteSampler[Any]) -> str:
    """The error at which sampling ends."""
    try:
        for _ in range(20):
            sampler.sample()
    except StoreError as error:
        return str(error)
    return "no error"
