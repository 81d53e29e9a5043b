"""One device, chosen once. What `auto` takes on a machine with GPUs, tests/fake_cuda says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.core import UnderstudyError
from understudy.training.distributed.ranks import Ranks, single_rank
from understudy.training.offpolicy.cloning import CloningRunConfig
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.onpolicy.sft import SFTConfig
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import choose_device
from understudy.training.runs.run import Run


def test_auto_is_the_default_of_every_run() -> None:
    given = (RLPDConfig(), CloningRunConfig(), SFTConfig(), OnPolicyConfig(policy="policy"))
    assert {config.device for config in given} == {"auto"}


def test_says_what_it_chose_and_why() -> None:
    assert str(choose_device("cpu")) == "torch uses cpu: as asked by --device"
    if not torch.cuda.is_available():
        assert str(choose_device("auto")) == "torch uses cpu: torch sees no GPU; --device changes it"
        with pytest.raises(ConfigError, match=r"device: torch cannot use 'cuda:0' here \(.+\); use cpu"):
            choose_device("cuda")


def test_ranks_do_not_share_a_device_by_name() -> None:
    with pytest.raises(ConfigError, match="'cuda:1' is one device, and there are 2 ranks; use cuda, so that each"):
        choose_device("cuda:1", num_ranks=2)


def test_a_single_rank_takes_the_device_that_is_asked_for() -> None:
    assert single_rank("meta").device == torch.device("meta")


def test_a_run_and_its_ranks_have_one_device(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy.safetensors")
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, device="cpu"))
    with pytest.raises(UnderstudyError, match=r"the run is to use cpu, its ranks have meta; join\(device='cpu'\)"):
        OnPolicyRun(run, ranks=Ranks(0, 1, device="meta"))
