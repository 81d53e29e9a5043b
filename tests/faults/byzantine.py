"""A kit of clients that mean harm, at a real server, beside a writer and a learner that mean well.

    python -m tests.faults.byzantine --rounds 5 --idle 1000

| process | does |
|---|---|
| this one | starts the others, one round without and one with attackers in turn, and compares |
| `understudy serve` | the server, alone in a process, so that its memory and CPU time are its own |
| `--honest ADDRESS` | writes and samples a fixed amount of work for each line that it is sent, and says what it cost |
| `--attack ADDRESS` | all attacks at once, until it is ended; counts what came of each |

Speed is work for a second of CPU time, of the server and the honest client together. It does not depend on what else
runs on the machine, and everything that attackers make the server compute counts against it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests.writing import Collector, write_episode

from understudy.core import ArraySpec, Spec, Step, StepSpec, text
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import EVERYTHING, Reader, Writer, verify
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.sample.selectors import Uniform
from understudy.service import connect
from understudy.service.wire.batches import selector_to_json, shape_to_json, view_to_json
from understudy.service.wire.chunks import encode_chunk
from understudy.service.wire.message import pack, to_json
from understudy.service.wire.protocol import (
    ERROR_KEY,
    PUBLISH,
    SAMPLE,
    STATUS,
    SUBSCRIBE,
    VERSION,
    WRITE,
    method,
)

EVIL = "evil"  # how the names of all attackers begin
HONEST_SPEC, EVIL_SPEC = robot_spec(64), small_spec()
TEXT_SPEC = StepSpec(observation=Spec({"said": text()}), action=Spec(ArraySpec(shape=(1,), dtype="float32")))
BATCH_SIZE = 64
UNREAD_STEPS = 300  # in a batch that nobody reads; 16 streams of them want three times the memory that there is
MEMORY_MB = 256  # that the server may use for batches
PAUSE_S = 0.5  # between two attacks of a kind, at least
PAUSE_SHARE = 8.0  # and this many times as long as the last one took, so that a busy machine is not attacked more
TIMEOUT_S = 300.0  # the machine may be busy
ENDLESS = "(with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c)"
LONG = " or ".join(["task like '%a%b%c%d%e%'"] * 70)  # allowed, and as costly as a condition can be


ONCE = ("idle_connections", "half_publications", "trickling_streams", "unread_batches")  # and they stay
REPEATED = ("wrong_sizes", "reused_incarnation", "endless_queries", "long_queries", "huge_batches")
KINDS = (*ONCE, *REPEATED)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a fixed amount of work took."""

    wall_s: float
    cpu_s: float


@dataclass(kw_only=True)
class Report:
    """What the attackers achieved."""

    writing: list[float] = field(default_factory=list)  # speed beside attackers, as a share of that alone
    sampling: list[float] = field(default_factory=list)
    writing_wall: list[float] = field(default_factory=list)  # the same by the clock on the wall
    sampling_wall: list[float] = field(default_factory=list)
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)  # by attack
    server_peak_bytes: int = 0  # of its memory, without mapped files
    server_ended_s: float = 0.0  # from SIGTERM to its end, with all attacks going on
    server_code: int | None = None
    episodes_written: int = 0
    episodes_stored: int = 0
    store_problems: list[str] = field(default_factory=list)


# ---- the honest client


def honest(address: str) -> None:
    """For each line on stdin, {"episodes", "batches"}: do that much and print what each took."""
    with connect(address) as remote, remote.writer("honest", HONEST_SPEC, commit_steps=10) as writer:
        write_episode(writer, random_episode(HONEST_SPEC, 30, 0), seed=0)
        assert writer.wait_delivered(TIMEOUT_S)
        sampler = remote.sampler(EVERYTHING, batch_size=BATCH_SIZE, seed=1, spec=HONEST_SPEC, depth=1)
        sampler.follow()
        sampler.sample()
        print("ready", flush=True)
        number = 1
        for line in sys.stdin:
            wanted = json.loads(line)
            if wanted["what"] == "write":
                for _ in range(wanted["amount"]):
                    write_episode(writer, random_episode(HONEST_SPEC, 30, number % 7), seed=number)
                    number += 1
                assert writer.wait_delivered(TIMEOUT_S), writer.delivery
            else:
                for _ in range(wanted["amount"]):
                    batch = sampler.sample()
                    assert np.isfinite(batch.reward).all()
            print(json.dumps({"episodes": number}), flush=True)


class Honest:
    """The process of the honest client."""

    def __init__(self, address: str, server: subprocess.Popen[str]):
        self._server = server
        self._process = _start("--honest", address)
        assert self._read() == "ready"
        self.num_episodes = 1

    def work(self, what: str, amount: int) -> Cost:
        before_s, before_cpu_s = time.monotonic(), self._cpu_s()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, "amount": amount}) + "\n")
        self._process.stdin.flush()
        self.num_episodes = json.loads(self._read())["episodes"]
        return Cost(wall_s=time.monotonic() - before_s, cpu_s=self._cpu_s() - before_cpu_s)

    def _cpu_s(self) -> float:
        return _cpu_s(self._process.pid) + _cpu_s(self._server.pid)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_S)


# ---- attacks: each is called again and again, and returns what came of it


class Attacks:
    """All attacks on one server. Each runs in a thread of its own until the process ends."""

    def __init__(self, address: str, *, num_idle: int, seed: int):
        self.address = address
        self.rng = random.Random(seed)
        self.outcomes: dict[str, Counter[str]] = {}
        self._num_idle = num_idle
        self._kept: list[Any] = []  # sockets and streams that stay open
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        self._chunks = _messages()

    def run(self, kinds: list[str]) -> None:
        """Begin the attacks of these kinds; all have begun when this returns."""
        for kind in kinds:
            attack = getattr(self, kind)
            self._count(kind, attack())
            if kind in REPEATED:
                threading.Thread(target=self._repeat, args=(attack,), daemon=True).start()

    def _repeat(self, attack: Callable[[], str]) -> None:
        took_s = 0.0
        while True:
            time.sleep(max(PAUSE_S, PAUSE_SHARE * took_s))
            began_s = time.monotonic()
            self._count(attack.__name__, attack())
            took_s = time.monotonic() - began_s

    def _count(self, kind: str, outcome: str) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome] += 1

    def _outcome(self, call: Any) -> str:
        """How a call ended: the class of our error, or the status of gRPC."""
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return str(dict(error.trailing_metadata() or ()).get(ERROR_KEY, error.code().name))
        return "accepted"

    def _write(self, incarnation: str, messages: list[bytes], *, name: str = EVIL) -> str:
        hello = {"version": VERSION, "writer": name, "incarnation": incarnation, "spec": EVIL_SPEC.to_json()}
        return self._outcome(
            self._channel.stream_stream(method(WRITE))(iter([to_json(hello), *messages]), timeout=TIMEOUT_S)
        )

    def wrong_sizes(self) -> str:
        """Headers that announce other sizes than follow, torn chunks, and messages above the limit."""
        chunk = self._chunks[0][0]
        cut = self.rng.randrange(8, len(chunk))
        lies = [
            (2**62).to_bytes(8, "little") + chunk[8:],
            chunk[:cut],
            chunk + bytes(100),
            chunk.replace(b'"shape":[', b'"shape":[9', 1),
            bytes(65 * 2**20),
        ]
        return self._write("sizes", [self.rng.choice(lies)], name=f"{EVIL}-sizes")

    def reused_incarnation(self) -> str:
        """Two different histories under one incarnation."""
        mine, other = self._chunks
        self._write("copied", mine)
        return self._write("copied", other)

    def endless_queries(self) -> str:
        hidden = ("1 --", f"'\n and {ENDLESS} and --'", "1 or\n 1")
        clauses = [{"where": where, "sources": [0]} for where in self.rng.choice([hidden, (ENDLESS,)])]
        return self._status(clauses) if self.rng.random() < 0.5 else self._sample({"clauses": clauses})

    def long_queries(self) -> str:
        return self._status([{"where": LONG, "sources": [0]}] * 16)

    def _status(self, clauses: list[dict[str, Any]]) -> str:
        request = to_json({"views": [{"name": "x", "clauses": clauses}]})
        try:
            self._channel.unary_unary(method(STATUS))(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return str(dict(error.trailing_metadata() or ()).get(ERROR_KEY, error.code().name))
        return "accepted"

    def _sample(self, view: dict[str, Any], *requests: bytes, **changes: Any) -> str:
        hello = _sample_hello(**{"view": {"name": "x", **view}, **changes})
        call = self._channel.stream_stream(method(SAMPLE))(iter([hello, *requests]), timeout=TIMEOUT_S)
        return self._outcome(call)

    def huge_batches(self) -> str:
        """Batches of a text of 10 MB, 150 times; and of more rows than fit into any memory."""
        if "huge_batches" not in self.outcomes:
            with connect(self.address) as remote, remote.writer(f"{EVIL}-text", TEXT_SPEC, commit_steps=1) as writer:
                writer.begin()
                step = Step(observation={"said": "x" * 10_000_000}, action=np.zeros(1, np.float32), reward=0.0)
                writer.append(step)
                writer.cut({"said": "y"})
                writer.wait_delivered(TIMEOUT_S)
        size = self.rng.choice([150, 10**9])
        found = [
            self._sample(view_to_json(EVERYTHING), to_json({"size": size}), spec=number, batch_size=size)
            for number in (2, 3)  # it does not know which spec is that of the text
        ]
        return "StoreError" if "StoreError" in found else found[0]

    # ---- those that begin once and stay

    def idle_connections(self) -> str:
        """Sockets that say nothing, or only begin to."""
        host, _, port = self.address.rpartition(":")
        for number in range(self._num_idle):
            try:
                sock = socket.create_connection((host, int(port)), timeout=10)
                if number % 3 == 0:
                    sock.send(b"PRI * HTTP/2.0\r\n\r\nSM")
            except OSError:
                return f"{number} open"
            self._kept.append(sock)
        return f"{self._num_idle} open"

    def half_publications(self) -> str:
        """Uploads of parameters that stop in the middle."""
        first, *_ = pack({"said": "{}"}, {"w": np.zeros(50 * 2**18, np.float32)})
        for _ in range(8):
            messages = _then_silence([to_json({"version": None}), bytes(first)])
            self._keep(self._channel.stream_unary(method(PUBLISH)).future(messages))
        self._keep(self._channel.unary_stream(method(SUBSCRIBE))(to_json({"have": 0, "store": ""})))
        return "open"

    def trickling_streams(self) -> str:
        """Writers that send a byte at a time: half a hello, then nothing; and a raw connection that trickles."""
        for number in range(16):
            hello = {
                "version": VERSION,
                "writer": f"{EVIL}-slow",
                "incarnation": str(number),
                "spec": EVIL_SPEC.to_json(),
            }
            self._keep(self._channel.stream_stream(method(WRITE))(_then_silence([to_json(hello)])))
        threading.Thread(target=self._trickle, daemon=True).start()
        return "open"

    def _trickle(self) -> None:
        host, _, port = self.address.rpartition(":")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) * 1000
        while True:
            try:
                with socket.create_connection((host, int(port)), timeout=10) as sock:
                    for byte in preface:
                        sock.send(bytes([byte]))
                        time.sleep(0.05)
            except OSError:
                time.sleep(PAUSE_S)

    def unread_batches(self) -> str:
        """Learners that ask for many batches and read none."""
        for _ in range(16):
            hello = _sample_hello(view={"name": "x", **view_to_json(EVERYTHING)}, spec=1, batch_size=UNREAD_STEPS)
            requests = [hello, *[to_json({"size": UNREAD_STEPS})] * 4]
            self._keep(self._channel.stream_stream(method(SAMPLE))(_then_silence(requests)))
        return "open"

    def _keep(self, call: Any) -> None:
        self._kept.append(call)


def _sample_hello(**changes: Any) -> bytes:
    said = {
        "version": VERSION,
        "shape": shape_to_json(Transitions()),
        "selector": selector_to_json(Uniform()),
        "batch_size": 4,
        "seed": 0,
        "spec": None,
        "rank": 0,
        "world_size": 1,
    }
    return to_json({**said, **changes})


def _then_silence(messages: list[bytes]) -> Iterator[bytes]:
    yield from messages
    threading.Event().wait()


def _messages() -> tuple[list[bytes], list[bytes]]:
    """The chunks of two writers whose first chunks are the same."""
    both = []
    for seeds in ((1, 2), (1, 3)):
        collector = Collector()
        writer = Writer(collector, EVIL, "i", EVIL_SPEC, commit_steps=4)
        for seed in seeds:
            write_episode(writer, random_episode(EVIL_SPEC, 10, seed))
        both.append([b"".join(encode_chunk(c.seq, c.columns, c.parts)) for c in collector.chunks])
    return both[0], both[1]


def attack(address: str, kinds: list[str], *, num_idle: int, seed: int) -> None:
    """Attack until stdin ends; then print what came of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, num_idle + 1000)), hard))
    attacks = Attacks(address, num_idle=num_idle, seed=seed)
    attacks.run(kinds)
    print("attacking", flush=True)
    sys.stdin.read()
    print(json.dumps({kind: dict(found) for kind, found in attacks.outcomes.items()}), flush=True)
    os._exit(0)  # threads and streams are still at it


class Attackers:
    """The process of the attackers."""

    def __init__(self, address: str, kinds: Sequence[str], *, num_idle: int, seed: int):
        numbers = ("--idle", str(num_idle), "--seed", str(seed))
        self._process = _start("--attack", address, *numbers, "--kinds", *kinds)
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line == "attacking", line

    def close(self) -> dict[str, dict[str, int]]:
        outcomes, _ = self._process.communicate(timeout=TIMEOUT_S)
        return dict(json.loads(outcomes))

    def kill(self) -> None:
        self._process.kill()
        with self._process:  # closes its pipes
            pass


# ---- all of it


def run(
    directory: Path,
    *,
    rounds: int,
    episodes: int,
    batches: int,
    num_idle: int,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
) -> Report:
    """Alternate rounds without and with attackers; at the end, stop the server while they attack."""
    report = Report()
    store = directory / "store"
    options = ["--port", "0", "--max-batch-memory-mb", str(MEMORY_MB)]
    command = [sys.executable, "-m", "understudy", "serve", str(store), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, ExitStack() as stack:
        stack.callback(server.kill)
        assert server.stdout is not None
        address = server.stdout.readline().strip().rpartition(" at ")[2]
        memory = MemoryWatch(server.pid)
        stack.callback(memory.close)
        client = Honest(address, server)
        client.work("write", 2)  # what is paid once
        client.work("sample", 5)
        for number in range(rounds):
            alone = client.work("write", episodes), client.work("sample", batches)
            attackers = Attackers(address, kinds, num_idle=num_idle, seed=seed + number)
            try:
                beside = client.work("write", episodes), client.work("sample", batches)
                last = number == rounds - 1
                if last:
                    report.episodes_written = client.num_episodes
                    client.close()
                    report.server_peak_bytes = memory.peak_bytes
                    began_s = time.monotonic()
                    server.send_signal(signal.SIGTERM)
                    report.server_code = server.wait(TIMEOUT_S)
                    report.server_ended_s = time.monotonic() - began_s
                for kind, found in attackers.close().items():
                    merged = Counter(report.outcomes.get(kind, {})) + Counter(found)
                    report.outcomes[kind] = dict(merged)
            finally:
                attackers.kill()
            for ratios, walls, before, after in zip(
                (report.writing, report.sampling),
                (report.writing_wall, report.sampling_wall),
                alone,
                beside,
                strict=True,
            ):
                ratios.append(before.cpu_s / after.cpu_s)
                walls.append(before.wall_s / after.wall_s)
    report.store_problems = [str(problem) for problem in verify(store).problems]
    with Reader(store) as reader:
        writers = {writer.id: writer.name for writer in reader.catalog.writers()}
        ended = [record for record in reader.episodes("state = 'ended'") if writers[record.writer] == "honest"]
    report.episodes_stored = len(ended)
    return report


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.faults.byzantine", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class MemoryWatch:
    """The most memory of a process while it was watched, without pages of mapped files, which the system can drop."""

    def __init__(self, pid: int):
        self._status = Path(f"/proc/{pid}/status")
        self.peak_bytes = 0
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            try:
                lines = self._status.read_text().splitlines()
            except OSError:  # the process has ended
                return
            for line in lines:
                if line.startswith("RssAnon"):
                    self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) * 1024)

    def close(self) -> None:
        self._over.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=100, help="that the honest writer writes in half a round")
    parser.add_argument("--batches", type=int, default=200, help="that the honest learner draws in half a round")
    parser.add_argument("--idle", type=int, default=1000, help="connections that say nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of attacks")
    parser.add_argument("--honest", metavar="ADDRESS")
    parser.add_argument("--attack", metavar="ADDRESS")
    given = parser.parse_args()
    if given.honest:
        honest(given.honest)
    elif given.attack:
        attack(given.attack, given.kinds, num_idle=given.idle, seed=given.seed)
    else:
        with tempfile.TemporaryDirectory() as directory:
            report = run(
                Path(directory),
                rounds=given.rounds,
                episodes=given.episodes,
                batches=given.batches,
                num_idle=given.idle,
                seed=given.seed,
                kinds=given.kinds,
            )
        print(json.dumps(asdict(report), indent=2))
        for name in ("writing", "sampling", "writing_wall", "sampling_wall"):
            print(f"{name}: median {statistics.median(getattr(report, name)):.2f} of the speed alone")


if __name__ == "__main__":
    main()
