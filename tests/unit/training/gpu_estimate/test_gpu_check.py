"""The checks of `understudy doctor --gpu`, on the CPU: each finds what is right, and a planted mistake."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from understudy.policies.openvla.config import OpenVLAConfig
from understudy.policies.vla import VLAConfig
from understudy.policies.vla.model import VLAModel
from understudy.training.gpu_estimate import gpu_check
from understudy.training.gpu_estimate.gpu_check import (
    ATTENTIONS,
    Load,
    attention_row,
    capability_row,
    check_all_reduce,
    check_attention,
    check_device,
    check_matmul,
    matmul_row,
    no_gpu,
    speed_row,
    update_row,
    versions,
)
from understudy.training.gpu_estimate.gpus import KNOWN
from understudy.training.gpu_estimate.measured_update import NETWORK, estimated_bytes, measure_update
from understudy.training.gpu_estimate.network import published_openvla

CPU = torch.device("cpu")
BY_NAME = {attention.name: attention for attention in ATTENTIONS}
SMALL = replace(
    NETWORK, vision_hidden=128, vision_layers=2, vision_heads=4, hidden=192, layers=2, heads=4, block_steps=4
)
LOAD = Load(
    matmul_size=64,
    copy_bytes=2**20,
    attentions=(BY_NAME["vla vision"], BY_NAME["vla language"]),
    network=SMALL,
    rows=4,
)


class Wrong(TorchFunctionMode):
    """A device whose products and attention are five percent too large, but for float64, which the checks trust."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__, functional.scaled_dot_product_attention):
            return found if found.dtype == torch.float64 else found * 1.05
        return found


class Asked(TorchFunctionMode):
    """Notes the shapes and masks that attention is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int, int, bool]] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            _, heads, tokens, size = args[0].shape
            self.seen.add((heads, size, tokens, kwargs.get("attn_mask") is not None))
        return function(*args, **kwargs)


def test_every_check_of_a_device_is_a_row() -> None:
    rows = {row.name: row for row in check_device(CPU, LOAD)}
    names = ["matmul", "TFLOP/s", "GB/s", "update", "vla vision", "vla language"]
    assert [name for name in names if not any(name in one for one in rows)] == []
    assert {row.state for row in rows.values()} == {"good"}
    assert {row.part for row in rows.values()} == {"cpu"}
    assert "attention by flash, math" in rows["vla vision bfloat16"].found
    estimated = estimated_bytes("float32", network=SMALL, rows=4)
    assert f"understudy plan says {estimated / 1e6:,.1f}" in rows["float32 update"].found
    assert rows["TFLOP/s"].remedy.startswith("not in the table of understudy plan: give it --speed.tflops")


def test_wrong_numbers_are_found() -> None:
    with Wrong():
        low = check_matmul(CPU, "bfloat16")
        attention = check_attention(CPU, BY_NAME["vla vision"], "float32")
        high = check_matmul(CPU, "float32")
    assert (low.state, high.state, attention.state) == ("broken", "broken", "broken")
    assert "relative error 5.0e-02" in attention.found
    assert "attach this output to a report" in attention.remedy


def test_a_check_that_fails_is_a_row_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore")

    monkeypatch.setattr(gpu_check, "check_matmul", fails)
    *failed, after = islice(check_device(CPU, LOAD), 3)
    assert [row.state for row in failed] == ["broken", "broken"]
    assert failed[0].found == "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"
    assert "nvidia-smi" in failed[0].remedy
    assert (after.name, after.state) == ("vla vision float32", "good")


def test_attention_is_tried_as_the_policies_ask_for_it() -> None:
    with torch.device("meta"):
        model = VLAModel(VLAConfig(cameras=("image",)), image_size=128, proprio_size=0, action_size=7, num_words=9)
        image = torch.zeros(1, 128, 128, 3, dtype=torch.uint8)
        with Asked() as asked:
            model({"image/image": image, "words": torch.zeros(1, 16, dtype=torch.int64)})
    ours = {(one.heads, one.size, one.tokens, one.mask == "dense") for one in ATTENTIONS if "vla" in one.name}
    assert asked.seen == ours

    openvla = published_openvla(OpenVLAConfig(), proprio_size=None)
    language = openvla.language_model.config
    for name in ("llama causal", "llama padded"):
        assert (BY_NAME[name].heads, BY_NAME[name].size) == (language.num_attention_heads, language.head_dim)
    vision = openvla.vision_backbone
    for name, tower in (("dinov2", vision.featurizer), ("siglip", vision.fused_featurizer)):
        shape, ours_is = tower.shape, BY_NAME[name]
        assert (ours_is.heads, ours_is.heads * ours_is.size) == (shape.num_heads, shape.width)
        assert ours_is.tokens == shape.num_patches + shape.num_registers + shape.class_token


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_memory_of_an_update_is_beside_its_estimate(precision: Any) -> None:
    estimated = estimated_bytes(precision, network=SMALL, rows=4)
    measured = measure_update(CPU, precision, network=SMALL, rows=4)
    assert estimated == pytest.approx(measured.peak_bytes, rel=0.05)
    assert measured.metrics["gradient"] > 0
    assert measured.seconds > 0


def test_ranks_sum_over_a_real_process_group() -> None:
    row = check_all_reduce(2, "cpu", num_bytes=2**16, gpu=None)
    assert row.state == "good"
    assert row.found.startswith("right over gloo")
    failed = check_all_reduce(2, "cuda:0", num_bytes=2**16, gpu=None)  # one device for two ranks
    assert failed.state == "broken"
    assert "use cuda, so that each takes its own" in failed.found
    assert "NCCL_DEBUG=INFO" in failed.remedy


@pytest.mark.parametrize(
    ("there", "found", "remedy"),
    [
        ({}, "it is a build for CPUs alone", "pip install --force-reinstall torch"),
        ({"driver": "580.65"}, "it is a build for CPUs alone", "PyPI has the build for CUDA)"),
        ({"cuda": "13.0"}, "nvidia-smi finds no driver", "docker run --gpus all"),
        ({"cuda": "13.0", "driver": "580.65", "visible": ""}, "CUDA_VISIBLE_DEVICES is ''", "unset CUDA_VISIBLE"),
        ({"cuda": "13.0", "driver": "470.1"}, "the driver is 470.1", "install a newer one"),
    ],
)
def test_without_a_gpu_it_says_what_to_do(there: dict[str, str], found: str, remedy: str) -> None:
    row = no_gpu(**{"cuda": None, "driver": None, "visible": None, "error": "so torch says", **there})  # type: ignore[arg-type]
    assert row.state == "missing"
    assert found in row.found
    assert row.found.endswith("(so torch says)")
    assert remedy in row.remedy
    assert ("no driver either" in row.remedy) == (there == {})


def test_what_a_row_says_of_its_numbers() -> None:
    assert matmul_row("cuda:0", "float32", 1e-6).state == "good"
    tf32 = matmul_row("cuda:0", "float32", 3e-4)
    assert (tf32.state, "TF32" in tf32.remedy) == ("careful", True)
    assert matmul_row("cuda:0", "bfloat16", 3e-2).state == "broken"
    alone = attention_row("cuda:0", "siglip float32", ["math"], [], {"flash": "Expected bfloat16"})
    assert alone.state == "careful"
    assert "flash: Expected bfloat16" in alone.found
    assert "smaller micro batch" in alone.remedy
    assert attention_row("cuda:0", "siglip float32", [], [], {}).state == "broken"
    slow = speed_row("cuda:0", "TFLOP/s", 80.0, KNOWN["A100-80GB"].tflops, 0.4, "bfloat16 80", "--speed.tflops")
    assert slow.state == "careful"
    assert "the table says 312, of which plan counts on 40%" in slow.found
    assert "--speed.tflops 80" in slow.remedy
    assert speed_row("cuda:0", "TFLOP/s", 200.0, 312.0, 0.4, "", "--speed.tflops").state == "good"
    assert update_row("cuda:0", "float32 update", 100, 95, 1.0, 1.0).state == "good"
    assert update_row("cuda:0", "float32 update", 120, 95, 1.0, 1.0).state == "careful"
    assert torch.__version__ in versions().found


def test_a_torch_without_kernels_for_a_gpu_is_named() -> None:
    built = ["sm_80", "sm_86", "sm_90", "compute_90"]
    assert capability_row("cuda:0", (8, 9), built).state == "good"  # those of 8.6 run on it
    blackwell = capability_row("cuda:0", (12, 0), built)
    assert blackwell.state == "careful"
    assert "this torch has kernels for sm_80, sm_86" in blackwell.found
    old = capability_row("cuda:0", (7, 5), ["sm_75", "sm_80"])
    assert "--engine.precision float32" in old.remedy
