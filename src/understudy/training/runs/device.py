"""Device: whether torch can use a device on this machine."""

from __future__ import annotations

from understudy.training.runs.config import ConfigError


def check_device(name: str) -> str:
    """Return the name of a torch device that works here; raises ConfigError with the reason if it does not."""
    import torch  # only now: reading a run needs no torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"device: torch cannot use {name!r} here ({first}); use cpu") from None
    return name
