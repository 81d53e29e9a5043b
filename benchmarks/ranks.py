"""What the engine costs beside a bare loop of torch on the same tensors (AdamW, gradient clip), in one process.

    python benchmarks/ranks.py

Both sides take turns; a ratio is the median over rounds of CPU time, of bare / engine: 1 is no cost.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn

from understudy.training.distributed.engine import Engine, EngineConfig
from understudy.training.distributed.ranks import single_rank

ROUNDS = 15


def module(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def bare(net: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> float:
    for batch in batches:
        (net(batch).square().sum() / batch.numel()).backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def ours(engine: Engine, batches: list[Tensor]) -> float:
    for index, batch in enumerate(batches):
        loss = engine.forward(batch).square().sum() / batch.numel()
        engine.backward(loss, last=index + 1 == len(batches))
    return engine.step()


def measure(width: int, layers: int, rows: int, micro_batches: int, updates: int) -> None:
    plain = module(width, layers)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0)
    engine = Engine(module(width, layers), EngineConfig(learning_rate=1e-4), single_rank())
    batches = list(torch.randn(rows * micro_batches, 49, width).split(rows))
    ratios, speeds = [], []
    for round_ in range(ROUNDS + 1):
        began = time.process_time()
        for _ in range(updates):
            first = bare(plain, optimizer, batches)
        middle = time.process_time()
        for _ in range(updates):
            second = ours(engine, batches)
        end = time.process_time()
        assert first == second, (first, second)  # to the same bits
        if round_:  # the first warms up
            ratios.append((middle - began) / (end - middle))
            speeds.append(1e3 * (end - middle) / updates)
    size = sum(value.numel() for value in plain.parameters())
    print(
        f"{size / 1e6:.2f}M parameters, {micro_batches} x {rows} rows of 49 tokens: {np.median(speeds):.1f} CPU ms an "
        f"update, {np.median(ratios):.3f}x of the bare loop (rounds {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(width=32, layers=2, rows=1, micro_batches=1, updates=40)  # next to no work: what a call costs
    measure(width=96, layers=4, rows=16, micro_batches=2, updates=2)
