"""What a GPU holds while the Engine learns, steps and acts, by torch's own trackers on fake CUDA tensors.

    build.load()                                        # before the first import of torch
    track(config, ranks=8, published="openvla-7b")["learning"].total

`understudy plan` traces a pass of the bare network on `meta`, imitates autocast and FSDP in it, and adds by arithmetic
what the engine holds. Here the Engine itself runs, with torch's autocast, FSDP2, checkpointing and fused AdamW, and the
trackers of `torch.distributed._tools` follow every storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from tests.fake_cuda.build import WRITTEN_FOR
from tests.fake_cuda.fake_ranks import DEVICE, fake_ranks
from tests.fake_cuda.pretend import pretend
from torch import nn

from understudy.training.distributed.engine import Engine
from understudy.training.gpu_estimate.network import build_network
from understudy.training.onpolicy.config import OnPolicyConfig

try:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
except ImportError as error:  # no stable interface of torch
    raise ImportError(f"{__file__}: written for the memory trackers of torch {WRITTEN_FOR}; adapt it") from error

# The trackers' names of what they count, and those of the plan. Weights that autocast has cast are activations here.
CATEGORIES = {
    "Parameter": "parameters",
    "Sharded Param": "parameters",
    "Buffer": "parameters",
    "Gradient": "gradients",
    "Sharded Grad": "gradients",
    "Optstate": "optimizer",
    "OptState": "optimizer",
    "Activation": "activations",
    "Temp": "activations",
    "Inputs": "activations",
    "Other": "activations",
    "Unsharded Param": "copies",
    "All Gather": "copies",
    "Unsharded Grad": "copies",
    "Reduce Scatter": "copies",
}


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The highest moment of a phase, in bytes."""

    total: int
    categories: dict[str, int]


def track(config: OnPolicyConfig, *, ranks: int, published: str | None, rows: int) -> dict[str, Tracked]:
    """Each phase of an iteration, on the first rank: a micro batch after others, a step of the optimizer, acting."""
    plain = replace(config, engine=replace(config.engine, gradient_checkpointing=False))  # the engine adds it
    network = build_network(plain, published=published)
    device = torch.device(DEVICE)
    with pretend(), fake_ranks(ranks) as group, _frozen_hooks():
        _to_fake(network.model, device)
        engine = Engine(network.model, config.engine, group)
        for value in network.model.parameters():
            if value.requires_grad:
                value.grad = torch.zeros_like(value)

        def learn() -> None:
            engine.backward(network.forward(rows, module=engine.forward, device=device).sum(), last=True)

        def act() -> None:
            with engine.unsharded(), torch.no_grad():
                network.forward(network.act_rows, module=engine.forward, device=device)

        phases: dict[str, Callable[[], Any]] = {"learning": learn, "optimizer step": engine.step, "acting": act}
        return {name: _highest(engine, run) for name, run in phases.items()}


class _Brief:
    """A tracker of all memory alone: what each module holds takes it longer than everything else."""

    def __torch_dispatch__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # no operation; asked several times for each
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]

    def _update_peak_stats(self: Any, peak_state: Any) -> None:
        modules, self.memory_tracking = self.memory_tracking, {}
        super()._update_peak_stats(peak_state)  # type: ignore[misc]
        self.memory_tracking = modules


class _BriefMemTracker(_Brief, MemTracker):
    pass


class _BriefFSDPMemTracker(_Brief, FSDPMemTracker):
    pass


def _highest(engine: Engine, run: Callable[[], Any]) -> Tracked:
    """What is held at the highest moment of a call."""
    if engine.config.parallel == "fsdp":
        tracker: Any = _BriefFSDPMemTracker(engine.module, engine._optimizer)
    else:
        tracker = _BriefMemTracker()
        tracker.track_external(engine.module, engine._optimizer)
    with tracker:
        run()
    categories = dict.fromkeys(CATEGORIES.values(), 0)
    for kind, size in tracker.get_tracker_snapshot("peak")[torch.device(DEVICE)].items():
        if kind != "Total":
            categories[CATEGORIES[kind.value]] += size
    return Tracked(total=sum(categories.values()), categories=categories)


def _to_fake(model: nn.Module, device: torch.device) -> None:
    """Parameters and buffers of a module on `meta`, as fake tensors on a device."""
    for part in model.modules():
        for name, value in part._parameters.items():
            if value is not None:
                made = torch.empty(value.shape, dtype=value.dtype, device=device)
                part._parameters[name] = nn.Parameter(made, requires_grad=value.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


@contextlib.contextmanager
def _frozen_hooks() -> Iterator[None]:
    """MemTracker hooks the gradients of frozen parameters too, which torch refuses."""
    with contextlib.ExitStack() as undo:
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            plain = getattr(torch.Tensor, name)

            def register(self: Any, hook: Any, plain: Any = plain) -> Any:
                return plain(self, hook) if self.requires_grad else mock.Mock()

            undo.enter_context(mock.patch.object(torch.Tensor, name, register))
        yield
