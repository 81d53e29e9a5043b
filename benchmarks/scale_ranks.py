"""Ranks that count the bytes they move, in a network of their own; run by scale_bytes.py.

Ranks are processes that speak gloo over loopback. They run in a network of their own (`unshare --net`), so that the
counter of its loopback interface has their bytes and nobody else's; TCP's and the store's own are among them. Between
two readings rank 0 waits for the others, which costs some hundred bytes.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.scale_machine import loopback_bytes

from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.launch import launch_function
from understudy.training.distributed.ranks import Ranks, join
from understudy.training.distributed.row_exchange import exchange_rows

UPDATES = 4
WIDTH, LAYERS = 256, 6
ROWS, ROW_BYTES = 512, 3 * 64 * 64
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

Work = Callable[[], object]


def raise_loopback() -> None:
    """A new network has a loopback interface that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        asked = fcntl.ioctl(door, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", asked)[1]
        fcntl.ioctl(door, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def role(whats: list[str], out: str) -> None:
    """One rank: it does each work once to warm up, and once between two readings."""
    torch.set_num_threads(1)
    found = {}
    with join() as ranks:
        for what in whats:
            work = WORKS[what](ranks)
            work()
            ranks.barrier("warm")
            before = loopback_bytes()
            ranks.barrier("begin")
            work()
            ranks.barrier("over")
            found[what] = loopback_bytes() - before
            ranks.barrier("read")
        if ranks.first:
            Path(out).write_text(json.dumps(found))


class Stack(nn.Module):
    """Layers of one size, of which the first `frozen` are not trained."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def _updates(ranks: Ranks, engine: EngineConfig, frozen: int = 0) -> Work:
    trained = Engine(Stack(frozen), engine, ranks)
    inputs = torch.randn(2, WIDTH)

    def updates() -> None:
        for _ in range(UPDATES):
            trained.backward(trained.forward(inputs).square().sum() / inputs.numel(), last=True)
            trained.step()

    return updates


def _rows(ranks: Ranks) -> Work:
    """Each rank has the rows of its episodes and needs its share of one pass, in an order drawn anew."""
    order = np.random.default_rng(7).permutation(ROWS)
    have, need = np.arange(ROWS)[ranks.rank :: ranks.size], np.sort(order[ranks.rank :: ranks.size])
    columns = {"observation": np.zeros((len(have), ROW_BYTES), np.uint8)}
    return lambda: exchange_rows(ranks, have, columns, need)


WORKS: dict[str, Callable[[Ranks], Work]] = {
    "ddp": lambda ranks: _updates(ranks, EngineConfig(parallel="ddp")),
    "adapters": lambda ranks: _updates(ranks, EngineConfig(parallel="ddp"), frozen=LAYERS - 1),
    "fsdp": lambda ranks: _updates(ranks, EngineConfig(parallel="fsdp")),
    "rows": _rows,
}


if __name__ == "__main__":
    raise_loopback()
    sys.exit(launch_function(int(sys.argv[1]), "benchmarks.scale_ranks:role", whats=sys.argv[3:], out=sys.argv[2]))
