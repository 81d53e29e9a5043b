"""Two actors, a server and a reader, killed at random, over a link that does what links do."""

from pathlib import Path

import pytest

from understudy.cli import main
from understudy.selftest import chain_test
from understudy.selftest.chain_test import FAULTS, run_chain_test


@pytest.mark.parametrize("events", [8, pytest.param(20, marks=pytest.mark.nightly)])
def test_events_lose_nothing(events: int, tmp_path: Path) -> None:
    report = run_chain_test(tmp_path, events=events, seed=1)
    assert report.ok, report
    assert report.num_events == events
    assert report.durable == report.recorded > 15 * events
    assert report.consumed > 15 * events


@pytest.mark.nightly
@pytest.mark.parametrize("encoded", [False, True])
def test_three_hundred_events_lose_nothing(encoded: bool, tmp_path: Path) -> None:
    report = run_chain_test(tmp_path, events=300, seed=2, encoded=encoded)
    assert report.ok, report
    assert set(report.events) == set(FAULTS)


def test_the_command_prints_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crash-test", "--chain", "--kills", "2", "--directory", str(tmp_path), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "2 events" in out
    assert "lost 0, duplicated 0, out of order 0" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_actors_that_tell_too_early_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain test can fail: it counts what was said to be recorded and was not."""
    monkeypatch.setattr(chain_test, "FAULTS", {"kill actor-1": 1, "kill actor-2": 1})
    report = run_chain_test(tmp_path, events=8, seed=4, report_early=True)
    assert report.lost > 0
    assert not report.ok


@pytest.mark.nightly
def test_a_spool_that_loses_a_file_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks of a killed actor that the server does not have yet are gone; the link is down, so there are some."""
    start = chain_test._Chain._start

    def lose_and_start(chain: chain_test._Chain, name: str) -> None:
        for path in (tmp_path / "spool" / name).glob("*/*.safetensors"):
            path.unlink()
        start(chain, name)

    def never(chain: chain_test._Chain, seconds: float, end: object) -> None: ...

    monkeypatch.setattr(chain_test._Chain, "_start", lose_and_start)
    monkeypatch.setattr(chain_test._Chain, "_end_fault_after", never)
    monkeypatch.setattr(chain_test, "FAULTS", {"refuse": 1, "kill actor-1": 1, "kill actor-2": 1})
    report = run_chain_test(tmp_path, events=8, seed=5)
    assert report.lost > 0
    assert report.duplicated == report.out_of_order == report.different == 0
