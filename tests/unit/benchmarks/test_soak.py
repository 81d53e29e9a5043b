"""The soak: its measure sees a leak and forgives a sawtooth; ten minutes of it are nightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.soak import CURVES, MAX_DRIFT, Sample, SoakReport, draw, drift, prepare, soak

TIMES = np.arange(0.0, 600.0)


def report(memory: np.ndarray) -> SoakReport:
    made = SoakReport(minutes=10)
    for time_s, value in zip(TIMES, memory, strict=True):
        made.samples.append(
            Sample(time_s=time_s, descriptors=60, memory=float(value), disk=20.0, settled=time_s % 60 > 20)
        )
    return made


def test_a_sawtooth_is_flat() -> None:
    assert abs(drift(TIMES, 100 + TIMES % 7)) < 0.01
    assert report(300 + TIMES % 13).ok


def test_a_leak_is_found() -> None:
    leaking = report(300 + 0.1 * TIMES)  # 40 MB from the warm-up to the end
    assert leaking.drift("memory") > MAX_DRIFT
    assert not leaking.ok


def test_a_warm_up_and_processes_that_start_are_left_out() -> None:
    values = np.where(TIMES < 200, 10.0, 300.0)
    values[TIMES % 60 <= 20] = 0.0
    assert report(values).ok


def test_too_few_values_prove_nothing() -> None:
    assert not SoakReport(minutes=10).ok


def test_a_problem_is_no_success() -> None:
    made = report(300 + TIMES % 13)
    made.problems.append("the server ended by itself")
    assert not made.ok


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    draw(report(300 + TIMES % 13), tmp_path / "soak.svg")
    assert (tmp_path / "soak.svg").stat().st_size > 1000


@pytest.mark.nightly
@pytest.mark.serial
def test_ten_minutes_of_soak_are_flat(tmp_path: Path) -> None:
    prepare(tmp_path)
    found = soak(tmp_path, 10.0)
    assert found.problems == []
    assert {name: found.drift(name) < MAX_DRIFT for name in CURVES} == dict.fromkeys(CURVES, True)
    assert min(found.kills.values()) > 0
