"""What a learner does with one batch: where ratios and KL begin, and what it leaves if a gradient is no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.sides import SidesWorld
from tests.unit.policies.openvla.make_checkpoint import KEY, SPEC, instructions, make_checkpoint
from tests.unit.training.onpolicy.making import TINY, learn, make_learner, make_rollouts

from understudy.policies.config import LoraConfig
from understudy.policies.lora import add_lora
from understudy.policies.openvla import OpenVLAPolicy
from understudy.policies.vla import VLAPolicy
from understudy.processes.stop import Stopped
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.errors import NonFiniteError, RanksError
from understudy.training.onpolicy.policy_gradient_learner import PolicyGradientLearner
from understudy.training.onpolicy.reference_policy import AdapterOff

LOW = EngineConfig(precision="bfloat16", learning_rate=1e-2)
WHOLE: dict[str, Any] = {"ppo_epochs": 1, "ppo_mini_batch_size": 100, "ppo_micro_batch_size": 3}


def openvla(directory: Path, **options: Any) -> OpenVLAPolicy:
    given = {"unnorm_key": KEY, "cameras": ("image",), "block_steps": 2, "dtype": "bfloat16", **options}
    policy = OpenVLAPolicy.load(directory, SPEC, **given)
    add_lora(policy.model, LoraConfig(rank=2))
    policy.version = 0
    return policy


def small_vla() -> tuple[VLAPolicy, Any, list[str]]:
    world = SidesWorld(tasks=2)
    told = [task.instruction for task in world.suite.tasks]
    policy = VLAPolicy.new(TINY, world.step_spec, told, seed=0)
    policy.version = 0
    return policy, world.step_spec, told


def test_ratios_begin_at_one_where_the_sampler_rounds_differently() -> None:
    """Its log-probs are kept, and weigh the terms. Here it acts in float32, and the learner computes in bfloat16."""
    found = []
    for choice in (False, None):
        policy, spec, told = small_vla()
        rollouts = make_rollouts(policy, spec, told)
        found.append(learn(make_learner(policy, engine=LOW, recompute_log_probs=choice, **WHOLE), rollouts))
    recorded, recomputed = found
    assert recorded["ratio_spread"] > 1e-4
    assert "sampler_ratio" not in recorded
    assert (recomputed["ratio"], recomputed["ratio_spread"], recomputed["approx_kl"]) == (1.0, 0.0, 0.0)
    assert recomputed["sampler_ratio_spread"] == pytest.approx(recorded["ratio_spread"], rel=1e-3)
    assert 0 < recomputed["sampler_kl"] < 0.01
    assert recomputed["sampler_clip"] == 0.0
    assert recomputed["policy_loss"] == pytest.approx(recorded["policy_loss"], abs=1e-3)  # the weights make up for it


def test_recorded_ratios_are_the_default_in_float32() -> None:
    policy, spec, told = small_vla()
    metrics = learn(make_learner(policy, **WHOLE), make_rollouts(policy, spec, told))
    assert "sampler_ratio" not in metrics
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("parts", [{}, {"l1_head": True}])
def test_without_its_adapter_a_policy_is_the_reference(parts: dict[str, bool], tmp_path: Path) -> None:
    """No second copy; KL is exactly 0 until something is learned, and is then measured from the same start, of which
    the head of scales is a part."""
    policy = openvla(make_checkpoint(tmp_path / "checkpoint", **parts), block_steps=8 if parts else 2)  # type: ignore[arg-type]
    rollouts = make_rollouts(policy, SPEC, instructions(2))
    learner = make_learner(policy, engine=LOW, kl_in="loss", kl_coef=0.1, **WHOLE)
    learner.reference = AdapterOff(policy)
    trained = {name for name, value in policy.model.named_parameters() if value.requires_grad}
    first, second = learn(learner, rollouts, 0), learn(learner, rollouts, 1)
    assert (first["kl"], first["kl_loss"]) == (0.0, 0.0)
    assert second["kl"] > 1e-6
    assert {name for name, value in policy.model.named_parameters() if value.requires_grad} == trained
    with learner.reference.evaluating() as reference:
        assert reference is policy
        heads = {name: value.clone() for name, value in policy.model.named_parameters() if "scale_head" in name}
    for name, value in policy.model.named_parameters():
        assert name not in heads or not torch.equal(heads[name], value)  # the trained ones are back


def test_a_batch_that_was_stopped_in_its_middle_goes_on_from_where_its_ratios_began() -> None:
    def make() -> PolicyGradientLearner:
        policy, _, _ = small_vla()
        return make_learner(policy, engine=LOW, ppo_epochs=2, ppo_mini_batch_size=4, ppo_micro_batch_size=2)

    straight, stopped, resumed = make(), make(), make()
    _, spec, told = small_vla()
    rollouts = make_rollouts(straight.policy, spec, told)
    expected = learn(straight, rollouts)

    def check() -> None:
        if stopped.engine.num_updates == 2:
            raise Stopped

    added = stopped._exchange.add(rollouts)
    with pytest.raises(Stopped):
        stopped.learn([added[rollout.ticket.number] for rollout in rollouts], 0, check)
    resumed.engine.restore(stopped.engine.state())
    resumed.learning = stopped.learning
    assert learn(resumed, rollouts) == expected
    weights = resumed.engine.parameters()
    assert all(np.array_equal(value, weights[name]) for name, value in straight.engine.parameters().items())


def test_a_gradient_that_is_no_number_ends_the_run_with_its_batch(tmp_path: Path) -> None:
    policy, spec, told = small_vla()
    learner = make_learner(policy, failures=tmp_path / "failures", ppo_epochs=1)
    rollouts = make_rollouts(policy, spec, told)
    with torch.no_grad():
        policy.model.text.embed_tokens.weight[-1] = torch.nan  # the last bin
    with pytest.raises(
        NonFiniteError, match=r"update 1: .* is nan, .*update-000001-rank-0\.npz holds the 4 rows"
    ) as error:
        learn(learner, rollouts)
    assert not isinstance(error.value, RanksError)  # which a cluster would try again, with the same batch
    assert learner.engine.num_updates == 0
    with np.load(tmp_path / "failures" / "update-000001-rank-0.npz") as kept:
        assert kept["observation/camera"].shape == (4, 16, 16, 3)
        assert set(kept["instruction"]) <= set(told)
        assert kept["replay/tokens"].shape == (4, 3, 1)
        assert kept["finite"].tolist() == [False, False]
        assert np.isfinite(kept["sampler_log_prob"]).all()
