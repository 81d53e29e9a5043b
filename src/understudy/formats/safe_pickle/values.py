"""The values that a pickle may contain: literals, and the allowed names that build arrays."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from understudy.core.spec import MAX_DIMENSIONS
from understudy.formats.safe_pickle.opcodes import OpcodeReader, parse_int

MAX_DEPTH = 24  # nesting of containers in an item
MAX_NODES = 20_000  # values in an item; a shared value counts each time
DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
TEXT_DTYPES = ("U", "S")  # followed by a size


class Name:
    """An allowed name, with our own function in place of what it names."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[[tuple[Any, ...]], Any]):
        self.name, self.make = name, make


class Array:
    """An array whose values have not been read yet."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] | None = None


class Yielded:
    """Placeholder for an item that was already yielded."""


YIELDED: Final = Yielded()


def advice(name: str) -> str:
    if name.startswith(("jax", "torch", "tensorflow")):
        return (
            "it is an array of another library: load the file where it was written, turn each such array into "
            "numpy.asarray(it), and dump it again"
        )
    if name.startswith(("gym", "gymnasium")):
        return "load the file where it was written, take the spaces and environments out, and dump it again"
    return (
        "a file of transitions needs numpy arrays, numbers, text, dicts and lists only; if you trust where it comes "
        "from, load it there, convert the rest, and dump it again"
    )


# ---- functions of the allowed names


def _dtype(arguments: tuple[Any, ...]) -> np.dtype[Any]:
    code = arguments[0]
    if not isinstance(code, str) or len(code) > 12:
        raise ValueError("a dtype is named by a short text")
    if code not in DTYPES and not (code[:1] in TEXT_DTYPES and code[1:].isdigit()):
        raise ValueError(f"dtype {code!r} holds no numbers")
    return np.dtype(code)


def with_state(arguments: tuple[Any, ...]) -> Any:
    """The opcode BUILD, for dtypes and arrays."""
    target, state = arguments
    if isinstance(target, np.dtype) and type(state) is tuple:
        order = state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise ValueError("a dtype of this kind is not read")
        return target.newbyteorder(order) if order in "<>" else target
    if isinstance(target, Array) and type(state) is tuple and target.value is None:
        _, shape, dtype, fortran, data = state
        target.value = _array(data, dtype, shape, "F" if fortran else "C")
        return target
    raise ValueError("only an array that has none yet takes a state")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray):
        raise ValueError("an array is bytes and a dtype; arrays of objects are not read")
    if type(shape) is not tuple or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise ValueError("a shape is a tuple of numbers")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"an array of {len(shape)} dimensions")
    if math.prod(shape) * dtype.itemsize != len(data) or not dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for {dtype} {list(shape)}")
    if order not in ("C", "F"):
        raise ValueError("its order is C or F")
    if dtype.kind == "b" and data.translate(None, b"\0\1"):
        raise ValueError("a truth value that is neither 0 nor 1")
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def _scalar(arguments: tuple[Any, ...]) -> Any:
    dtype, data = arguments
    return _array(data, dtype, (), "C")[()]


def _encode(arguments: tuple[Any, ...]) -> bytes:
    value, encoding = arguments
    if encoding != "latin1" or type(value) is not str:
        raise ValueError("only latin1 is read")
    return value.encode("latin-1")


def _no_bytes(arguments: tuple[Any, ...]) -> bytes:
    if arguments:
        raise ValueError("bytes are made of text")
    return b""


def _dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise ValueError("it is made empty and then filled")
    return {}


def _names() -> dict[str, Name]:
    makers: dict[str, Callable[[tuple[Any, ...]], Any]] = {
        "numpy.dtype": _dtype,
        "numpy.ndarray": lambda _: Array(),
        "_codecs.encode": _encode,  # how protocols 0 to 2 store bytes
        "__builtin__.bytes": _no_bytes,  # and how they store empty bytes
        "collections.OrderedDict": _dict,
    }
    for core in ("numpy.core", "numpy._core"):  # before and since numpy 2
        makers[f"{core}.multiarray._reconstruct"] = lambda _: Array()
        makers[f"{core}.multiarray.scalar"] = _scalar
        makers[f"{core}.numeric._frombuffer"] = lambda given: _array(*given)
    return {name: Name(name, make) for name, make in makers.items()}


NAMES: Final = _names()


# ---- literals


def _int_or_bool(line: bytes, opcodes: OpcodeReader) -> int | bool:
    return line == b"01" if line in (b"00", b"01") else parse_int(line, opcodes)


def _float(line: bytes, opcodes: OpcodeReader) -> float:
    try:
        return float(line)
    except ValueError:
        raise opcodes.refuse(f"{line[:20]!r} is no number; it is damaged") from None


def _text(data: bytes, opcodes: OpcodeReader) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise opcodes.refuse("text that is not UTF-8; it is damaged") from None


def _escaped(data: bytes, opcodes: OpcodeReader) -> str:
    try:
        return codecs.decode(data, "raw_unicode_escape")
    except UnicodeDecodeError:
        raise opcodes.refuse("text with a broken escape; it is damaged") from None


LITERALS: Final[dict[bytes, Callable[[Any, OpcodeReader], Any]]] = {
    b"N": lambda *_: None,
    b"\x88": lambda *_: True,
    b"\x89": lambda *_: False,
    b"I": _int_or_bool,
    b"L": parse_int,
    b"F": _float,
    b"V": _escaped,
    b"]": lambda *_: [],
    b"}": lambda *_: {},
    b")": lambda *_: (),
    b"\x8a": lambda data, _: int.from_bytes(data, "little", signed=True),
    b"\x8b": lambda data, _: int.from_bytes(data, "little", signed=True),
    **dict.fromkeys((b"J", b"K", b"M", b"G", b"B", b"C", b"\x8e", b"\x96"), lambda value, _: value),
    **dict.fromkeys((b"X", b"\x8c", b"\x8d"), _text),
}


# ---- results


def plain(value: Any, opcodes: OpcodeReader) -> Any:
    """The value with arrays in place of placeholders; refuses too deep or too large values."""
    left = MAX_NODES

    def walk(node: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > MAX_DEPTH or left < 0:
            raise opcodes.refuse(
                "containers are nested too deeply, too large, or inside themselves; is this the right file?"
            )
        if type(node) is dict:
            return {key: walk(child, depth + 1) for key, child in node.items()}
        if type(node) in (list, tuple):
            return type(node)(walk(child, depth + 1) for child in node)
        if isinstance(node, Array) and node.value is not None:
            return node.value
        if node is None or isinstance(node, bool | int | float | str | bytes | np.ndarray | np.generic):
            return node
        raise opcodes.refuse(f"holds {kind_of([node])} as a value; it is damaged")

    return walk(value, 0)


def kind_of(values: list[Any]) -> str:
    if not values:
        return "nothing"
    (value,) = values
    return f"the name {value.name}" if isinstance(value, Name) else f"a {type(value).__name__.strip('_').lower()}"
