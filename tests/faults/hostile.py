"""A fuzzer: frames that no client of ours would send, at a real server, beside a client that means well.

    python -m tests.faults.hostile --frames 1000000

| process | does |
|---|---|
| this one | opens stream after stream and sends frames; knows for each kind whether it must be refused |
| `--serve DIRECTORY` | the server, alone in a process, so that its memory is its own |
| `--good ADDRESS DIRECTORY` | writes episodes all the time and measures how long they take to be on the server's disk |

A frame is refused with an error of ours, or answered as a chunk that is stored already. All else is a problem: another
status, a traceback, a row of an attacker in the store, a step of the good client that is late or not as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import xxhash
from tests.writing import Collector, write_episode

from understudy.core import Episode, StepSpec
from understudy.core.examples import random_episode, small_spec, text_spec
from understudy.replay import Reader, Store, Writer, verify
from understudy.service import OutboxConfig, Server, ServerConfig, connect
from understudy.service.wire.chunks import encode_chunk
from understudy.service.wire.message import pack, unpack
from understudy.service.wire.protocol import (
    PUBLISH,
    REQUEST,
    SAMPLE,
    STATUS,
    SUBSCRIBE,
    TOKEN_KEY,
    VERSION,
    WRITE,
    method,
)

TOKEN = "the right token, and long enough"
GOOD = "good"
MAX_MESSAGE_BYTES = 4 * 2**20
NUM_STORED = 3  # chunks of each attacker that are in the store; what comes next is chunk 3
NUM_ATTACKERS = 16
REPLAYS = 10  # in each stream, before the frame that ends it
OURS = {"INVALID_ARGUMENT", "UNAUTHENTICATED", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ended early"}


@dataclass(kw_only=True)
class Report:
    """What was sent and what came of it."""

    frames: int = 0
    refused: int = 0
    duplicates: int = 0  # answered as chunks that are there already
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)  # by kind: the first of it
    server_alive: bool = False
    server_peak_bytes: int = 0
    good_steps_sent: int = 0
    good_steps_stored: int = 0
    good_worst_append_s: float = 0.0
    good_worst_delivery_s: float = 0.0

    def problem(self, kind: str, text: str) -> None:
        self.problems.setdefault(kind, text)


# ---- what an attacker has to work with


class Attacker:
    """A writer with a few chunks in the store, and the next one, from which most frames are made."""

    def __init__(self, number: int, trap: Path):
        self.name = f"attacker-{number}"
        self.spec = text_spec() if number % 2 else small_spec()
        self.chunks = _messages(self.spec, seed=number)
        self.strange = _messages(self.spec, seed=1000, skip_episodes=7)  # of a writer that is elsewhere in its episodes
        self.metadata, self.arrays = unpack(self.chunks[NUM_STORED])
        self.pickle = pickle.dumps(_Trap(trap))

    def hello(self, **changes: Any) -> bytes:
        said = {"version": VERSION, "writer": self.name, "incarnation": "now", "spec": self.spec.to_json()}
        return json.dumps({**said, **changes}).encode()

    def next_chunk(
        self, metadata: dict[str, str] | None = None, arrays: dict[str, Any] | None = None, *, drop: str = ""
    ) -> bytes:
        """The chunk that the server waits for, with something in it exchanged and the checksum made anew."""
        kept = {name: array for name, array in self.arrays.items() if name != drop}
        return b"".join(pack({**self.metadata, **(metadata or {})}, {**kept, **(arrays or {})}))

    def part(self, *changes: tuple[int, Any]) -> dict[str, str]:
        (part,) = json.loads(self.metadata["parts"])
        for place, value in changes:
            part[place] = value
        return {"parts": json.dumps([part])}


class _Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def _messages(spec: StepSpec, *, seed: int, skip_episodes: int = 0) -> list[bytes]:
    """Four chunks of an episode of 4 rows each: the last has the last observation."""
    collector = Collector()
    writer = Writer(collector, "w", "i", spec, commit_steps=4)
    for _ in range(skip_episodes):
        write_episode(writer, random_episode(spec, 3, seed))
    writer._seq = 0  # so that a chunk of somebody else has the number that is waited for
    del collector.chunks[:]
    write_episode(writer, random_episode(spec, 15, seed))
    return [b"".join(encode_chunk(chunk.seq, chunk.columns, chunk.parts)) for chunk in collector.chunks]


# ---- frames: kind to how it is made

Maker = Callable[[Attacker, random.Random], bytes]


def sealed(header: bytes, body: bytes = b"") -> bytes:
    """Any header, with the checksum that belongs to it."""
    start = struct.pack("<Q", len(header)) + header + body
    return start + xxhash.xxh3_64_intdigest(start).to_bytes(8, "little")


def _random_bytes(_: Attacker, rng: random.Random) -> bytes:
    return rng.randbytes(int(2 ** rng.uniform(0, 12)))


def _random_json(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [_random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {
            rng.choice(["dtype", "shape", "data_offsets", "$array", ""]): _random_json(rng, depth - 1)
            for _ in range(rng.randrange(4))
        }
    return [
        None,
        True,
        rng.randrange(-10, 10),
        2 ** rng.randrange(30, 200),
        rng.gauss(0, 1e9),
        float("nan"),
        rng.choice(["", "U8", "F32", "uint8", "\ud800", "\0", "é" * 50]),
    ][kind]


def _tensor_header(rng: random.Random) -> bytes:
    numbers = [-1, 0, 1, 4, 8, 2**31, 2**48 - 1, 2**63, 10**30, 0.5, True, None]
    shape = [rng.choice(numbers) for _ in range(rng.randrange(5))]
    entry = {
        "dtype": rng.choice(["U8", "F64", "BF16", "BOOL", "X", 3]),
        "shape": shape,
        "data_offsets": [rng.choice(numbers), rng.choice(numbers)],
    }
    check = {"dtype": "U64", "shape": [], "data_offsets": [rng.choice([0, 8, 4]), rng.choice([8, 16, 12])]}
    return json.dumps({"__metadata__": {"seq": "3", "parts": "[]"}, "reward": entry, "check": check}).encode()


def _flipped(attacker: Attacker, rng: random.Random) -> bytes:
    data = bytearray(attacker.chunks[NUM_STORED])
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    return bytes(data) if bytes(data) != attacker.chunks[NUM_STORED] else b""


def _crossed(attacker: Attacker, rng: random.Random) -> bytes:
    mine, other = attacker.chunks[NUM_STORED], attacker.chunks[rng.randrange(NUM_STORED)]
    cut = rng.randrange(1, len(mine) - 1)
    return mine[:cut] + other[cut : -rng.randrange(1, 9)]


def _odd_number(rng: random.Random) -> Any:
    return rng.choice([-1, -(2**63), 2**31, 2**63, 10**40, 0.0, 1.5, True, None, "0", [0], {}, 999, 12345])


def _other_flags(attacker: Attacker, rng: random.Random) -> bytes:
    while True:
        is_step = np.array([rng.random() < 0.5 for _ in range(4)])
        if is_step.tolist() != [True, True, True, False]:
            return attacker.next_chunk(arrays={"is_step": is_step})


def _ended_early(attacker: Attacker, rng: random.Random) -> bytes:
    flag = attacker.arrays["terminated"].copy()
    flag[rng.randrange(2)] = True
    return attacker.next_chunk(arrays={"terminated": flag})


def _with_value(attacker: Attacker, path: str, value: Any) -> bytes:
    column = attacker.arrays[path].copy()
    column[1] = value
    return attacker.next_chunk(arrays={path: column})


def _wrong_column(attacker: Attacker, rng: random.Random) -> bytes:
    name = rng.choice(sorted(attacker.arrays))
    array = attacker.arrays[name]
    others = [
        np.zeros((), array.dtype),
        np.zeros(0, array.dtype),
        np.zeros((4, 0), array.dtype),
        np.zeros(len(array) + 1, array.dtype),
        np.zeros((*array.shape, 2), array.dtype),
        np.zeros((1, *array.shape), array.dtype),
        np.zeros((4, 3, 2, 1, 5), np.int64),
        array.astype(np.float16 if array.dtype != np.float16 else np.int8),
    ]
    return attacker.next_chunk(arrays={name: rng.choice([o for o in others if o.shape != array.shape or o.size])})


def _ragged_nonsense(attacker: Attacker, rng: random.Random) -> bytes:
    if not isinstance(attacker.spec.observation.tree, dict):
        return attacker.next_chunk(arrays={"ragged/observation": np.zeros(3, np.uint8)})
    return rng.choice(
        [
            lambda: attacker.next_chunk(
                arrays={
                    "ragged/observation/prompt": np.full(8, 0xFF, np.uint8),
                    "length/observation/prompt": np.array([8, 0, 0, 0], np.uint32),
                }
            ),
            lambda: attacker.next_chunk(arrays={"length/action": np.full(4, 2**32 - 1, np.uint32)}),
            lambda: attacker.next_chunk(arrays={"length/action": np.zeros(40_000, np.uint32)}),
            lambda: attacker.next_chunk(
                arrays={"ragged/action": np.zeros(17, np.uint8), "length/action": np.array([17, 0, 0, 0], np.uint32)}
            ),
            lambda: attacker.next_chunk(arrays={"length/action": np.zeros((2, 2), np.uint32)}),
        ]
    )()


def _info(attacker: Attacker, rng: random.Random) -> bytes:
    wrong = rng.choice(
        [
            {"task": 1},
            {"seed": "x"},
            {"labels": {"a": 1}},
            {"labels": []},
            {"kind": "done"},
            {"split": None},
            {"x": 1},
            [],
            None,
            3,
            {"success": "yes"},
            {"seed": 0.5},
            {"init_state": True},
        ]
    )
    return attacker.next_chunk(attacker.part((4, wrong)))


def _pickled(attacker: Attacker, rng: random.Random) -> bytes:
    data = attacker.pickle
    return rng.choice(
        [
            lambda: data,
            lambda: struct.pack("<Q", len(data)) + data,
            lambda: sealed(data),
            lambda: attacker.next_chunk({"parts": data.decode("latin-1")}),
            lambda: attacker.next_chunk({"seq": data.decode("latin-1")}),
            lambda: attacker.next_chunk(arrays={"pickle": np.frombuffer(data, np.uint8)}),
            lambda: attacker.next_chunk(attacker.part((4, {"labels": data.decode("latin-1")}))),
        ]
    )()


# Each ends its stream with an error.
REFUSED: dict[str, Maker] = {
    "random bytes": _random_bytes,
    "random bytes behind a length": lambda a, r: struct.pack("<Q", n := r.randrange(500)) + r.randbytes(n + 8),
    "random JSON for a header": lambda a, r: sealed(json.dumps(_random_json(r)).encode()),
    "random JSON for a tensor": lambda a, r: sealed(
        json.dumps({"__metadata__": {}, "x": _random_json(r), "check": _random_json(r)}).encode()
    ),
    "numbers that cannot be": lambda a, r: sealed(_tensor_header(r), bytes(8)),
    "a huge header": lambda a, r: struct.pack("<Q", r.choice([2**20 + 1, 2**32, 2**63, 2**64 - 1])) + b"{}" * 20,
    "deep JSON": lambda a, r: sealed(r.choice([b"[", b'{"a":', b'{"__metadata__":[']) * int(10 ** r.uniform(3, 4.8))),
    "deep parts": lambda a, r: a.next_chunk({"parts": "[" * r.choice([2_000, 100_000])}),
    "truncated": lambda a, r: a.chunks[NUM_STORED][: r.randrange(len(a.chunks[NUM_STORED]))],
    "flipped bits": _flipped,
    "surplus bytes": lambda a, r: a.chunks[NUM_STORED] + r.randbytes(r.randrange(1, 50)),
    "halves of two chunks": _crossed,
    "a gap": lambda a, r: a.next_chunk({"seq": str(NUM_STORED + r.choice([1, 2, 1000, 2**31, 2**64, 10**300]))}),
    "no number": lambda a, r: a.next_chunk({"seq": r.choice(["", "x", "3.0", "1e3", "٣x", "9" * 5000, "0x3"])}),
    "a chunk of somebody else": lambda a, r: a.strange[NUM_STORED],
    "the chunk before, renumbered": lambda a, r: _renumbered(a, r.randrange(NUM_STORED)),
    "odd numbers in a part": lambda a, r: a.next_chunk(a.part((r.choice([1, 2]), _odd_number(r)))),
    "an odd episode": lambda a, r: a.next_chunk(a.part((0, r.choice([-1, 2**31, 1.0, True, None, "0", 5])))),
    "an odd state": lambda a, r: a.next_chunk(a.part((3, r.choice(["done", "", None, 1, [], "open", "Ended"])))),
    "odd attributes": _info,
    "half a character": lambda a, r: a.next_chunk(
        a.part(
            (
                4,
                r.choice(
                    [{"task": "\ud800"}, {"labels": {"\udc00": ""}}, {"labels": {"a": "\ud83e"}}, {"actor": "x\udfff"}]
                ),
            )
        )
    ),
    "attributes too large for SQLite": lambda a, r: a.next_chunk(
        a.part((4, {r.choice(["seed", "init_state"]): r.choice([2**63, -(2**63) - 1, 10**100])}))
    ),
    "random parts": lambda a, r: a.next_chunk({"parts": json.dumps([_random_json(r) for _ in range(3)])}),
    "parts of nothing": lambda a, r: a.next_chunk({"parts": "[" + ",".join(['[9,0,0,"open",{}]'] * 10) + "]"}),
    "other flags": _other_flags,
    "an episode that goes on after it ended": _ended_early,
    "an unknown source": lambda a, r: _with_value(a, "source", r.randrange(4, 256)),
    "a reward that is none": lambda a, r: _with_value(a, "reward", r.choice([np.nan, np.inf, -np.inf])),
    "a flag of 2": lambda a, r: sealed_flags(a, r),
    "a column of another kind": _wrong_column,
    "a column too few": lambda a, r: a.next_chunk(drop=r.choice(sorted(a.arrays))),
    "a column too many": lambda a, r: a.next_chunk(
        arrays={r.choice(["x", "row/checksum", "heap", "reward/x", "é"]): np.zeros(4)}
    ),
    "ragged nonsense": _ragged_nonsense,
    "a pickle": _pickled,
    "nothing": lambda a, r: b"",
    # Another chunk under a number that is stored: a copy of the writer would send it.
    "an old number": lambda a, r: a.next_chunk({"seq": str(r.choice([0, 1, 2, -1, -5, -(10**30)]))}),
    "an old number and other rows": lambda a, r: a.next_chunk(
        {"seq": str(r.randrange(NUM_STORED))}, {"policy_version": np.array([r.randrange(2**60) for _ in range(4)])}
    ),
    "an old number and another part": lambda a, r: a.next_chunk(
        {"seq": str(r.randrange(NUM_STORED)), **a.part((0, r.randrange(99)), (1, r.randrange(99)))}
    ),
    "a chunk of somebody else, old": lambda a, r: a.strange[r.randrange(NUM_STORED)],
}


def _renumbered(attacker: Attacker, old: int) -> bytes:
    metadata, arrays = unpack(attacker.chunks[old])
    return b"".join(pack({**metadata, "seq": str(NUM_STORED)}, arrays))


def sealed_flags(attacker: Attacker, rng: random.Random) -> bytes:
    """Flags that are neither 0 nor 1, which `pack` itself would not make."""
    name = rng.choice(["terminated", "truncated", "is_step", "has_proposal"])
    odd = np.full(4, rng.randrange(2, 256), np.uint8).view(bool)
    return attacker.next_chunk(arrays={name: odd})


# Each is answered as a chunk that is there already, and changes nothing.
REPLAYED: dict[str, Maker] = {
    "an old chunk": lambda a, r: a.chunks[r.randrange(NUM_STORED)],
}


def _random_spec(attacker: Attacker, rng: random.Random) -> bytes:
    spec = attacker.spec.to_json()
    leaf = {
        "shape": rng.choice([[-1], [10**15], [2**32, 2**32], [0.5], "x", 3, [[1]], [2**62, 4], [None, None]]),
        "dtype": "uint8",
    }
    kind = rng.randrange(4)
    if kind == 0:
        spec[rng.choice(["observation", "action", "extras"])] = {"$array": leaf}
    elif kind == 1:
        spec["observation"] = {
            "$array": {"shape": [2], "dtype": rng.choice(["O", "complex64", "U5", ">f4", "x", 3, None])}
        }
    elif kind == 2:
        del spec[rng.choice(sorted(spec))]
    else:
        spec["observation"] = {"\ud800": {"$array": {"shape": [], "dtype": "bool"}}}
    return attacker.hello(spec=spec)


# Each is the first frame of a stream, and the last.
HELLOS: dict[str, Maker] = {
    "hello of random bytes": _random_bytes,
    "hello of random JSON": lambda a, r: json.dumps(_random_json(r)).encode(),
    "hello of deep JSON": lambda a, r: r.choice([b"[", b'{"a":']) * 100_000,
    "hello of another version": lambda a, r: a.hello(version=r.choice([0, VERSION + 2, -1, "1", None, [1]])),
    "hello without a name": lambda a, r: a.hello(
        **{r.choice(["writer", "incarnation"]): r.choice(["", "x" * 201, None, 3, "\0", "\ud800", ["a"]])}
    ),
    "hello with a wrong spec": _random_spec,
    "hello of a process that was replaced": lambda a, r: a.hello(incarnation="before"),
    "hello that is a pickle": lambda a, r: a.pickle,
    "hello that is a chunk": lambda a, r: a.chunks[0],
    "hello that is too long": lambda a, r: b" " * (2**20 + 1) if r.random() < 0.05 else a.hello(writer="x" * 10_000),
}


def _other_call(rng: random.Random) -> tuple[str, list[bytes]]:
    """A call that has nothing to do with writing, with something wrong in what it asks for."""
    where = rng.choice(
        [
            "1); drop table episodes; --",
            "(select count(*) from writers) > 0",
            "load_extension('x')",
            "x",
            "",
            "\ud800",
            "randomblob(1000000000) is null",
            "1 in (with recursive r(n) as (select 1 union all select n from r) select n from r)",
            "(" * 500,
        ]
    )
    view = rng.choice(
        [
            None,
            3,
            [],
            {},
            {"name": "x"},
            {"name": "x", "clauses": 3},
            {"name": "x", "clauses": [{}]},
            {"name": "x", "clauses": [{"where": where, "sources": [rng.choice([9, -1, "0", None])]}]},
            {"name": "x", "clauses": [{"where": where, "sources": [0]}] * rng.choice([1, 5000])},
        ]
    )
    name, said = rng.choice(
        [
            (STATUS, {"views": rng.choice([3, "x", [1], None, [view], [None], {"a": 1}])}),
            (
                SAMPLE,
                {
                    "version": VERSION,
                    "view": view,
                    "shape": _random_json(rng),
                    "selector": _random_json(rng),
                    "batch_size": _odd_number(rng),
                    "seed": 0,
                    "rank": 0,
                    "world_size": 1,
                    "spec": None,
                    "state": None,
                },
            ),
            (SAMPLE, {"version": rng.choice([0, None])}),
            (PUBLISH, {"version": rng.choice([-1, 0, 0.5, "1", True, 2**62, []])}),
            (PUBLISH, {}),
            (SUBSCRIBE, {"have": rng.choice([None, "0", 0.5, True, []])}),
            (REQUEST, {"type": _random_json(rng), "payload": _random_json(rng)}),
        ]
    )
    messages = [rng.choice([json.dumps(said).encode()] * 8 + [rng.randbytes(30), b"[" * 50_000])]
    if name == PUBLISH:
        messages.append(rng.choice([rng.randbytes(100), sealed(_tensor_header(rng)), b""]))
    return name, messages


# ---- sending


class Attack:
    """Streams of frames to one server, several at a time."""

    def __init__(self, address: str, report: Report, *, seed: int, trap: Path, without: Sequence[str] = ()):
        self._address = address
        self._report = report
        self._rng = random.Random(seed)
        self._attackers = [Attacker(number, trap) for number in range(NUM_ATTACKERS)]
        self._refused, self._replayed, self._hellos = (
            {kind: maker for kind, maker in kinds.items() if kind not in without}
            for kinds in (REFUSED, REPLAYED, HELLOS)
        )
        self._replays = {  # made once, so that the time goes into sending
            attacker.name: [
                (kind, self._replayed[kind](attacker, self._rng)) for kind in self._replayed for _ in range(20)
            ]
            for attacker in self._attackers
        }

    async def run(self, num_frames: int) -> None:
        """Send at least so many frames."""
        async with grpc.aio.insecure_channel(
            self._address, options=[("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)]
        ) as channel:
            self._calls = {
                name: channel.stream_stream(method(name))
                for name in (WRITE, SAMPLE, PUBLISH, SUBSCRIBE, STATUS, REQUEST)
            }
            for attacker in self._attackers:
                await self._begin(attacker)
            await self._too_large()
            started = time.monotonic()
            await asyncio.gather(*(self._go_on(attacker, num_frames) for attacker in self._attackers))
            self._report.seconds = time.monotonic() - started

    async def _begin(self, attacker: Attacker) -> None:
        """Two processes of one name, the second with some chunks in the store."""
        await self._talk([attacker.hello(incarnation="before"), attacker.chunks[0]])
        answers, code, text = await self._talk([attacker.hello(), *attacker.chunks[:NUM_STORED]])
        assert (len(answers), code) == (1 + NUM_STORED, "OK"), text

    async def _too_large(self) -> None:
        for _ in range(3):
            answers, code, text = await self._talk([self._attackers[0].hello(), bytes(MAX_MESSAGE_BYTES + 1)])
            self._count("a message above the limit", 1, code, text, num_answers=len(answers))

    async def _go_on(self, attacker: Attacker, num_frames: int) -> None:
        rng, report = self._rng, self._report
        while report.frames < num_frames:
            what = rng.random()
            if what < 0.01:
                await asyncio.to_thread(self._knock)
                report.kinds["bytes that are no HTTP"] += 1
                report.frames += 1
                report.refused += 1
            elif what < 0.06:
                token = rng.choice(["", "wrong" * 5, TOKEN[:-1], None])
                answers, code, text = await self._talk([attacker.hello(writer=GOOD)], token=token)
                self._count("the wrong token", 0, code, text, num_answers=len(answers))
            elif what < 0.1:
                name, messages = _other_call(rng)
                answers, code, text = await self._talk(messages, name=name)
                self._count(f"another call: {name}", 0, code, text, num_answers=len(answers))
            elif what < 0.3:
                kind = rng.choice(list(self._hellos))
                answers, code, text = await self._talk([self._hellos[kind](attacker, rng)])
                self._count(kind, 0, code, text, num_answers=len(answers))
            else:
                await self._stream(attacker)

    async def _stream(self, attacker: Attacker) -> None:
        """Replays, to which the server answers, and then a frame that ends the stream."""
        rng, report = self._rng, self._report
        replays = rng.choices(self._replays[attacker.name], k=REPLAYS)
        last = rng.choice(list(self._refused))
        frames = [frame for _, frame in replays]
        answers, code, text = await self._talk([attacker.hello(), *frames, self._refused[last](attacker, rng)])
        answered = max(len(answers) - 1, 0)
        report.frames += REPLAYS
        report.duplicates += min(answered, REPLAYS)
        report.kinds.update(kind for kind, _ in replays[:answered])
        if answered < REPLAYS:
            report.problem(replays[answered][0], f"expected an answer, got {code}: {text}")
        else:
            self._count(last, 1 + REPLAYS, code, text, num_answers=len(answers))

    def _count(self, kind: str, wanted_answers: int, code: str, text: str, *, num_answers: int) -> None:
        report = self._report
        report.frames += 1
        report.kinds[kind] += 1
        if num_answers == wanted_answers and code in OURS and "Traceback" not in text:
            report.refused += 1
        else:
            report.problem(kind, f"expected a refusal, got {num_answers - wanted_answers} answers, then {code}: {text}")

    async def _talk(
        self, messages: list[bytes], *, token: str | None = TOKEN, name: str = WRITE
    ) -> tuple[list[bytes], str, str]:
        """The answers to a stream, and how it ended."""
        metadata = () if token is None else ((TOKEN_KEY, f"Bearer {token}"),)
        call = self._calls[name](iter(messages), metadata=metadata, timeout=30)
        answers: list[bytes] = []
        try:
            async for answer in call:
                answers.append(answer)
        except grpc.aio.AioRpcError as error:
            text = error.details() or ""
            if text == "Internal error from Core":  # what grpc.aio says if a stream ends before it has sent all
                return answers, "ended early", text
            return answers, error.code().name, text
        return answers, "OK", ""

    def _knock(self) -> None:
        """Bytes that are no HTTP at all, or only begin like it."""
        host, _, port = self._address.rpartition(":")
        data = self._rng.choice([b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(data + self._rng.randbytes(self._rng.randrange(300)))


# ---- the good client


def good_episode(seed: int) -> Episode:
    return random_episode(small_spec(), 10 + seed % 30, seed)


def write_good_episodes(address: str, place: Path) -> dict[str, Any]:
    """Write until standard input ends; some 100 steps a second."""
    worst_append_s = worst_delivery_s = 0.0
    steps = seed = 0
    ended = _stdin_ended()
    with connect(address, token=TOKEN) as remote:
        config = OutboxConfig(block_timeout_s=30.0)
        writer = remote.writer(GOOD, small_spec(), spool=place, commit_steps=10, config=config)
        with writer:
            print("ready", flush=True)
            while seed < 3 or not next(ended):
                episode = good_episode(seed)
                writer.begin(episode.info)
                for step in episode.steps():
                    started = time.monotonic()
                    writer.append(step)
                    worst_append_s = max(worst_append_s, time.monotonic() - started)
                    steps += 1
                    time.sleep(0.008)
                writer.end(episode.last_observation)
                started = time.monotonic()
                assert writer.wait_delivered(60), writer.delivery
                worst_delivery_s = max(worst_delivery_s, time.monotonic() - started)
                seed += 1
    return {"steps": steps, "episodes": seed, "append_s": worst_append_s, "delivery_s": worst_delivery_s}


def _stdin_ended() -> Iterator[bool]:
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        try:
            yield os.read(sys.stdin.fileno(), 1) == b""
        except BlockingIOError:
            yield False


# ---- all together


def serve(place: Path) -> None:
    """Serve the store at `place` until standard input ends."""
    config = ServerConfig(port=0, token=TOKEN, max_message_bytes=MAX_MESSAGE_BYTES)
    with Store.open(place) as store, Server(store, config) as server:
        print(server.address, flush=True)
        sys.stdin.read()


def _start(*arguments: str | Path, stderr: Any = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.faults.hostile", *map(str, arguments)]
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(root / "src")]))
    return subprocess.Popen(
        command,
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def run(place: Path, num_frames: int, *, seed: int = 0, without: Sequence[str] = ()) -> Report:
    """Attack a server with a new store at `place`, and check everything afterwards."""
    report = Report()
    trap = place / "the pickle was opened"
    log = place / "server.log"
    with log.open("w") as errors:
        server = _start("--serve", place / "store", stderr=errors)
        good: subprocess.Popen[str] | None = None
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            good = _start("--good", address, place / "spool")
            assert good.stdout is not None
            assert good.stdout.readline() == "ready\n"
            asyncio.run(Attack(address, report, seed=seed, trap=trap, without=without).run(num_frames))
            said = json.loads(good.communicate()[0] or "{}")
            good_failed = good.returncode != 0
            report.server_alive = server.poll() is None and _is_serving(address)
            report.server_peak_bytes = _peak_bytes(server.pid)
            server.communicate()
        finally:
            for process in (good, server):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.communicate()
    if good_failed or not said:
        report.problem("good client", f"ended with {said}")
    else:
        report.good_steps_sent = said["steps"]
        report.good_worst_append_s, report.good_worst_delivery_s = said["append_s"], said["delivery_s"]
    if server.returncode != 0:
        report.problem("server", f"ended with {server.returncode}")
    if "Traceback" in log.read_text():
        report.problem("server.log", log.read_text()[-2000:])
    if trap.exists():
        report.problem("pickle", "was opened")
    _check_store(place / "store", said.get("episodes", 0), report)
    return report


def _check_store(place: Path, num_good: int, report: Report) -> None:
    found = verify(place)
    if not found.ok:
        report.problem("verify", "; ".join(found.problems[:3]))
    good = 0
    with Reader(place) as reader:
        names = {writer.id: writer.name for writer in reader.catalog.writers()}
        for record in reader.episodes():
            if names.get(record.writer) != GOOD:
                if (record.num_rows, record.state) not in ((4, "cut"), (4 * NUM_STORED, "open")):
                    report.problem("rows of an attacker", f"{record}")
            elif reader.read(record.id).equals(good_episode(good)):
                report.good_steps_stored += record.num_steps
                good += 1
            else:
                report.problem("good episode", f"{record.id} is not as it was")
    if good != num_good:
        report.problem("good episodes", f"{num_good} were written and {good} are stored")


def _is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        return bool(channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == b"\x08\x01")


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="Send frames that no client of ours would send.")
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", action="append", default=[], help="a kind of frame to leave out")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--good", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return 0
    if options.good is not None:
        print(json.dumps(write_good_episodes(options.good[0], Path(options.good[1]))))
        return 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as place:
        report = run(Path(place), options.frames, seed=options.seed, without=options.without)
    print(
        f"frames sent          {report.frames} of {len(report.kinds)} kinds in {report.seconds:.0f} s "
        f"({report.frames / report.seconds:.0f}/s)\n"
        f"refused              {report.refused}\n"
        f"accepted             {report.duplicates} (harmless duplicates)\n"
        f"server alive         {report.server_alive}\n"
        f"peak memory          {report.server_peak_bytes / 2**20:.0f} MiB\n"
        f"good client          {report.good_steps_sent} steps sent, {report.good_steps_stored} stored bit-equal; worst "
        f"append {report.good_worst_append_s * 1e3:.1f} ms, worst delivery {report.good_worst_delivery_s * 1e3:.0f} ms"
    )
    for kind, text in report.problems.items():
        print(f"PROBLEM              {kind}: {text}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
