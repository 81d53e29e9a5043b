"""What is written of a policy while a run goes on, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.unit.policies.openvla.make_checkpoint import KEY, SPEC, make_checkpoint
from tests.unit.training.onpolicy.making import make_config

from understudy.policies import lora
from understudy.policies.config import LoraConfig
from understudy.policies.openvla import OpenVLAPolicy
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.ranks import single_rank
from understudy.training.onpolicy.policy_files import ADAPTER, is_one_file, save_policy
from understudy.training.runs.run import POLICY_DIR, Run


def test_an_adapter_is_saved_without_its_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Billions of frozen weights are neither gathered nor merged to write the few that are trained."""
    directory = make_checkpoint(tmp_path / "checkpoint")
    policy = OpenVLAPolicy.load(directory, SPEC, unnorm_key=KEY, cameras=("image",))
    lora.add_lora(policy.model, LoraConfig(rank=2))
    engine = Engine(policy.model, EngineConfig(), single_rank("cpu"))
    run = Run.create(tmp_path / "run", "grpo", make_config(directory))
    trained = engine.parameters(trainable_only=True)
    assert not is_one_file(policy)
    with monkeypatch.context() as strict:
        strict.setattr(lora, "merged_state", None)  # raises if it is called
        save_policy(policy, run, trained, adapted=True, last=False)
    assert not (run.path / POLICY_DIR).exists()
    again = OpenVLAPolicy.load(directory, SPEC, unnorm_key=KEY, cameras=("image",))
    lora.load_adapter(again.model, run.path / ADAPTER)
    save_policy(policy, run, engine.parameters(), adapted=True, last=True)
    assert (run.path / POLICY_DIR).is_dir()
