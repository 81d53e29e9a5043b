"""Histories of concurrent writers, readers, samplers, publishers and operators on machines, disks and links that fail.

docs/simulation.md says what is simulated and how to repeat a seed that is printed here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="machine.c interposes the calls of Linux's libc"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc) to make machine.so with"),
]


# Planted defects: those that a few seeds find are planted in every run, all of them at night.
QUICK = ("skip_sync", "skip_directory_sync", "acknowledge_early")
SLOW = ("reuse_version", "forget_fence", "drop_tail", "reuse_chunk_number")


def simulate(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("seeds", "operations"), [("0:100", "40"), pytest.param("0:1000", "200", marks=pytest.mark.nightly)]
)
def test_every_promise_is_kept(seeds: str, operations: str) -> None:
    status, text = simulate("--seeds", seeds, "--operations", operations)
    assert status == 0, text


def test_a_seed_repeats_exactly() -> None:
    results = [json.loads(simulate("--seed", "3")[1].partition("\n{")[2].join("{}")[:-1]) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["num_switches"] > 100


@pytest.mark.parametrize(
    "scenario",
    [
        "first_power_cut_of_a_spool",
        "power_cut_after_chunks_that_no_disk_had",
        "first_power_cut_after_a_publication",
        "read_error_in_a_commit",
        "edit_request_that_cannot_be_removed",
    ],
)
def test_what_was_found_before_stays_mended(scenario: str) -> None:
    status, text = simulate("--scenario", scenario)
    assert status == 0, text


@pytest.mark.parametrize("mutation", [*QUICK, *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW)])
def test_a_planted_defect_is_found(mutation: str) -> None:
    status, text = simulate("--mutation", mutation, "--seeds", "0:1000")
    assert status == 1, text
    assert "seed " in text
