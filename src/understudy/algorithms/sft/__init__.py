"""Supervised fine-tuning of VLAs. `SFTUpdateConfig` needs no torch; the other names do, and are imported when used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from understudy.algorithms.sft.config import SFTUpdateConfig

if TYPE_CHECKING:
    from understudy.algorithms.sft.sft import SFT, Blocks

__all__ = ["SFT", "Blocks", "SFTUpdateConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.sft"), name)
