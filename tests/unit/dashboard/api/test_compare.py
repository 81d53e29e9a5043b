"""Runs are compared by config, curves and score."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.dashboard.stores import make_store

from understudy.dashboard.api.compare import compare
from understudy.dashboard.api.targets import Target
from understudy.training.runs.metrics import MetricLog
from understudy.training.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class _Networks:
    lr: float = 1e-3
    hidden: tuple[int, ...] = (8, 8)


@dataclass(frozen=True, kw_only=True)
class _Config:
    """A small config; the page knows none of its options."""

    env: str = "toy"
    steps: int = 10
    sac: _Networks = field(default_factory=_Networks)


def test_runs_are_compared_by_config_and_score(tmp_path: Path) -> None:
    runs = []
    for name, rate in (("one", 1e-3), ("two", 1e-4)):
        run = Run.create(tmp_path / name, "rlpd", _Config(sac=_Networks(lr=rate)))
        log = MetricLog(run.metrics)
        log.write("train", step=1, update=1, loss=rate)
        log.write(
            "evaluation",
            step=1,
            update=1,
            success=0.5,
            low=0.1,
            high=0.9,
            fingerprint={"code": name},
            episode_results=[],
        )
        log.close()
        make_store(run.store)
        runs.append(Target(run.path, name))
    found = compare([*runs, Target(tmp_path / "nothing", "nothing")])
    assert [run["name"] for run in found["runs"]] == ["one", "two"]
    table = {row["name"]: row for row in found["config"]}
    assert table["sac.lr"] == {"name": "sac.lr", "values": [1e-3, 1e-4], "differs": True}
    assert not table["env"]["differs"]
    assert table["sac.hidden"]["values"] == [[8, 8], [8, 8]]
    assert found["runs"][1]["evaluations"][0]["fingerprint"] == {"code": "two"}
    assert found["runs"][0]["train"]["values"]["loss"] == [1e-3]
    assert [one["step"] for one in found["runs"][0]["course"]][-1] == 54  # practice, with its intervals
    assert all(one["alone"]["low"] <= one["alone"]["high"] for one in found["runs"][0]["course"])
    for target in runs:
        target.close()
