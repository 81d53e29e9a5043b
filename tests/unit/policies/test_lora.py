"""LoRA on any module: what trains, peft's own files, and weights with it merged in."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from tests.unit.policies.openvla import ranks_process
from tests.unit.policies.openvla.make_checkpoint import KEY, SPEC, instructions, make_checkpoint, observations, rngs

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.policies import PolicyError, Sampling
from understudy.policies.config import LoraConfig
from understudy.policies.lora import add_lora, has_lora, load_adapter, merged_state, save_adapter
from understudy.policies.openvla import OpenVLAPolicy
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.launch import launch_function
from understudy.training.distributed.ranks import single_rank

SMALL = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint")


def load(directory: Path, **options: Any) -> OpenVLAPolicy:
    return OpenVLAPolicy.load(
        directory, SPEC, **{"unnorm_key": KEY, "cameras": ("image",), "value_head": True, **options}
    )


def small_vla(**options: Any) -> VLAPolicy:
    spec = StepSpec(
        observation=Spec({"image": ArraySpec(shape=(16, 16, 3), dtype="uint8")}),
        action=Spec(ArraySpec(shape=(2,), dtype="float32", low=-1.0, high=1.0)),
    )
    config = VLAConfig(
        vision_hidden=16, vision_heads=2, hidden=16, heads=2, layers=1, vision_layers=1, value_head=True, **options
    )
    return VLAPolicy.new(config, spec, ["press the handle"], seed=0)


def judge(policy: Any, tokens: Any = None) -> Any:
    """Log-probs and values of some choices."""
    num = 2
    if isinstance(policy, OpenVLAPolicy):
        seen: Any = observations(num)
        said = instructions(num)
    else:
        seen = {"image": np.random.default_rng(0).integers(0, 256, (num, 16, 16, 3), np.uint8)}
        said = ["press the handle"] * num
    shape = (num, policy.block_steps, policy.log_prob_size)
    tokens = np.random.default_rng(1).integers(0, 256, shape, np.int32)
    told = policy.evaluate(seen, said, {"tokens": tokens}, sampling=Sampling())
    return told.log_prob, told.value


def train(policy: Any, updates: int = 3) -> None:
    """Some steps, so that no matrix of the adapter is zero."""
    optimizer = torch.optim.SGD([w for w in policy.model.parameters() if w.requires_grad], lr=0.02)
    for _ in range(updates):
        log_prob, value = judge(policy)
        (-log_prob.mean() + (value - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=["openvla", "vla"])
def policy(request: pytest.FixtureRequest, directory: Path) -> Any:
    return load(directory) if request.param == "openvla" else small_vla()


def test_a_new_adapter_changes_nothing_and_is_all_that_trains(policy: Any) -> None:
    before = [x.detach().clone() for x in judge(policy)]
    frozen = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    add_lora(policy.model, SMALL)
    assert has_lora(policy.model)
    for one, other in zip(judge(policy), before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    trained = {name for name, weight in policy.model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or "value" in name for name in trained)
    assert any("lora_A" in name for name in trained)
    assert any("value" in name for name in trained)
    assert not any("lora_" in name for name in trained if "value" in name or "lm_head" in name)
    train(policy)
    for name, weight in policy.model.named_parameters():
        plain = name.replace(".base_layer", "")
        if plain in frozen and "value" not in name:
            assert torch.equal(weight, frozen[plain]), name
    assert not torch.allclose(judge(policy)[0], before[0], atol=1e-3)


def test_every_linear_but_the_heads_is_a_target(policy: Any) -> None:
    linears = {name for name, layer in policy.model.named_modules() if isinstance(layer, nn.Linear)}
    add_lora(policy.model, SMALL)
    adapted = {name for name, layer in policy.model.named_modules() if hasattr(layer, "lora_A")}
    assert {name for name in linears - adapted if "value" not in name} <= {"language_model.lm_head"}
    assert adapted < linears


def test_rank_alpha_dropout_and_targets(directory: Path) -> None:
    def adapted(config: LoraConfig) -> OpenVLAPolicy:
        policy = load(directory)
        add_lora(policy.model, config)
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(weight, 0.05)
        return policy

    def moved(policy: OpenVLAPolicy) -> float:
        return (judge(policy)[0] - plain).abs().mean().item()

    plain = judge(load(directory))[0]
    queries = adapted(LoraConfig(rank=2, targets=("q_proj", "projector.fc1")))
    names = {name for name, layer in queries.model.named_modules() if hasattr(layer, "lora_A")}
    assert names == {
        "language_model.model.layers.0.self_attn.q_proj",
        "language_model.model.layers.1.self_attn.q_proj",
        "projector.fc1",
    }
    shapes = {weight.shape[0] for name, weight in queries.model.named_parameters() if "lora_A" in name}
    assert shapes == {2}
    weak, strong = (adapted(LoraConfig(rank=2, alpha=alpha, targets=("q_proj",))) for alpha in (0.01, 40.0))
    assert moved(weak) < 0.1 * moved(strong)
    dropping = adapted(LoraConfig(rank=2, dropout=0.5, alpha=40.0))
    first, second = judge(dropping)[0], judge(dropping)[0]
    assert not torch.equal(first, second)
    acted = [
        dropping.act(observations(1), instructions(1), rngs=rngs(1), sampling=Sampling(greedy=True)) for _ in range(2)
    ]
    np.testing.assert_array_equal(acted[0].log_prob, acted[1].log_prob)
    assert dropping.model.training


def test_the_seed_decides_the_first_weights(directory: Path) -> None:
    weights = []
    for seed in (0, 0, 1):
        policy = load(directory)
        add_lora(policy.model, SMALL, seed=seed)
        weights.append(policy.parameters()["projector.fc1.lora_A.default.weight"])
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_an_adapter_comes_back_from_its_files(policy: Any, directory: Path, tmp_path: Path) -> None:
    add_lora(policy.model, SMALL)
    train(policy)
    save_adapter(policy.model, tmp_path / "adapter")
    value = {name: w.detach().clone() for name, w in policy.model.named_parameters() if "value" in name}
    for prepared in (False, True):
        fresh = load(directory) if isinstance(policy, OpenVLAPolicy) else small_vla()
        if prepared:
            add_lora(fresh.model, SMALL, seed=5)
        load_adapter(fresh.model, tmp_path / "adapter")
        assert {n for n, w in fresh.model.named_parameters() if w.requires_grad} == {
            n for n, w in policy.model.named_parameters() if w.requires_grad
        }
        fresh.model.load_state_dict(value, strict=False)
        for one, other in zip(judge(policy), judge(fresh), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def adapted(config: LoraConfig, seed: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(256, 256))
    add_lora(module, config, seed=seed)
    return module


def test_a_save_that_fails_leaves_the_old_adapter(tmp_path: Path) -> None:
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    save_adapter(adapted(SMALL, 0), tmp_path)
    before = config.read_bytes(), weights.read_bytes()
    failed = pytest.raises(PolicyError, match=r"adapter_model\.safetensors: writing failed: File too large")
    with files_up_to(len(before[1]) // 2), failed:  # there is room for the config
        save_adapter(adapted(SMALL, 1), tmp_path)
    assert (config.read_bytes(), weights.read_bytes()) == before
    with files_up_to(len(before[1]) // 2), failed:
        save_adapter(adapted(LoraConfig(rank=4, alpha=16.0), 1), tmp_path)
    with pytest.raises(PolicyError, match=r"adapter_model\.safetensors: expected a file of an adapter, got nothing"):
        load_adapter(adapted(LoraConfig(rank=4, alpha=16.0), 0), tmp_path)  # and no old weights at twice their scale


def test_peft_itself_loads_the_files(directory: Path, tmp_path: Path) -> None:
    policy = load(directory)
    add_lora(policy.model, SMALL)
    train(policy)
    save_adapter(policy.model, tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    fresh = load(directory)
    fresh.model.load_state_dict({n: w for n, w in policy.model.state_dict().items() if "value" in n}, strict=False)
    wrapped = peft.PeftModel.from_pretrained(fresh.model, str(tmp_path / "adapter"))
    given = policy.tensors(observations(2), instructions(2))
    with torch.no_grad():
        torch.testing.assert_close(wrapped(given)[0], policy.model(given)[0], rtol=0, atol=0)


def test_files_of_peft_are_loaded(directory: Path, tmp_path: Path) -> None:
    theirs = peft.get_peft_model(
        load(directory).model,
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    theirs.save_pretrained(str(tmp_path / "adapter"))
    policy = load(directory)
    load_adapter(policy.model, tmp_path / "adapter")
    given = policy.tensors(observations(2), instructions(2))
    with torch.no_grad():
        torch.testing.assert_close(theirs(given)[0], policy.model(given)[0], rtol=0, atol=0)


def test_merged_weights_are_a_plain_checkpoint(directory: Path, tmp_path: Path) -> None:
    policy = load(directory)
    add_lora(policy.model, SMALL)
    train(policy, 5)
    policy.save(tmp_path / "merged")
    names = set(load_file(tmp_path / "merged" / "model.safetensors"))
    original = {name for file in directory.glob("model-*.safetensors") for name in load_file(file)}
    assert names == original
    merged = load(tmp_path / "merged")
    assert not has_lora(merged.model)
    for one, other, before in zip(judge(policy), judge(merged), judge(load(directory)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
        assert not torch.allclose(one, before, atol=1e-3)


def test_merged_state_fits_a_module_without_adapter() -> None:
    policy = small_vla()
    add_lora(policy.model, SMALL)
    train(policy)
    plain = small_vla()
    plain.model.load_state_dict(merged_state(policy.model))
    torch.testing.assert_close(judge(policy)[0], judge(plain)[0], rtol=1e-5, atol=2e-5)


def test_only_the_adapter_and_the_value_head_are_published(directory: Path) -> None:
    policy = load(directory)
    add_lora(policy.model, SMALL)
    published = policy.parameters()
    assert all("lora_" in name or "value_head" in name for name in published)
    newer = policy.with_parameters({name: array + 0.1 for name, array in published.items()}, version=7)
    assert not torch.allclose(judge(newer)[0], judge(policy)[0], atol=1e-3)
    assert sum(array.size for array in published.values()) < 0.5 * sum(w.numel() for w in policy.model.parameters())


def test_adapters_over_bfloat16_are_float32_and_learn_slowly(directory: Path, tmp_path: Path) -> None:
    """In bfloat16 itself, one of fifty numbers would change in twenty updates by a learning rate of 5e-6."""
    policy = load(directory, dtype="bfloat16")
    add_lora(policy.model, SMALL)
    trained = {name: weight for name, weight in policy.model.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert {w.dtype for w in policy.model.parameters() if not w.requires_grad} == {torch.bfloat16}
    engine = Engine(policy.model, EngineConfig(learning_rate=5e-6, precision="bfloat16"), single_rank())
    policy.forward = engine.forward
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    for _ in range(3):
        log_prob, value = judge(policy)
        engine.backward(-log_prob.mean() + (value - 1).square().mean(), last=True)
        engine.step()
    for part in ("lora_A", "lora_B", "value_head"):
        changed = [(before[name] != weight).double().mean() for name, weight in trained.items() if part in name]
        assert torch.stack(changed).mean() > 0.9, part
    save_adapter(policy.model, tmp_path / "adapter")
    again = load(directory, dtype="bfloat16")
    load_adapter(again.model, tmp_path / "adapter")
    assert {w.dtype for n, w in again.model.named_parameters() if "lora_" in n} == {torch.float32}
    log_prob, value = judge(again)  # also without autocast: the heads are float32, and the network is not
    assert (log_prob.dtype, value.dtype) == (torch.float32, torch.float32)


def test_a_sharded_module_trains_as_a_whole_one(directory: Path, tmp_path: Path) -> None:
    """FSDP2 over one rank: the same steps, and the adapter gathered from its shards."""
    whole = load(directory)
    add_lora(whole.model, SMALL)
    train(whole)
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))  # type: ignore[attr-defined]
        sharded = load(directory)
        add_lora(sharded.model, SMALL)
        for layer in sharded.model.language_model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded.model, mesh=mesh)
        assert all(isinstance(weight, DTensor) for weight in sharded.model.parameters())
        train(sharded)
        gathered = {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in sharded.model.state_dict().items()
        }
        save_adapter(sharded.model, tmp_path / "adapter", gathered)
        sharded.save(tmp_path / "merged", gathered)
    finally:
        dist.destroy_process_group()
    again = load(directory)
    load_adapter(again.model, tmp_path / "adapter")
    again.model.load_state_dict({n: w for n, w in gathered.items() if "value" in n}, strict=False)
    torch.testing.assert_close(judge(again)[0], judge(whole)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(judge(load(tmp_path / "merged"))[0], judge(whole)[0], rtol=1e-5, atol=3e-5)


@pytest.mark.nightly  # test_ranks.py trains on two ranks in every run
@pytest.mark.parametrize("parts", [{}, {"l1_head": True}, {"film": True}])
def test_two_ranks_train_as_one(parts: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 over two processes, half of the rows each, by the engine that trains large policies."""
    directory = make_checkpoint(tmp_path / "checkpoint", **parts)  # type: ignore[arg-type]
    monkeypatch.chdir(Path(__file__).parents[3])
    ranks_process.update(directory, tmp_path / "one.npz", "none", single_rank())
    function = "tests.unit.policies.openvla.ranks_process:rank"
    assert launch_function(2, function, checkpoint=str(directory), place=str(tmp_path / "two.npz")) == 0
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "two.npz") as two:
        assert one.files == two.files
        for name in one.files:
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=3e-5, err_msg=name)


def test_what_cannot_be(directory: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"rank": 0}, "rank: expected a number from 1"),
        ({"alpha": 0.0}, "alpha: expected more than 0"),
        ({"dropout": 1.0}, "dropout: expected a share"),
        ({"targets": "linear"}, "targets: expected 'all-linear' or a tuple"),
        ({"targets": ()}, "targets: expected names"),
    ):
        with pytest.raises(PolicyError, match=message):
            LoraConfig(**options)  # type: ignore[arg-type]
    model = load(directory).model
    with pytest.raises(PolicyError, match="no linear layer 'q_prj'; did you mean 'q_proj'"):
        add_lora(model, LoraConfig(targets=("q_prj",)))
    with pytest.raises(PolicyError, match="adapter: the module has none; call add_lora first"):
        save_adapter(model, tmp_path / "none")
    add_lora(model, SMALL)
    with pytest.raises(PolicyError, match="the module has an adapter already"):
        add_lora(model, SMALL)
    with pytest.raises(PolicyError, match=r"adapter_config\.json: expected a file of an adapter, got nothing"):
        load_adapter(model, tmp_path)
    save_adapter(model, tmp_path / "adapter")
    other = nn.Sequential(nn.Linear(4, 4))
    add_lora(other, SMALL)
    with pytest.raises(PolicyError, match=r"expected .*, got .*; it is an adapter of another network"):
        load_adapter(other, tmp_path / "adapter")
    bigger = load(directory).model
    add_lora(bigger, LoraConfig(rank=8))
    with pytest.raises(PolicyError, match=r"expected rank 8 and alpha 16\.0, got 4 and 8\.0"):
        load_adapter(bigger, tmp_path / "adapter")
    os.truncate(tmp_path / "adapter" / "adapter_model.safetensors", 100)
    with pytest.raises(PolicyError, match="expected an adapter of peft"):
        load_adapter(load(directory).model, tmp_path / "adapter")
