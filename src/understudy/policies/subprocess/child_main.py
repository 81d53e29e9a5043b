"""The main function of a policy's process, and the messages between it and the caller.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the socket | the next request; the policy | the caller; the caller's end of the socket closes |

A message is the length of its JSON in eight bytes, the JSON, and the bytes of the arrays that it names; no pickle.
The process ends when its socket or its lifeline closes.

Runs in the interpreter of the policy: numpy and the standard library are all it needs, from Python 3.9. This file and
the two that it imports are all of Understudy that is loaded there.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from understudy.processes.child_main import enter, find
from understudy.processes.messages import plain, raised

PROTOCOL = 1
MAX_TEXT_BYTES = 64 * 2**20
MAX_ARRAY_BYTES = 256 * 2**30
KINDS = "biuf"  # of arrays that may cross: truth values and numbers
_LENGTH = struct.Struct(">Q")

Arrays = dict[str, Any]


class Garbage(Exception):
    """Bytes that are not a message, or a value that cannot be one."""


class Closed(Exception):
    """The other end is gone."""


# ---- messages


def encode(message: dict[str, Any], arrays: Arrays) -> list[memoryview]:
    """The parts of a message, to be sent one after the other."""
    described, parts = [], []
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.kind not in KINDS:
            raise Garbage(f"{name}: expected numbers or truth values, got {array.dtype}; convert it")
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        described.append([name, array.dtype.str, list(array.shape)])
        if array.nbytes:
            flat: Any = array.reshape(-1).view(np.uint8)
            parts.append(memoryview(flat))
    text = json.dumps({**message, "arrays": described}, separators=(",", ":")).encode()
    if len(text) > MAX_TEXT_BYTES:
        raise Garbage(f"message: expected up to {MAX_TEXT_BYTES} bytes beside the arrays, got {len(text)}")
    return [memoryview(_LENGTH.pack(len(text)) + text), *parts]


def receive(fill: Callable[[memoryview], None]) -> tuple[dict[str, Any], Arrays]:
    """The next whole message; `fill` fills a buffer with what comes next, or raises."""
    prefix = bytearray(_LENGTH.size)
    fill(memoryview(prefix))
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_TEXT_BYTES:
        raise Garbage(f"expected a message, got {bytes(prefix)!r}")
    text = bytearray(length)
    fill(memoryview(text))
    arrays: Arrays = {}
    try:
        message = json.loads(text)
        for name, dtype, shape in message.pop("arrays"):
            kind = np.dtype(dtype)
            if kind.kind not in KINDS or any(size < 0 for size in shape):
                raise ValueError(f"{name}: {dtype} {shape}")
            if math.prod(shape) * kind.itemsize > MAX_ARRAY_BYTES:
                raise ValueError(f"{name}: {dtype} {shape} is too large")
            arrays[str(name)] = np.empty(shape, kind)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise Garbage(f"{bytes(text[:60])!r} ({type(error).__name__}: {error})") from None
    for array in arrays.values():
        if array.nbytes:
            fill(memoryview(array.reshape(-1).view(np.uint8)))
    return message, arrays


def below(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with `prefix/`, without it."""
    return {name[len(prefix) + 1 :]: array for name, array in arrays.items() if name.startswith(f"{prefix}/")}


def under(arrays: Arrays, prefix: str) -> Arrays:
    """The inverse of `below`."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


# ---- generators of random numbers


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """A generator's state as JSON."""
    state: dict[str, Any] = json.loads(json.dumps(rng.bit_generator.state, default=plain))
    return state


def set_generator_state(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Set a generator to a state of its kind."""
    rng.bit_generator.state = state


def generator_of(state: dict[str, Any]) -> np.random.Generator:
    """A generator with this state."""
    name = str(state["bit_generator"])
    kind = getattr(np.random, name, None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise Garbage(f"rngs: numpy {np.__version__} has no generator {name!r}")
    rng = np.random.Generator(kind())
    set_generator_state(rng, state)
    return rng


# ---- the process


def main() -> None:
    """Serve one caller."""
    stream, _ = enter()
    stream.setblocking(True)
    try:
        serve(stream)
    except Closed:
        os._exit(0)  # the caller is gone: do not wait for threads or handlers at exit


def serve(stream: socket.socket) -> None:
    """Build the policy, then answer requests until the other end closes."""

    def fill(buffer: memoryview) -> None:
        while len(buffer):
            try:
                got = stream.recv_into(buffer)
            except OSError:
                raise Closed from None
            if not got:
                raise Closed
            buffer = buffer[got:]

    def send(message: dict[str, Any], arrays: Arrays) -> None:
        for part in encode(message, arrays):
            try:
                stream.sendall(part)
            except OSError:
                raise Closed from None

    policy: Any = None
    given: Arrays
    while True:
        request, arrays = receive(fill)
        try:
            if request["do"] == "build":
                policy = find(request["factory"])(**request["options"])
                answer, given = sizes_of(policy), {}
            else:
                answer, given = HANDLERS[request["do"]](policy, request, arrays)
            send({"id": request["id"], **answer}, given)
        except Closed:
            raise
        except BaseException as error:  # noqa: BLE001 (the outermost loop of a process)
            send({"id": request["id"], **raised(error)}, {})


def sizes_of(policy: Any) -> dict[str, Any]:
    """The sizes of a policy, for the caller."""
    replay = {name: [list(shape), str(np.dtype(dtype))] for name, (shape, dtype) in policy.replay_spec.items()}
    return {
        "protocol": PROTOCOL,
        "block_steps": int(policy.block_steps),
        "log_prob_size": int(policy.log_prob_size),
        "replay": replay,
        "has_value": bool(policy.has_value),
        "noise_shape": getattr(policy, "noise_shape", None),
    }


def _act(policy: Any, request: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    rngs = [generator_of(state) for state in request["rngs"]]
    noise = {"noise": arrays["noise"]} if "noise" in arrays else {}
    given = policy.act(
        below(arrays, "observation"),
        request["instructions"],
        rngs=rngs,
        temperature=request["temperature"],
        greedy=request["greedy"],
        **noise,
    )
    action = given["action"]
    found = under(action if isinstance(action, dict) else {"": action}, "action")
    found.update(under(given["replay"], "replay"))
    found["log_prob"] = given["log_prob"]
    if given.get("value") is not None:
        found["value"] = given["value"]
    return {"rngs": [generator_state(rng) for rng in rngs]}, found


def _evaluate(policy: Any, request: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    given = policy.evaluate(
        below(arrays, "observation"),
        request["instructions"],
        below(arrays, "replay"),
        temperature=request["temperature"],
    )
    return {}, {name: given[name] for name in ("log_prob", "entropy", "value") if given.get(name) is not None}


def _load(policy: Any, request: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    if request["path"] is None:
        policy.set_parameters(below(arrays, "parameters"))
    else:
        policy.load(request["path"])
    return {}, {}


HANDLERS = {"act": _act, "evaluate": _evaluate, "load": _load}
