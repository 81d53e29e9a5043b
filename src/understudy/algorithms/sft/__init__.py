"""Supervised fine-tuning of VLAs. `SFT` needs torch, and is imported when it is first used; the other names do not."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from understudy.algorithms.sft.blocks import Blocks
from understudy.algorithms.sft.config import SFTUpdateConfig

if TYPE_CHECKING:
    from understudy.algorithms.sft.sft import SFT

__all__ = ["SFT", "Blocks", "SFTUpdateConfig"]


def __getattr__(name: str) -> Any:
    if name != "SFT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.sft"), name)
