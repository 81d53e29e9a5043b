"""Transfer: arrays of the host as tensors of the device, and back. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def to_tensor(array: Any, device: torch.device) -> torch.Tensor:
    """A numpy array as a tensor on the device, without a copy if possible."""
    import torch  # only now: a config needs Inputs and no torch

    array = np.asarray(array)
    as_it_is = array.flags.writeable and all(
        stride >= 0 for stride in array.strides
    )  # torch takes no negative strides, such as those of a flipped image
    tensor = torch.from_numpy(array if as_it_is else array.copy())
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as a numpy array on the host, which waits for the device; bfloat16 becomes float32."""
    import torch

    tensor = tensor.detach()
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    return array
