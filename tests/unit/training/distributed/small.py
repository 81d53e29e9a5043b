"""A small module, rows for it, and the training loop that every number of ranks goes through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from understudy.training.distributed.engine import Engine
from understudy.training.distributed.ranks import Ranks


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """With a head that no loss reaches, and a buffer."""

    def __init__(self, width: int = 8, dropout: float = 0.0, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList([Block(width, dropout) for _ in range(2)])
        self.head = nn.Linear(width, 1)
        self.judge = nn.Linear(width, 1)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"out": self.head(x).squeeze(-1) * self.scale}


class Sometimes(nn.Module):
    """Has a head that is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.always = nn.Linear(4, 1)
        self.asked = nn.Linear(4, 1)

    def forward(self, x: Tensor, asked: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.always(x) + (self.asked(x) if asked else 0.0)


def rows(num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs [N, 4] and weights [N] of a global mini batch."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_rows, 4, generator=random, dtype=torch.float64)
    return inputs.to(dtype), torch.rand(num_rows, generator=random, dtype=torch.float64).to(dtype)


def train(
    engine: Engine,
    ranks: Ranks,
    *,
    num_rows: int = 7,
    updates: int = 5,
    micro_batches: int = 2,
    dtype: torch.dtype = torch.float32,
) -> list[list[float]]:
    """The global loss and the gradient's norm of each update. Row i is on rank i % size; what lacks is padded."""
    inputs, weights = rows(num_rows, dtype)
    share = -(-num_rows // ranks.size)
    share += -share % micro_batches
    mine = torch.arange(ranks.rank, num_rows, ranks.size)
    padding = torch.zeros(share - len(mine), dtype=torch.int64)
    x = inputs[torch.cat([mine, padding])]
    w = torch.cat([weights[mine], torch.zeros(len(padding), dtype=dtype)])
    said = []
    for _ in range(updates):
        total = 0.0
        for index, part in enumerate(torch.arange(share).chunk(micro_batches)):
            loss = (w[part] * (engine.forward(x[part])["out"] - 1.0).square()).sum()
            engine.backward(loss, last=index + 1 == micro_batches)
            total += loss.item()
        norm = engine.step()
        said.append([ranks.sum({"loss": total})["loss"], norm])
    return said


def lora(module: nn.Module) -> nn.Module:
    """The module with adapters on its blocks, whose weights are all that is trained."""
    import peft

    torch.manual_seed(5)
    adapted: Any = peft.get_peft_model(
        module, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights="gaussian")
    )
    return adapted
