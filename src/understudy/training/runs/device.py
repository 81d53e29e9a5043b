"""Device: which device torch trains on, chosen once for a process: a GPU where there is one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.training.runs.config import ConfigError

if TYPE_CHECKING:
    import torch

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device that torch uses, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"torch uses {self.name}: {self.reason}"

    @property
    def torch(self) -> torch.device:
        import torch

        return torch.device(self.name)


def choose_device(asked: str, *, num_ranks: int = 1) -> Device:
    """The device that the user asked for; `auto` is this rank's GPU where torch sees one, else the CPU.

    Raises ConfigError with the reason if torch cannot use it here.
    """
    import torch  # only now: reading a run needs no torch

    if num_ranks > 1 and asked.startswith("cuda:"):
        raise ConfigError(
            f"device: {asked!r} is one device, and there are {num_ranks} ranks; use cuda, so that each takes its own"
        )
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == AUTO and not there:
        return Device(name="cpu", reason="torch sees no GPU; --device changes it")
    if asked not in (AUTO, "cuda"):
        return Device(name=check_device(asked), reason="as asked by --device")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if there and local >= there:
        raise ConfigError(
            f"device: rank {local} of this node has no GPU of its own, torch sees {there}; start no more ranks, "
            f"or use --device cpu"
        )
    name = check_device(f"cuda:{local}")
    reason = "as asked by --device" if asked != AUTO else f"GPU {local} of {there}; --device changes it"
    return Device(name=name, reason=f"{torch.cuda.get_device_name(local)}, {reason}")


def check_device(name: str) -> str:
    """Return the name of a torch device that works here; raises ConfigError with the reason if it does not."""
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"device: torch cannot use {name!r} here ({first}); use cpu") from None
    return name
