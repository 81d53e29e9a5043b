"""FiLM: the file of OpenVLA-OFT's vision transformers that mix language into what they see.

The file has the whole vision backbone. Each block stands inside a wrapper, which also has the two layers that turn the
mean of the prompt's embeddings into a factor and an offset. Linear layers have the adapter of their fine-tuning beside
them, whose alpha is its rank, and at most 16. Here the adapter is merged; written back, it adds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_MAX_ALPHA = 16
_BASE, _A, _B = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def read(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the file by the names that they have without wrappers and adapters, adapters merged."""
    found = {}
    for name, weight in weights.items():
        if _A in name or _B in name:
            continue
        layer, inside, rest = name.partition(_BASE)
        if inside and rest == "weight":
            a, b = weights[f"{layer}{_A}weight"].float(), weights[f"{layer}{_B}weight"].float()
            weight = weight.float() + (b @ a) * (min(len(a), _MAX_ALPHA) / len(a))
        found[plain_name(name)] = weight
    return found


def write(weights: Mapping[str, Tensor], new: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The file with new weights, by all of its own names; `new` has the names of `read`, and what it lacks stays."""
    found = {}
    for name, weight in weights.items():
        changed = new.get(plain_name(name))
        if _A not in name and _B not in name:
            weight = weight if changed is None else changed.detach().cpu()
        elif _B in name and changed is not None:
            weight = torch.zeros_like(weight)
        found[name] = weight.to(dtype).contiguous()
    return found


def plain_name(name: str) -> str:
    """The name of a weight without wrapper; of an adapter, that of the weight which it changes."""
    name = re.sub(r"\.blocks\.(\d+)\.block\.", r".blocks.\1.", name.replace(_BASE, "."))
    return name.replace(_A, ".").replace(_B, ".")
