"""What one RL step moves, and by which way: pure functions of the sizes, for any number of ranks and environments.

    python benchmarks/bytes_model.py                    # 64 ranks, 512 environments, a 7.5B policy
    python benchmarks/bytes_model.py --ranks 8 --nodes 1 --workers 16

An RL step: E episodes of B blocks are run by workers, learned from by R ranks in P passes and U updates of M micro
batches, written to the stores; the new weights go to the workers. Bytes are those received by all together:

    observations  E (B + 1) o                           worker to rank, through the object store; o: of one observation
    rows          E B o (R - 1) (1 - (1 - 1/R)^P)       rank to rank, each row once to each rank that lacks it
    facts         (R - 1) E (f + B l)                   rewards, tokens, log-probs to all; f of an episode, l of a block
    row numbers   (R - 1) E B (1 + R (1 - (1 - 1/R)^P)) i   who has and needs which row; i: digits of a number, and 2
    durable       E (B + 1) (o + l)                     to the shards
    weights       N w W                                 one copy a node (Ray's object store), W parameters of w bytes
                  (or one a worker)
    weights, LoRA N 4 t                                 only what is trained, t parameters
    DDP           U 2 (R - 1) 4 t                       a ring; the gradients of what is trained, in float32
    FSDP2         (2 U M + 1) (R - 1) w W + U (R - 1) 4 t     gathered for each forward and backward pass, and once to
                                                        act with; the gradients are scattered once an update
    checkpoint    3 * 4 t                               weights and AdamW's two moments, to a disk

What crosses a network and what stays on a node depends on the placement; the figures are upper bounds for the network.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.onpolicy import Moved

FLOAT = 4
PEER_FLOAT_CHANNELS = 6  # SimpleVLA-RL: two pictures of three channels side by side, in float32


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sizes that the bytes depend on."""

    ranks: int = 64
    nodes: int = 16
    workers: int = 128  # that live episodes; each has a copy of the policy
    episodes: int = 512  # of one RL step: one of each environment
    blocks: float = 64.0  # of an episode, on average
    observation_bytes: int = 224 * 224 * 3 + 8 * FLOAT  # at a block: a camera and some numbers
    block_bytes: int = 1_000  # beside the observation: action, reward, tokens, log-probs
    episode_bytes: int = 700  # what is said of an episode: ticket, task, instruction
    epochs: int = 1
    mini_batch: int = 128  # blocks of an update, over all ranks
    micro_batch: int = 32  # blocks of a backward pass of a rank
    parameters: float = 7.54e9
    weight_bytes: int = 2  # of a parameter that is not trained, as it is gathered and sent
    trained: float = 1.1e8  # parameters: adapters of rank 32 on all linear layers

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: expected more than 0, got {value}")
        if self.trained > self.parameters:
            raise ValueError(f"trained: expected at most {self.parameters:g} parameters, got {self.trained:g}")

    @property
    def rows(self) -> float:
        """Blocks of an RL step."""
        return self.episodes * self.blocks

    @property
    def updates(self) -> int:
        """Of the optimizer in an RL step; a mini batch that is not full counts too."""
        return self.epochs * -int(-self.rows // self.mini_batch)

    @property
    def micro_batches(self) -> int:
        """Backward passes of an update, on each rank."""
        return -int(-min(self.mini_batch, self.rows) // (self.ranks * self.micro_batch))


def observations(setup: Setup) -> float:
    """From workers to the ranks that asked for the episodes."""
    return _moved(setup).through_shared_memory


def rows_between_ranks(setup: Setup) -> float:
    """In each pass a row is learned from by one rank, drawn anew; a rank gets a row once, if it does not have it."""
    return _moved(setup).between_ranks


def facts(setup: Setup) -> float:
    """What is small goes to all ranks."""
    return (setup.ranks - 1) * setup.episodes * (setup.episode_bytes + setup.blocks * setup.block_bytes)


def row_numbers(setup: Setup) -> float:
    """Each rank says, in digits, which rows it has and which it needs."""
    digits = len(str(int(setup.rows))) + 2  # a comma and a space
    needed = setup.rows * setup.ranks * (1 - (1 - 1 / setup.ranks) ** setup.epochs)
    return (setup.ranks - 1) * (setup.rows + needed) * digits


def durable(setup: Setup) -> float:
    """To the shards, a record of all that was lived."""
    return _moved(setup).to_stores + setup.episodes * (setup.blocks + 1) * setup.block_bytes


def _moved(setup: Setup) -> Moved:
    return Moved(
        row=setup.observation_bytes,
        episodes=setup.episodes,
        blocks=setup.blocks,
        ranks=setup.ranks,
        epochs=setup.epochs,
    )


def weights_whole(setup: Setup, *, copies: int | None = None) -> float:
    """To the workers: one copy a node, which its workers share; or as many as are asked for."""
    return (setup.nodes if copies is None else copies) * setup.parameters * setup.weight_bytes


def weights_trained(setup: Setup, *, copies: int | None = None) -> float:
    """The same, of what is trained: workers have the rest."""
    return (setup.nodes if copies is None else copies) * setup.trained * FLOAT


def gradients_ddp(setup: Setup) -> float:
    """A ring: each rank receives 2 (R - 1) / R of the gradient in each update."""
    return setup.updates * 2 * (setup.ranks - 1) * setup.trained * FLOAT


def gradients_fsdp(setup: Setup) -> float:
    """Weights are gathered twice a micro batch and once to act; gradients are scattered once an update."""
    gathered = (2 * setup.updates * setup.micro_batches + 1) * setup.parameters * setup.weight_bytes
    return (setup.ranks - 1) * (gathered + setup.updates * setup.trained * FLOAT)


def checkpoint(setup: Setup) -> float:
    """To a disk that all ranks see: what is trained, and AdamW's moments."""
    return 3 * FLOAT * setup.trained


def peer_pixels(setup: Setup, pixels: int = 224 * 224) -> float:
    """What SimpleVLA-RL sends through pickles for the same episodes: float32 in six channels."""
    return setup.rows * PEER_FLOAT_CHANNELS * pixels * FLOAT


WAYS = {
    "observations, worker to rank": observations,
    "rows, rank to rank": rows_between_ranks,
    "facts to all ranks": facts,
    "row numbers to all ranks": row_numbers,
    "durable copy, to the shards": durable,
    "weights to workers, whole, a copy a node": weights_whole,
    "weights to workers, whole, a copy each": lambda setup: weights_whole(setup, copies=setup.workers),
    "weights to workers, LoRA only, a copy a node": weights_trained,
    "gradients, DDP": gradients_ddp,
    "gradients and weights, FSDP2": gradients_fsdp,
    "checkpoint": checkpoint,
}


def main(setup: tyro.conf.OmitArgPrefixes[Setup] = Setup()) -> int:  # noqa: B008
    """Print the bytes of an RL step by way.

    Args:
        setup: The sizes.
    """
    console = Console(highlight=False, width=130)
    table = Table(
        title=f"{setup.ranks} ranks, {setup.episodes} episodes of {setup.blocks:g} blocks, {setup.updates} updates of "
        f"{setup.micro_batches} micro batches, {setup.parameters / 1e9:.2f}B parameters, "
        f"{setup.trained / 1e6:.0f}M trained"
    )
    for name, side in (("what", "left"), ("GB", "right"), ("GB a rank", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for name, way in WAYS.items():
        table.add_row(name, f"{way(setup) / 1e9:,.2f}", f"{way(setup) / 1e9 / setup.ranks:,.3f}")
    console.print(table)
    console.print(
        f"pictures as float32 in six channels, as SimpleVLA-RL sends them: {peer_pixels(setup) / 1e9:.1f} GB; here "
        f"{observations(setup) / 1e9:.2f} + {rows_between_ranks(setup) / 1e9:.2f} GB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
