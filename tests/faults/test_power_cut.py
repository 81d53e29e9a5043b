"""The power fails at every moment of a workload: all that was promised is on the disk, and the store opens again.

shim.c traces what is written and synced; power_cut.py derives what a disk would hold and checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunChild = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.nightly)])
def test_what_was_promised_survives_a_power_cut(stride: int, run_child: RunChild, tmp_path: Path) -> None:
    reports = run_child("power_cut.py", tmp_path, "cut", str(stride))
    assert {report["kept"] for report in reports} == {"nothing", "some"}
    assert not wrong(reports)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_what_was_promised_after_a_failed_sync_survives_a_power_cut(
    stride: int, run_child: RunChild, tmp_path: Path
) -> None:
    reports = run_child("power_cut.py", tmp_path, "failed_sync", str(stride))
    assert {report["ending"] for report in reports} == {"crash", "go on"}
    assert not wrong(reports)


def wrong(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len(reports) > 20
    return [report for report in reports if report["problems"]][:10]
