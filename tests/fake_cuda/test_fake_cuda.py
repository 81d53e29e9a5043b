"""The product on fake CUDA tensors, in a process of its own, because the shim must be loaded before torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fake_cuda.build import problem

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
MISTAKES = {
    "words on the host": "FakeTensorDeviceMismatchError: .* cuda:0 and cpu",
    "inputs on another GPU": "FakeTensorDeviceMismatchError: .* cuda:1 and cuda:0",
    "a head of another dtype": r"WrongDtypeError: aten\.(linear|addmm).default: torch.bfloat16 and torch.float32",
    "bfloat16 switched off": "WrongDtypeError: matrix products in torch.float32; the engine's is bfloat16",
    "trained weights of bfloat16": "WrongDtypeError: trained in torch.bfloat16; small updates round to nothing",
    "a number read in each micro batch": "HostSyncError: the host waits for the device: reads a number",
    "a copy to the host in each micro batch": r"HostSyncError: .*: copies \[1, 3, 1\] to the host",
    "a dense mask": r"DenseMaskError: attention: a mask of \[\d+, 1, \d+, \d+\] in memory",
    "a frozen adapter": r"NotTrainedError: \d+ weights of the adapter are not in the optimizer: .*lora_A",
    "float32 logits of the whole vocabulary": r"TooLargeError: logits \[\d+, \d+, \d+\] of the whole vocabulary",
    "a second network as the reference": r"TooLargeError: the reference takes [01]\.\d times the memory of the policy",
    "an unsharded copy of the weights": r"TooLargeError: the rank holds \d\.\d times its shards",
}


def run(out: Path, *names: str) -> dict[str, Any]:
    if (why := problem()) is not None:
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.fake_cuda.cases", str(out), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("fake") / "found.json")


def test_a_gpu_is_taken_where_there_is_one_and_each_rank_has_its_own(found: dict[str, Any]) -> None:
    assert found["device"] == {
        "alone": "torch uses cuda:0: a fake GPU, GPU 0 of 8; --device changes it",
        "fourth": "cuda:3",
        "ninth": "device: rank 8 of this node has no GPU of its own, torch sees 8; start no more ranks, or use "
        "--device cpu",
        "ranks": "cuda:0",
    }


def test_a_run_that_does_not_fit_is_announced_before_it_starts(found: dict[str, Any]) -> None:
    assert found["warning"]["large"] == ""
    assert re.match(
        r"warning: this run is estimated to need 1\.\d GiB on each GPU .* a fake GPU", found["warning"]["small"]
    )


@pytest.mark.parametrize("name", ["small_vla", "openvla_lora", "openvla_autoregressive", "openvla_full"])
def test_acting_and_learning_on_a_gpu(found: dict[str, Any], name: str) -> None:
    """All on one device, products in bfloat16, what is trained in float32, and no waiting within micro batches."""
    one = found[name]
    assert one.keys() >= {"updates", "trained"}, one
    assert (one["updates"], one["trained"]) == (1, ["torch.float32"])
    assert list(one["products"]) == ["torch.bfloat16"]
    assert one["learning syncs"] == 4  # the log-probs of two micro batches, the gradient's norm, the metrics
    assert one["kernels"]["flash"] > 0
    assert one["fused steps"] == 1


def test_a_base_stays_in_bfloat16(found: dict[str, Any]) -> None:
    assert found["openvla_lora"]["frozen"] == ["torch.bfloat16"]


def test_eight_rows_with_five_prompts_are_one_pass(found: dict[str, Any]) -> None:
    assert [found[name]["acting passes"] for name in ("small_vla", "openvla_lora", "openvla_full")] == [1, 1, 1]


def test_causal_attention_takes_the_flash_kernel_alone(found: dict[str, Any]) -> None:
    assert "efficient" not in found["openvla_autoregressive"]["kernels"]


def test_an_adapter_needs_no_second_network_as_the_reference(found: dict[str, Any]) -> None:
    assert found["reference"]["share"] == 0


def test_a_rank_holds_its_shards_and_gathers_them_to_act(found: dict[str, Any]) -> None:
    """Weights and two moments of an eighth; the rows of small tensors are not divisible by eight."""
    fsdp = found["fsdp"]
    assert fsdp["left"] == fsdp["shards"] < 3 * fsdp["whole"] / 4
    assert fsdp["gathered"] > fsdp["whole"] / 2  # in bfloat16


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(found: dict[str, Any], name: str) -> None:
    error = found[f"mistake: {name}"].get("error", "none")
    assert re.match(MISTAKES[name], error), error
