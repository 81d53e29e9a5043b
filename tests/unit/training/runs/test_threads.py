"""How many CPU threads torch uses: as asked, as OMP_NUM_THREADS says, else what pays for the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs import threads as module
from understudy.training.runs.config import ConfigError
from understudy.training.runs.threads import available_cores, choose_threads, pin_threads, use_threads


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that it is set back
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "large", "environment", "cores", "num", "said"),
    [
        (3, False, {"OMP_NUM_THREADS": "2"}, 8, 3, "torch uses 3 CPU threads: as asked by --threads"),
        (None, True, {"OMP_NUM_THREADS": "2,1"}, 8, 2, "torch uses 2 CPU threads: as OMP_NUM_THREADS says"),
        (None, False, {}, 8, 1, "the network is small (8 cores available); --threads changes it"),
        (None, True, {}, 2, 2, "torch uses 2 CPU threads: 2 cores available; --threads changes it"),
        (None, True, {"OMP_NUM_THREADS": "many"}, 1, 1, "torch uses 1 CPU thread: 1 core available"),
        (None, True, {}, 64, module.MAX_THREADS, "64 cores available"),
    ],
)
def test_the_user_decides_first_and_then_what_pays(
    asked: int | None, large: bool, environment: dict[str, str], cores: int, num: int, said: str
) -> None:
    chosen = choose_threads(asked, large=large, environment=environment, cores=cores)
    assert chosen.num == num
    assert said in str(chosen)


def test_torch_uses_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_threads(2, large=False).num == 2
    assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    use_threads(None, large=False)
    assert torch.get_num_threads() == 1


def test_a_pinned_number_is_kept_by_the_runs_of_the_process() -> None:
    pin_threads(2)
    assert use_threads(None, large=False).num == torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("membership", "limits", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),  # a container sees its own cgroup as the root
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),  # half a core is one thread
        ("0::/a\n", {"a/cpu.max": "6400000 100000\n"}, None),  # more than there are
        ("3:cpu,a:/x\n0::/\n", {"cpu,a/cpu.cfs_quota_us": "100000\n", "cpu,a/cpu.cfs_period_us": "100000\n"}, 1),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_cores_are_those_of_the_affinity_and_the_cgroups_quota(
    tmp_path: Path, membership: str, limits: dict[str, str], cores: int | None
) -> None:
    root = tmp_path / "cgroup"
    for name, text in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "membership").write_text(membership)
    mine = len(os.sched_getaffinity(0))
    assert available_cores(root, tmp_path / "membership") == (mine if cores is None else cores)
    assert available_cores(root, tmp_path / "not there") == mine


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads: expected a number from 1, got 0; leave it out to have it chosen"):
        RLPDConfig(threads=0)
