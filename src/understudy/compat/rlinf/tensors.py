"""Tensors of torch as numpy arrays and back. torch is imported when the first tensor is made, and never before."""

from __future__ import annotations

import base64
import importlib
from typing import Any

import numpy as np

from understudy.core import SpecError
from understudy.core.spec import describe

Array = np.ndarray[Any, Any]

BFLOAT16 = "bfloat16"  # kept as float32, which holds each of its values exactly; numpy does not have it


def torch() -> Any:
    """The module torch; a SpecError says what to do if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise SpecError(
            "torch: tensors were asked for, and it is not installed; `pip install torch`, or add numpy arrays"
        ) from None


def is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "cpu") and hasattr(value, "numpy")


def to_array(value: Any) -> tuple[Any, str]:
    """A tensor or an array as a numpy array in main memory, and the name of its own dtype."""
    if not is_tensor(value):
        array = np.asarray(value)
        return array, array.dtype.name
    value = value.detach().cpu()
    if str(getattr(value, "dtype", "")) == f"torch.{BFLOAT16}":
        return value.float().numpy(), BFLOAT16
    array = value.numpy()
    return array, array.dtype.name


def to_tensor(array: Array, dtype: str, device: Any = None) -> Any:
    """The array as a tensor of this dtype; on the CPU it shares the array's memory."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # of a 0-dimensional array numpy makes one dimension
    tensor = torch().from_numpy(array if array.flags.writeable else array.copy())
    if dtype == BFLOAT16:
        tensor = tensor.bfloat16()
    return tensor if device is None else tensor.to(device)


# ---- values that are not fields of steps, as JSON


def encode_value(value: Any, path: str) -> Any:
    """A value that JSON can hold, from which `decode_value` makes the same again."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode_value(child, f"{path}[{index}]") for index, child in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode_value(list(value), path)}
    if isinstance(value, dict):
        if not all(isinstance(name, str) and not name.startswith("$") for name in value):
            raise SpecError(f"{path}: expected names that are text, got {describe(value)}; rename them")
        return {name: encode_value(child, f"{path}/{name}") for name, child in value.items()}
    if is_tensor(value) or isinstance(value, np.ndarray | np.generic):
        array, dtype = to_array(value)
        if array.dtype.kind in "biuf":
            kind = "torch" if is_tensor(value) else "numpy"
            data = base64.b64encode(array.tobytes()).decode()
            return {"$array": [kind, dtype, array.dtype.name, list(array.shape), data]}
    raise SpecError(
        f"{path}: expected tensors, numbers, text, or lists and dicts of them, got {describe(value)}; leave it out"
    )


def decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [decode_value(child) for child in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(decode_value(value["$tuple"]))
    if "$array" in value:
        kind, dtype, stored, shape, data = value["$array"]
        array = np.frombuffer(base64.b64decode(data), stored).reshape(shape).copy()
        return to_tensor(array, dtype) if kind == "torch" else array
    return {name: decode_value(child) for name, child in value.items()}
