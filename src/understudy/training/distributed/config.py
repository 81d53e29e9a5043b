"""How a module is trained. Apart from the engine, so that a run's config is read without torch's distributed parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from understudy.training.distributed.errors import RanksError

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a module is trained. Only what requires a gradient is: freeze the rest before the engine gets it."""

    parallel: Literal["none", "ddp", "fsdp"] = "none"
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_updates: int = 0  # the rate rises in a line; the first update has 1 / warmup_updates of it
    gradient_clip: float | None = 1.0  # the norm of the whole gradient, at most; None clips nothing
    precision: Precision = "float32"  # of the computation; weights and optimizer stay what they are
    gradient_checkpointing: bool = False  # compute blocks twice instead of keeping their activations
    offload_optimizer: bool = False  # its state is in host memory between updates
    offload_parameters: bool = False  # weights, gradients and optimizer are in host memory; fsdp only
    blocks: tuple[str, ...] = ()  # classes of modules to gather or compute again at a time; else what ModuleLists hold

    def __post_init__(self) -> None:
        wanted = {"parallel": ("none", "ddp", "fsdp"), "precision": ("float32", "bfloat16")}
        for name, known in wanted.items():
            if getattr(self, name) not in known:
                raise RanksError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("learning_rate", "gradient_clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RanksError(f"{name}: expected more than 0, got {value}")
        for name in ("weight_decay", "warmup_updates"):
            if not getattr(self, name) >= 0:
                raise RanksError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.offload_parameters and self.parallel != "fsdp":
            raise RanksError("offload_parameters: only shards can be offloaded; use parallel='fsdp', one rank will do")
