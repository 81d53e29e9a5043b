"""Memory: what a GPU holds in each phase of an iteration, in bytes. Arithmetic alone: it imports no torch.

| | none, ddp | fsdp with N ranks |
|---|---|---|
| parameters | all, in the dtype that they have | an Nth of the rows of each tensor, rounded up |
| gradients | float32, of what is trained; ddp keeps them all the time | an Nth |
| optimizer | two numbers in float32 of what is trained | an Nth |
| activations | of one micro batch, as traced | the same |
| copies | weights that autocast has cast to bfloat16 | as traced: gathered weights, gradients until they are reduced |
| reference | a frozen network, if KL is measured from one | an Nth |
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from understudy.training.distributed.config import EngineConfig
from understudy.training.gpu_estimate.gpus import GIB
from understudy.training.gpu_estimate.network_size import NetworkSize

RESERVE = GIB  # the CUDA context, cuBLAS and cuDNN
NCCL_RESERVE = GIB // 2  # its buffers, if there is more than one rank
FRAGMENTED = 0.05  # share of a GPU's memory that its allocator cannot use
_FLOAT32, _BFLOAT16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a GPU holds at the highest moment of a phase."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    copies: int = 0
    reference: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """The bytes of one pass beside what stays."""

    activations: int
    gradients: int = 0  # whole ones, without FSDP
    copies: int = 0  # of weights: cast by autocast, or gathered by FSDP with gradients on their way


def phases(
    size: NetworkSize,
    engine: EngineConfig,
    *,
    ranks: int,
    learning: PassBytes,
    acting: PassBytes,
    reference_bytes: int = 0,
    collects_ahead: bool = False,
) -> dict[str, Memory]:
    """What a GPU holds while it acts, while it learns from a micro batch, and in a step of the optimizer.

    With `collects_ahead` (max_lag 1 without FSDP), a copy of what is trained acts at the same time.
    """
    fsdp = engine.parallel == "fsdp"
    shards = ranks if fsdp else 1
    host = engine.offload_parameters
    parameters = 0 if host else size.shard_bytes
    whole_gradients = size.trained * _FLOAT32
    gradients = 0 if host else size.shard_trained * _FLOAT32
    optimizer = 2 * gradients
    resting = 0 if engine.offload_optimizer else optimizer
    reference = 0 if host else _share(reference_bytes, shards)
    buckets = whole_gradients if engine.parallel == "ddp" and ranks > 1 else 0
    kept = {"parameters": parameters, "reference": reference}
    element = gathered_element(size, engine)
    if fsdp:
        learned = {"gradients": gradients, "copies": learning.copies}
        # All weights are gathered before the first pass; the last block's buffer is gone when activations come.
        buffer = max(size.largest_block * element - acting.activations, 0)
        acted = {"gradients": 0, "copies": size.gathered * element + buffer}
    else:
        learned = {"gradients": max(buckets, learning.gradients), "copies": learning.copies}
        acted = {"gradients": buckets, "copies": acting.copies}
    acts_beside = collects_ahead and not fsdp
    copy = whole_gradients if acts_beside else 0  # as many numbers as gradients
    beside = acting if acts_beside else PassBytes(activations=0)
    acted["copies"] += copy
    learned["copies"] += copy + beside.copies
    step_copies = copy + beside.copies
    return {
        "acting": Memory(**kept, **acted, optimizer=resting, activations=acting.activations),
        "learning": Memory(**kept, **learned, optimizer=resting, activations=learning.activations + beside.activations),
        "optimizer step": Memory(
            **kept, gradients=gradients, optimizer=optimizer, copies=step_copies, activations=beside.activations
        ),
    }


def gathered_element(size: NetworkSize, engine: EngineConfig) -> int:
    """Bytes of one gathered number: bfloat16 if the engine computes in it, or else the weights' own format."""
    if engine.precision == "bfloat16":
        return _BFLOAT16
    return _FLOAT32 if size.mixed_dtypes else -(-size.parameter_bytes // max(size.parameters, 1))


def reserve_bytes(gpu_memory: int, *, ranks: int) -> int:
    """What no tensor can have: the context of CUDA and its libraries, NCCL's buffers, and fragmentation."""
    return RESERVE + (NCCL_RESERVE if ranks > 1 else 0) + int(FRAGMENTED * gpu_memory)


def _share(num_bytes: int, shards: int) -> int:
    return -(-num_bytes // shards)
