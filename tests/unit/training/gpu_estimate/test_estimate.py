"""Estimates of real networks without weights: what they count is what torch would hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from tests.unit.policies.openvla.make_checkpoint import KEY, make_checkpoint
from tests.unit.training.onpolicy.making import make_config, save_policy
from torch import nn

from understudy.policies.openvla.config import OpenVLAConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.gpu_estimate.duration import Assumptions
from understudy.training.gpu_estimate.estimate import changes_that_fit, episode_steps, estimate, memory_warning
from understudy.training.gpu_estimate.gpus import GIB, KNOWN, Gpus, parse_gpus
from understudy.training.gpu_estimate.network import build_network, published_openvla
from understudy.training.gpu_estimate.traced_fsdp import Shards, shard_numel
from understudy.training.gpu_estimate.traced_pass import trace
from understudy.training.onpolicy.config import AdapterConfig, OnPolicyConfig
from understudy.training.runs.config import ConfigError

ONE = parse_gpus("1xA100-80GB")
ASSUME = Assumptions(episode_steps=12)
LOW = EngineConfig(precision="bfloat16")


@pytest.fixture
def config(tmp_path: Path) -> OnPolicyConfig:
    return make_config(save_policy(tmp_path / "policy.safetensors"))


@pytest.fixture(scope="module")
def openvla(tmp_path_factory: pytest.TempPathFactory) -> OnPolicyConfig:
    directory = make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint")
    options = OpenVLAConfig(unnorm_key=KEY, cameras=("image",), block_steps=2, dtype="bfloat16")
    return OnPolicyConfig(policy=str(directory), openvla=options)


def test_what_a_linear_layer_keeps() -> None:
    """Two rows of 128 numbers: the input, the hidden numbers and the output are multiples of 512 bytes."""
    layer = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 128, bias=False)).to("meta")
    found = trace(layer, lambda: layer(torch.zeros(2, 128, device="meta")), autocast=False, learning=False)
    assert found.forward_flops == 2 * 2 * 128 * 256 * 2
    assert found.activations == 1024 + 2048 + 2048  # the input, and both sides of the ReLU
    learned = trace(layer, lambda: layer(torch.zeros(2, 128, device="meta")), autocast=False)
    assert learned.backward_flops == 3 * 2 * 2 * 128 * 256  # the first layer needs no gradient of its input
    assert learned.gradients == 4 * 128 * 256  # at the highest moment the gradient of the last layer is there
    low = trace(layer, lambda: layer(torch.zeros(2, 128, device="meta")), autocast=True, learning=False)
    assert low.copies == 2 * 2 * 128 * 256
    more = trace(layer, lambda: layer(torch.zeros(2, 128, device="meta")), autocast=False, accumulated=True)
    assert more.gradients == 2 * 4 * 128 * 256


def test_what_fsdp_holds_around_two_blocks() -> None:
    """Three layers of 128 x 128, two of them blocks; gathered, each takes 32 KiB, and a gradient of float32 64 KiB."""
    layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))
    model = nn.Sequential(nn.Linear(128, 128, bias=False), *layers).to("meta")
    shards = Shards(blocks=list(layers), ranks=4, element_bytes=2)
    found = trace(model, lambda: model(torch.zeros(2, 128, device="meta")), autocast=False, shards=shards)
    # The first block has its gradient: gathered are what is outside and itself, and the last gradient is being reduced.
    highest = (2 * 32 + 2 * 64) * 1024
    assert highest < found.peak < highest + 8 * 1024  # with the activations of two rows
    assert not model[0]._forward_hooks
    assert all(value.grad is None for value in model.parameters())


def test_the_first_rank_has_the_most_rows() -> None:
    assert [shard_numel(torch.zeros(6, 5), ranks) for ranks in (1, 4, 64)] == [30, 10, 5]
    assert shard_numel(torch.zeros(()), 8) == 1


def test_it_is_the_published_network() -> None:
    """With the last block of each transformer, its norm and SigLIP's pooling head, it has as many as the files."""
    network = published_openvla(OpenVLAConfig(), proprio_size=None)
    ours = sum(value.numel() for value in network.parameters())
    dino = 4 * 1024**2 + 4 * 1024 + 2 * 1024 * 4096 + 4096 + 1024 + 2 * 1024 + 4 * 1024
    siglip = 4 * 1152**2 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    pool = 1152 + 4 * 1152**2 + 4 * 1152 + 2 * 1152 + 2 * 1152 * 4304 + 4304 + 1152
    assert ours + dino + siglip + pool + 2 * 1024 + 2 * 1152 == 7_541_237_184


def test_each_part_of_an_engine_changes_what_is_held(openvla: OnPolicyConfig) -> None:
    def held(ranks: int = 1, lora: int = 0, **engine: Any) -> Any:
        config = replace(openvla, lora=AdapterConfig(rank=lora), engine=replace(LOW, **engine))
        return estimate(config, Gpus(num=ranks, gpu=KNOWN["A100-80GB"]), ASSUME)

    plain = held()
    learning = plain.memory["learning"]
    trained = plain.size.trained
    assert (learning.parameters, learning.optimizer) == (4 * trained, 8 * trained)
    assert learning.copies > 0  # autocast over float32 weights
    assert held(gradient_checkpointing=True).traced.activations < plain.traced.activations
    assert held(gradient_checkpointing=True).traced.backward_flops > plain.traced.backward_flops
    adapted = held(lora=4)
    assert adapted.size.trained < trained
    assert adapted.memory["learning"].optimizer == 8 * adapted.size.trained
    sharded = held(ranks=4, parallel="fsdp")
    least = -(-plain.size.parameter_bytes // 4)
    assert least < sharded.memory["learning"].parameters < 1.1 * least  # a tensor of one row is on the first rank
    gathered = sharded.memory["acting"].copies  # a block's buffer is gone when there are activations
    assert 2 * plain.size.parameters < gathered < 2.2 * plain.size.parameters
    value = replace(openvla, openvla=replace(openvla.openvla, value_head=True))
    assert build_network(value).size().parameters > plain.size.parameters


def test_prompts_and_rows_cost_activations(openvla: OnPolicyConfig) -> None:
    short = estimate(openvla, ONE, ASSUME)
    long = estimate(openvla, ONE, replace(ASSUME, prompt_tokens=64))
    assert long.traced.activations > short.traced.activations
    few = replace(openvla, algorithm=replace(openvla.algorithm, ppo_micro_batch_size=4))
    assert estimate(few, ONE, ASSUME).traced.activations < short.traced.activations / 4


def test_a_policy_file_is_estimated(config: OnPolicyConfig) -> None:
    found = estimate(config, ONE, ASSUME)
    assert found.fits
    assert found.size.parameters == found.size.trained > 1000
    assert found.work.rows == 16 * 4  # episodes of twelve steps, three at a time
    low = estimate(replace(config, engine=LOW), ONE, ASSUME)
    assert low.durations.phases["log-probs"].seconds > 0  # recomputed in bfloat16 alone
    assert found.durations.phases["log-probs"].seconds == 0


def test_changes_are_found_by_trying(openvla: OnPolicyConfig) -> None:
    config = replace(openvla, engine=LOW)
    found = estimate(config, ONE, ASSUME)
    between = replace(ONE.gpu, memory=int((found.peak * 0.9 + GIB) / 0.95))
    tight = estimate(config, Gpus(num=1, gpu=between), ASSUME)
    assert not tight.fits
    changes = changes_that_fit(tight)
    assert changes
    assert estimate(changes[-1][1], tight.gpus, ASSUME).fits
    assert changes_that_fit(found) == []
    assert changes_that_fit(replace(tight, gpus=Gpus(num=1, gpu=replace(ONE.gpu, memory=GIB)))) == []


def test_a_warning_before_a_run(config: OnPolicyConfig) -> None:
    assert memory_warning(config, ranks=1, gpu="large", memory=24 * GIB) is None
    small = memory_warning(config, ranks=1, gpu="small", memory=GIB // 2)
    assert small is not None
    assert "and small has 0.5; `understudy plan RUN --gpus here` says what to change" in small
    missing = memory_warning(replace(config, policy="/nowhere"), ranks=1, gpu="any", memory=GIB)
    assert missing is not None
    assert "was not estimated: ConfigError: policy: /nowhere is not on this machine" in missing


def test_episodes_are_as_long_as_the_world_says(config: OnPolicyConfig) -> None:
    for env, steps in (("libero:libero_10?size=224", 520), ("toy:press_button", 100)):
        assert episode_steps(replace(config, env=env), Assumptions()) == steps
    assert episode_steps(replace(config, max_steps=7), Assumptions()) == 7
    assert episode_steps(replace(config, max_steps=7), Assumptions(episode_steps=5)) == 5
    with pytest.raises(ConfigError, match=r"not known for 'mine:World'; give --assume.episode-steps"):
        episode_steps(replace(config, env="mine:World", max_steps=None), Assumptions())


def test_an_unknown_network_is_answered_with_the_nearest(config: OnPolicyConfig) -> None:
    with pytest.raises(ConfigError, match="there is no 'openvla-7'; did you mean 'openvla-7b'"):
        build_network(config, published="openvla-7")
