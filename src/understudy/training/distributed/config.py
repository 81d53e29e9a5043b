"""How a module is trained. Separate from the engine, so that reading a config does not load torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from understudy.training.distributed.errors import RanksError

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a module is trained with AdamW. Only parameters that require a gradient are trained."""

    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """Distribution over ranks: none for one process, ddp for replicas, fsdp for shards of the weights."""
    learning_rate: float = 1e-4
    """Learning rate of AdamW after the warmup."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW: the decay rates of its two running averages."""
    warmup_updates: int = 0
    """Number of updates over which the learning rate rises linearly; the first has 1 / warmup-updates of it."""
    gradient_clip: float | None = 1.0
    """Maximum norm of the whole gradient; None does not clip."""
    precision: Precision = "float32"
    """Precision of the computation. What is trained, its gradients and the optimizer's state are float32 anyway."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass instead of keeping them."""
    compile: str | None = None
    """Backend of torch.compile for each block, such as inductor; None does not compile."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory between updates."""
    offload_parameters: bool = False
    """Keep weights, gradients and optimizer state in host memory; needs parallel=fsdp."""
    blocks: tuple[str, ...] = ()
    """Classes of modules that are gathered or recomputed one at a time; none means the elements of ModuleLists."""

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
        if self.compile is not None and not self.compile.isidentifier():
            raise RanksError(
                f"compile: expected the name of a backend of torch.compile, got {self.compile!r}; try inductor"
            )
        if self.offload_parameters and self.parallel != "fsdp":
            raise RanksError("offload_parameters: only shards can be offloaded; use parallel='fsdp', one rank will do")
