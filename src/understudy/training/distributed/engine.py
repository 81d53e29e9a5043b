"""Engine: trains a module in one process, with DDP or with FSDP, to the same numbers.

engine = Engine(module, EngineConfig(learning_rate=1e-4), single_rank())
for index, micro in enumerate(micro_batches):
    loss = (weight[micro] * my_loss(engine.forward(inputs[micro]))).sum()  # weights of the global mini batch
    engine.backward(loss, last=index + 1 == len(micro_batches))
gradient_norm = engine.step()
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from understudy.algorithms.optimizers import AdamW
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.errors import NonFiniteError, RanksError
from understudy.training.distributed.module_blocks import checkpoint_activations, find_blocks
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.single_process import SingleProcess

if TYPE_CHECKING:
    from understudy.training.distributed.sharded_checkpoint import StagedShards

Array = np.ndarray[Any, Any]


class Engine:
    """Trains one module. All ranks call the same methods in the same order, except `forward` within `unsharded`."""

    def __init__(self, module: nn.Module, config: EngineConfig, ranks: Ranks):
        self.module = module
        self.config = config
        self.ranks = ranks
        self.num_updates = 0
        self._ready = False  # whether the gradients are those of all ranks
        self._in_unsharded = False
        self._parallel = self._wrap()
        named = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._optimizer = AdamW(
            named.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True if self._fused(named.values()) else None,
        )
        self._trainable = named
        self._start_optimizer()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Call this instead of the module, also to act without learning."""
        what = f"update {self.num_updates + 1}"
        with self.ranks.collective(what) if torch.is_grad_enabled() else self.ranks.translate_errors(what):
            return self._parallel.forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one micro batch; `last` if `step` comes next. Ranks without rows pass a loss of 0."""
        self._refuse_unsharded("backward")
        if self._ready:
            raise RanksError("backward: called again after last=True; call step first")
        with self.ranks.collective(f"update {self.num_updates + 1}"):
            self._parallel.backward(loss, last=last)
        self._ready = last

    def step(self) -> float:
        """Update the weights; returns the norm of the gradient over all ranks, before clipping."""
        if not self._ready:
            raise RanksError("step: the gradients are not those of all ranks yet; call backward(loss, last=True) first")
        self._ready = False
        with self.ranks.collective(f"update {self.num_updates + 1}"):
            gradients = [local_shard(value.grad) for value in self._trainable.values() if value.grad is not None]
            norm = self._parallel.gradient_norm(gradients)
            size = float(norm)
            if not math.isfinite(size):
                self._optimizer.zero_grad()
                raise NonFiniteError(
                    f"update {self.num_updates + 1}: the norm of the gradient is {size}, and nothing was changed; "
                    f"look at the losses, or lower the learning rate"
                )
            if self.config.gradient_clip is not None and size > self.config.gradient_clip:
                torch._foreach_mul_(gradients, self.config.gradient_clip / (norm + 1e-6))
            self._update()
        self.num_updates += 1
        return size

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gather all weights on every rank. Within, `forward` without gradients does not wait for other ranks."""
        self._refuse_unsharded("unsharded")
        with self.ranks.collective("unsharded"):
            stack = contextlib.ExitStack()
            stack.enter_context(self._parallel.unsharded())
        self._in_unsharded = True
        try:
            yield
        finally:
            self._in_unsharded = False
            stack.close()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        warmup = self.config.warmup_updates
        return self.config.learning_rate * (min(1.0, (self.num_updates + 1) / warmup) if warmup else 1.0)

    def parameters(self, *, trainable_only: bool = False, everywhere: bool = True) -> dict[str, Array]:
        """All weights and buffers, unsharded, by the module's names; bfloat16 becomes float32.

        If not `everywhere`, only rank 0 gets them.
        """
        self._refuse_unsharded("weights")
        named = self._trainable if trainable_only else self._tensors()
        arrays: dict[str, Array] = {}
        with self.ranks.collective("parameters"):
            for name, value in named.items():
                full = _full(value)
                if everywhere or self.ranks.first:
                    arrays[name] = _to_array(full)
        return arrays

    def load_parameters(self, arrays: Mapping[str, Array]) -> None:
        """Load unsharded weights, given on every rank; frozen weights and buffers may be left out."""
        known = self._tensors()
        unknown, missing = sorted(arrays.keys() - known.keys()), sorted(self._trainable.keys() - arrays.keys())
        if unknown or missing:
            problem = f"the module has no {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
            raise RanksError(
                f"load_parameters: {problem} ({len(unknown)} unknown, {len(missing)} missing); use its own names"
            )
        _check_shapes({name: known[name] for name in arrays}, arrays)
        for name, array in arrays.items():
            _set(known[name], array)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the next update depends on, writable: trained weights, buffers and optimizer state.

        Frozen parameters are not included: they come from the file that the module was loaded from.
        """
        frozen = {name for name, value in self.module.named_parameters() if not value.requires_grad}
        found = {f"module/{name}": value for name, value in self._tensors().items() if name not in frozen}
        for name, value in self._trainable.items():
            found |= {f"optimizer/{name}/{key}": one for key, one in self._optimizer.state[value].items()}
        return found

    def state(self) -> dict[str, Any]:
        """The state of a single process: arrays by path, and the number of updates."""
        if self.ranks.size > 1:
            raise RanksError(f"state: is for one process, and there are {self.ranks.size}; use save(directory)")
        arrays = {name: _to_array(_full(value)) for name, value in self.tensors().items()}
        return {
            **arrays,
            **{name: _to_array(value) for name, value in self._random().items()},
            "num_updates": self.num_updates,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue as the engine that the state was taken from. If this raises, nothing changed."""
        tensors = self.tensors()
        random = self._random()
        different = sorted((tensors.keys() | random.keys() | {"num_updates"}) ^ state.keys())
        if different:
            raise RanksError(
                f"restore: {different[0]!r} and {len(different) - 1} more are only on one side; "
                f"build the same module as when it was saved"
            )
        _check_shapes({**tensors, **random}, state)
        for name, value in (*tensors.items(), *random.items()):
            _set(value, state[name])
        self._restored(int(state["num_updates"]), random)

    def save(self, directory: Path) -> Path:
        """Save the state of any number of ranks in a directory that all see; see sharded_checkpoint.py."""
        from understudy.training.distributed.sharded_checkpoint import save_tensors  # imports two seconds of torch

        return save_tensors(self.ranks, directory, self.tensors(), self._random(), self.num_updates)

    def stage(self, directory: Path) -> StagedShards:
        """Copy to host memory what `save` would write; its `write` may then be called in a thread, while this engine
        trains on. All ranks call this."""
        from understudy.training.distributed.sharded_checkpoint import stage_tensors

        return stage_tensors(self.ranks, directory, self.tensors(), self._random(), self.num_updates)

    def load(self, directory: Path) -> None:
        """Load what any number of ranks saved; with the same number, dropout continues too. May raise as `restore`."""
        from understudy.training.distributed.sharded_checkpoint import load_tensors

        random = self._random()
        num_updates = load_tensors(self.ranks, directory, self.tensors(), random)
        self._restored(num_updates, random)

    def _random(self) -> dict[str, Tensor]:
        """A copy of the states of torch's random number generators, which dropout uses."""
        states = {"random/cpu": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            states["random/cuda"] = torch.cuda.get_rng_state(self.ranks.device)
        return states

    def _restored(self, num_updates: int, random: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(random["random/cpu"])
        if "random/cuda" in random:
            torch.cuda.set_rng_state(random["random/cuda"], self.ranks.device)
        self.num_updates = num_updates
        self._ready = False
        self._optimizer.zero_grad()

    def _wrap(self) -> SingleProcess:
        """Move, broadcast and wrap the module, in the order that torch needs."""
        module, config, ranks = self.module, self.config, self.ranks
        if not any(value.requires_grad for value in module.parameters()):
            raise RanksError("module: none of its parameters requires a gradient; there is nothing to train")
        if config.parallel == "none" and ranks.size > 1:
            raise RanksError(f"parallel: 'none' would train {ranks.size} separate policies; use 'ddp' or 'fsdp'")
        if config.offload_optimizer and ranks.device.type == "cpu":
            raise RanksError(
                "offload_optimizer: the device is the cpu, so the state is in host memory already; leave it off"
            )
        for value in module.parameters():  # an update of bfloat16 by a small learning rate would round to nothing
            if value.requires_grad and value.dtype in (torch.bfloat16, torch.float16):
                value.data = value.data.float()
        held = [*module.parameters(), *module.buffers()]
        if not config.offload_parameters and any(value.device != ranks.device for value in held):
            module.to(ranks.device)
        if ranks.size > 1:
            with torch.no_grad(), ranks.collective("weights of rank 0"):
                for value in module.state_dict().values():
                    contiguous = value.contiguous()
                    torch.distributed.broadcast(contiguous, src=0)
                    value.copy_(contiguous)
        blocks: list[nn.Module] = []
        if config.gradient_checkpointing or config.parallel == "fsdp" or config.blocks or config.compile:
            blocks = find_blocks(module, config.blocks)
        if config.gradient_checkpointing:
            if not blocks:
                raise RanksError("gradient_checkpointing: the module has no ModuleList; name the classes in `blocks`")
            checkpoint_activations(blocks)
        if config.compile is not None:
            if not blocks:
                raise RanksError("compile: the module has no ModuleList; name the classes in `blocks`")
            for block in blocks:  # and not the whole: around them are Python and shapes that change with each batch
                block.compile(backend=config.compile)
        with ranks.collective(f"making {config.parallel}"):
            if config.parallel == "fsdp":
                from understudy.training.distributed.fsdp import FSDPSharded

                return FSDPSharded(module, ranks, config.precision, blocks=blocks, offload=config.offload_parameters)
            if config.parallel == "ddp" and ranks.size > 1:
                from understudy.training.distributed.ddp import DDPReplicated

                return DDPReplicated(module, ranks, config.precision)
            return SingleProcess(module, ranks, config.precision)

    def _refuse_unsharded(self, what: str) -> None:
        if self._in_unsharded:
            raise RanksError(f"{what}: within unsharded() only forward without gradients is allowed; leave it first")

    def _start_optimizer(self) -> None:
        """Create AdamW's state as its first step would, so that it can be saved and loaded before the first update."""
        for value in self._trainable.values():
            moments = {name: torch.zeros_like(value, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            where = value.device if self._fused([value]) else "cpu"
            self._optimizer.state[value] = {"step": torch.zeros((), dtype=torch.float32, device=where), **moments}
        self._move_optimizer(to_device=False)

    @staticmethod
    def _fused(values: Iterable[Tensor]) -> bool:
        """Whether the optimizer takes one kernel for all: on GPUs. On a CPU it would change the last bits."""
        return all(value.device.type == "cuda" for value in values)

    def _update(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._move_optimizer(to_device=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._move_optimizer(to_device=False)

    def _move_optimizer(self, *, to_device: bool) -> None:
        if not self.config.offload_optimizer:
            return
        for value, state in self._optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(value.device if to_device else "cpu")

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by the module's names; FSDP2 reshards here what it has gathered."""
        self._refuse_unsharded("weights")
        return dict(self.module.state_dict(keep_vars=True))


def _is_sharded(value: Tensor) -> bool:
    """Whether it is a DTensor; asked like this, only FSDP imports what DTensors need."""
    return hasattr(value, "to_local")


def local_shard(value: Tensor) -> Tensor:
    """The shard of a tensor that this rank holds."""
    shard: Tensor = value.to_local() if _is_sharded(value) else value  # type: ignore[attr-defined]
    return shard


def _full(value: Tensor) -> Tensor:
    value = value.detach()
    full: Tensor = value.full_tensor() if _is_sharded(value) else value  # type: ignore[attr-defined]
    return full


def _to_array(value: Tensor) -> Array:
    value = value.detach().cpu()
    array: Array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return array.copy()


@torch.no_grad()
def _set(value: Tensor, array: Array) -> None:
    whole = torch.from_numpy(np.array(array))
    if _is_sharded(value):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(value, DTensor)
        whole = whole.to(value.to_local().device, value.dtype)
        value.copy_(distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None))
    else:
        value.copy_(whole)


def _check_shapes(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
    for name, value in tensors.items():
        got = np.shape(arrays[name])
        if tuple(value.shape) != got:
            raise RanksError(
                f"{name}: expected {list(value.shape)}, got {list(got)}; build the same module as when it was saved"
            )
