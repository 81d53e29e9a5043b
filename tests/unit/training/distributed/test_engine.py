"""The engine in one process: equal to a plain loop of torch, and each option does what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.training.distributed.small import Net, rows, train

from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.errors import NonFiniteError, RanksError
from understudy.training.distributed.ranks import single_rank
from understudy.training.runs.checkpoint import read_checkpoint, write_checkpoint


def make(module: torch.nn.Module | None = None, **options: object) -> Engine:
    given = {"learning_rate": 1e-2, **options}
    return Engine(Net() if module is None else module, EngineConfig(**given), single_rank())  # type: ignore[arg-type]


def bare(
    net: Net, *, updates: int = 5, clip: float = 1.0, lr: float = 1e-2, decay: float = 0.0, betas=(0.9, 0.999)
) -> list[list[float]]:
    """The loop that anybody would write."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=decay, betas=betas)
    inputs, weights = rows(7)
    said = []
    for _ in range(updates):
        loss = (weights * (net(inputs)["out"] - 1.0).square()).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        said.append([loss.item(), norm.item()])
    return said


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_equals_a_plain_loop() -> None:
    engine, net = make(), Net()
    assert train(engine, single_rank(), micro_batches=1) == bare(net)
    assert same_weights(engine.module, net)
    assert engine.num_updates == 5


def test_micro_batches_add_up() -> None:
    engine, net = make(Net().double()), Net()
    said = train(engine, single_rank(), micro_batches=4, dtype=torch.float64)
    np.testing.assert_allclose(said, bare(net), rtol=1e-5)


@pytest.mark.parametrize(
    ("option", "plain"),
    [
        ({"learning_rate": 3e-2}, {"lr": 3e-2}),
        ({"weight_decay": 0.5}, {"decay": 0.5}),
        ({"betas": (0.5, 0.9)}, {"betas": (0.5, 0.9)}),
        ({"gradient_clip": 0.1}, {"clip": 0.1}),
        ({"gradient_clip": None}, {"clip": float("inf")}),
    ],
)
def test_options_of_the_optimizer(option: dict, plain: dict) -> None:
    engine, net, usual = make(**option), Net(), make()
    assert train(engine, single_rank(), micro_batches=1, updates=3) == bare(net, updates=3, **plain)
    assert same_weights(engine.module, net)
    train(usual, single_rank(), micro_batches=1, updates=3)
    assert not same_weights(engine.module, usual.module)


def test_warmup_rises_in_a_line() -> None:
    engine = make(warmup_updates=4)
    rates = []
    for _ in range(6):
        rates.append(engine.learning_rate)
        train(engine, single_rank(), updates=1)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    slow, net = make(warmup_updates=4), Net()
    train(slow, single_rank(), updates=1, micro_batches=1)
    bare(net, updates=1, lr=0.0025)
    assert same_weights(slow.module, net)


def test_bfloat16_computes_in_less_and_keeps_the_weights() -> None:
    low, high = make(precision="bfloat16"), make()
    inputs, _ = rows(7)
    out = low.forward(inputs)["out"]
    assert out.dtype == torch.float32
    exact = high.forward(inputs)["out"]
    assert not torch.equal(out, exact)
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)
    assert make(torch.nn.Linear(4, 1), precision="bfloat16").forward(inputs).dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in low.module.parameters())
    np.testing.assert_allclose(train(low, single_rank()), train(high, single_rank()), rtol=0.1)


def test_bfloat16_weights_are_trained_in_float32() -> None:
    """In bfloat16, an update by a learning rate such as 5e-6 would round to nothing."""
    engine = make(Net().bfloat16(), precision="bfloat16", learning_rate=5e-6)
    before = {name: value.clone() for name, value in engine.module.named_parameters()}
    train(engine, single_rank())
    assert {value.dtype for name, value in engine.tensors().items() if name != "module/scale"} == {torch.float32}
    for name, value in engine.module.named_parameters():
        if not name.startswith("judge"):
            assert (value != before[name]).double().mean() > 0.9, name


def test_gradient_checkpointing_keeps_less_and_changes_no_bit() -> None:
    usual, again = make(Net(dropout=0.3)), make(Net(dropout=0.3), gradient_checkpointing=True)
    torch.manual_seed(1)
    expected = train(usual, single_rank())
    torch.manual_seed(1)
    assert train(again, single_rank()) == expected
    assert same_weights(usual.module, again.module)
    assert kept_bytes(again) < 0.5 * kept_bytes(usual)
    assert list(again.parameters()) == list(usual.parameters())


def kept_bytes(engine: Engine) -> int:
    """What a forward pass keeps for the backward pass, weights aside."""
    kept = 0
    own = {value.data_ptr() for value in engine.module.parameters()}

    def keep(value: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if value.data_ptr() in own else value.nbytes
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        engine.forward(rows(64)[0])
    return kept


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_blocks_train_to_the_same_numbers(backend: str) -> None:
    usual, compiled = make(), make(compile=backend)
    torch._dynamo.utils.counters.clear()
    np.testing.assert_allclose(train(compiled, single_rank()), train(usual, single_rank()), rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert list(compiled.parameters()) == list(usual.parameters())
    with pytest.raises(RanksError, match="compile: the module has no ModuleList; name the classes in `blocks`"):
        make(torch.nn.Linear(4, 1), compile=backend)
    with pytest.raises(RanksError, match=r"compile: expected the name of a backend of torch\.compile, got 'in ductor'"):
        make(compile="in ductor")


def test_blocks_are_found_by_class() -> None:
    chain = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)])
    with pytest.raises(RanksError, match="the module has no ModuleList; name the classes in `blocks`"):
        make(chain, gradient_checkpointing=True)
    named = make(chain, gradient_checkpointing=True, blocks=("Sequential",))
    assert kept_bytes(named) < kept_bytes(make(Net()))
    with pytest.raises(RanksError, match="no part of class 'Blok'; did you mean 'Block'"):
        make(blocks=("Blok",))


def test_what_is_frozen_stays_out() -> None:
    net = Net()
    net.first.requires_grad_(False)
    before = net.first.weight.clone()
    engine = make(net, weight_decay=0.5)
    train(engine, single_rank())
    assert torch.equal(net.first.weight, before)
    assert not torch.equal(net.head.weight, Net().head.weight)
    assert not [name for name in engine.state() if "first" in name]
    assert "first.weight" not in engine.parameters(trainable_only=True)
    assert "first.weight" in engine.parameters()
    with pytest.raises(RanksError, match="none of its parameters requires a gradient"):
        make(Net().requires_grad_(False))


def test_refuses_a_gradient_that_is_not_finite() -> None:
    engine = make()
    before = engine.parameters()
    engine.backward(engine.forward(torch.full((1, 4), float("nan")))["out"].sum(), last=True)
    with pytest.raises(NonFiniteError, match="update 1: the norm of the gradient is nan, and nothing was changed"):
        engine.step()
    assert all(np.array_equal(before[name], value) for name, value in engine.parameters().items())
    assert train(engine, single_rank(), micro_batches=1) == bare(Net())


def test_backward_and_step_in_order() -> None:
    engine = make()
    with pytest.raises(RanksError, match=r"call backward\(loss, last=True\) first"):
        engine.step()
    engine.backward(engine.forward(rows(2)[0])["out"].sum(), last=False)
    with pytest.raises(RanksError, match="not those of all ranks yet"):
        engine.step()
    engine.backward(engine.forward(rows(2)[0])["out"].sum(), last=True)
    with pytest.raises(RanksError, match="call step first"):
        engine.backward(engine.forward(rows(2)[0])["out"].sum(), last=True)


def test_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    engine = make(Net(dropout=0.3), warmup_updates=8)
    train(engine, single_rank())
    path = write_checkpoint(tmp_path / "state", 5, engine.state(), {}, keep=1)
    engine.save(tmp_path / "saved")
    expected = train(engine, single_rank())
    restored = make(Net(dropout=0.3, seed=9), warmup_updates=8)
    restored.restore(read_checkpoint(path).state)
    assert train(restored, single_rank()) == expected
    assert restored.num_updates == 10
    loaded = make(Net(dropout=0.3, seed=9), warmup_updates=8)
    loaded.load(tmp_path / "saved")
    assert train(loaded, single_rank()) == expected
    assert same_weights(loaded.module, engine.module)


def test_refuses_the_state_of_another_module() -> None:
    engine = make()
    before = engine.state()
    with pytest.raises(RanksError, match=r"module/first.weight: expected \[8, 4\], got \[16, 4\]"):
        engine.restore(make(Net(width=16)).state())
    with pytest.raises(RanksError, match="are only on one side; build the same module as when it was saved"):
        engine.restore(make(torch.nn.Linear(4, 1)).state())
    after = engine.state()
    assert all(np.array_equal(before[name], after[name]) for name in before if name != "random/cpu")


def test_parameters_there_and_back() -> None:
    engine, other = make(), make(Net(seed=1))
    train(engine, single_rank())
    other.load_parameters(engine.parameters())
    assert same_weights(engine.module, other.module)
    assert set(engine.parameters()) == set(Net().state_dict())
    frozen = Net()
    frozen.head.bfloat16().requires_grad_(False)
    low = make(frozen)
    assert low.parameters()["head.weight"].dtype == np.float32
    low.load_parameters(engine.parameters())
    assert torch.equal(low.module.head.weight, engine.module.head.weight.bfloat16())  # type: ignore[union-attr]
    with pytest.raises(RanksError, match="the module has no 'tail'"):
        engine.load_parameters({**engine.parameters(), "tail": np.zeros(1)})
    with pytest.raises(RanksError, match=r"'first\.bias' is missing"):
        engine.load_parameters({"head.bias": np.zeros(1, np.float32)})


def test_parameters_are_a_copy() -> None:
    engine = make()
    before = engine.parameters()
    kept = before["head.weight"].copy()
    train(engine, single_rank())
    assert np.array_equal(before["head.weight"], kept)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallel": "dp"}, "parallel: expected one of none, ddp, fsdp, got 'dp'"),
        ({"precision": "float16"}, "precision: expected one of float32, bfloat16"),
        ({"learning_rate": 0.0}, "learning_rate: expected more than 0"),
        ({"gradient_clip": -1.0}, "gradient_clip: expected more than 0"),
        ({"warmup_updates": -1}, "warmup_updates: expected at least 0"),
        ({"weight_decay": -1.0}, "weight_decay: expected at least 0"),
        ({"offload_parameters": True}, "only shards can be offloaded; use parallel='fsdp'"),
    ],
)
def test_refuses_options(options: dict, said: str) -> None:
    with pytest.raises(RanksError, match=said):
        EngineConfig(**options)


def test_offloads_the_optimizer_where_there_is_another_memory() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RanksError, match="so the state is in host memory already; leave it off"):
            make(offload_optimizer=True)
        return
    engine = make(offload_optimizer=True)
    assert {value.device.type for name, value in engine.tensors().items() if "exp_avg" in name} == {"cpu"}
    assert next(engine.module.parameters()).device.type == "cuda"
