"""The memory that `understudy plan` estimates for OpenVLA 7B, against torch's own trackers on fake CUDA tensors.

    python -m benchmarks.plan_trackers [--blocks 2] [--ranks 1 8 64] [--fine-tuning LoRA full]

LoRA and full fine-tuning with the sizes of the recipe `libero-openvla-grpo`, alone and with FSDP on several ranks, with
and without gradient checkpointing. Prints the plan's peak by category and both totals of each phase, GiB on each GPU,
and ends with 1 if they differ by more than 3 %. The trackers watch the product's own Engine
(tests/fake_cuda/tracked.py). Needs a C++ compiler; `--blocks 2` leaves two blocks of each transformer.
"""

# ruff: noqa: E402  # torch is imported after the shim

from __future__ import annotations

from tests.fake_cuda import build

build.load()

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from tests.fake_cuda.tracked import track

from understudy.recipes.libero_openvla_grpo import CONFIG
from understudy.training.gpu_estimate import network
from understudy.training.gpu_estimate.estimate import Estimate, estimate
from understudy.training.gpu_estimate.gpus import GIB, KNOWN, Gpus
from understudy.training.onpolicy.config import AdapterConfig, OnPolicyConfig

TOLERANCE = 0.03
KINDS = ("LoRA", "full")
PHASES = ("learning", "optimizer step", "acting")
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "copies")


def configs(ranks: list[int], kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, int, OnPolicyConfig]]:
    """What is compared: the kind of fine-tuning, the number of ranks and the config."""
    for kind, num, checkpointing in itertools.product(kinds, ranks, (False, True)):
        lora = kind == "LoRA"
        engine = replace(CONFIG.engine, parallel="fsdp" if num > 1 else "none", gradient_checkpointing=checkpointing)
        openvla = replace(CONFIG.openvla, dtype="bfloat16" if lora else "float32")
        adapter = AdapterConfig(rank=32 if lora else 0)
        yield kind, num, replace(CONFIG, engine=engine, openvla=openvla, lora=adapter)


def compare(config: OnPolicyConfig, ranks: int) -> tuple[Estimate, dict[str, Any]]:
    """The plan's estimate, and what the trackers saw in each phase."""
    planned = estimate(config, Gpus(num=ranks, gpu=KNOWN["A100-80GB"]), published=network.OPENVLA_7B)
    seen = track(config, ranks=ranks, published=network.OPENVLA_7B, rows=planned.work.micro_rows)
    return planned, seen


def shortened(blocks: int) -> Any:
    """Wherever the published network is built, it has no more than so many blocks in each transformer."""
    return mock.patch.object(network, "published_openvla", partial(network.published_openvla, max_blocks=blocks))


def main(blocks: int, ranks: list[int], kinds: Sequence[str] = KINDS) -> int:
    both = " | ".join(f"{phase}: plan, torch, ratio" for phase in PHASES)
    print(f"| fine-tuning | GPUs | checkpointing | highest | {' | '.join(CATEGORIES)} | {both} |")
    print("|---" * (4 + len(CATEGORIES) + len(PHASES)) + "|", flush=True)
    worst = 0.0
    with shortened(blocks):
        for name, num, config in configs(ranks, kinds):
            planned, seen = compare(config, num)
            highest = planned.memory[planned.phase].by_category()
            told = [name, str(num), "yes" if config.engine.gradient_checkpointing else "no", planned.phase]
            told += [f"{highest[category] / GIB:.2f}" for category in CATEGORIES]
            for phase in PHASES:
                plan, torch = planned.memory[phase].total, seen[phase].total
                worst = max(worst, abs(plan / torch - 1))
                told.append(f"{plan / GIB:.2f}, {torch / GIB:.2f}, {plan / torch:.3f}")
            print(f"| {' | '.join(told)} |", flush=True)
    print(f"the largest difference is {worst:.1%}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--fine-tuning", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    sys.exit(main(options.blocks, options.ranks, options.fine_tuning))
