"""Records the wire of protocol version 1: what a client and a server say to each other. It was run once.

    python -m tests.golden.wire.make_wire_1

The transcript beside this file is kept: every later server must serve its client, and every later client must work with
its server, for as long as protocol version 1 is supported.
"""

from __future__ import annotations

import itertools
import queue
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
from tests.golden.wire.replay import CLIENT, Call, recording, save

from understudy.core import Episode
from understudy.core.examples import CANONICAL
from understudy.replay import EVERYTHING, Store, UniformEpisodes
from understudy.service import Server, ServerConfig, connect
from understudy.service.wire.protocol import SERVICE, WRITE

TRANSCRIPT = Path(__file__).parent / "wire_1.jsonl"
WEIGHTS = {"layer": {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.zeros(2, np.float64)}}


@contextmanager
def numbered_ids(first: int) -> Iterator[None]:
    """Ids that are the same each time."""
    numbers = itertools.count(first)
    with patch("uuid.uuid4", lambda: uuid.UUID(int=next(numbers))):
        yield


@contextmanager
def new_server(directory: Path) -> Iterator[Server]:
    """A server of an empty store whose id is always the same."""
    with numbered_ids(1000):
        store = Store.open(directory / "store")
    with store, Server(store, ServerConfig(port=0)) as server:
        yield server


def use(address: str, spool: Path) -> list[Any]:
    """Do with a server what a robot, a learner and an actor do; returns what they got."""
    got: list[Any] = []
    spec, episode = CANONICAL["nested"]()
    with connect(address) as remote:
        with numbered_ids(1), remote.writer("arm", spec, spool=spool, commit_steps=4) as writer:
            _write(writer, episode)
            got.append(writer.delivery.delivered)
        got.append(remote.status([EVERYTHING]))
        with remote.sampler(EVERYTHING, batch_size=4, seed=3, depth=0) as sampler:
            got += [sampler.sample(), sampler.sample()]
            state = sampler.state()
        with remote.sampler(EVERYTHING, batch_size=4, seed=3, selector=UniformEpisodes(), depth=0) as sampler:
            sampler.follow()
        with remote.sampler(EVERYTHING, batch_size=4, seed=3, depth=0) as sampler:
            sampler.restore(state)
            got.append(sampler.sample())
        got += [remote.publish(WEIGHTS, metadata={"step": "7"}), remote.publish(WEIGHTS, bfloat16=True)]
        with remote.parameters() as subscription:
            got.append(subscription.wait(timeout_s=30.0))
    return got


def _write(writer: Any, episode: Episode) -> None:
    """One chunk at a time, so that the order of messages and answers is always the same."""
    writer.begin(episode.info)
    for step in episode.steps():
        writer.append(step)
        if writer.num_uncommitted == 0:
            assert writer.wait_delivered(30.0)
    writer.end(episode.last_observation)
    assert writer.wait_delivered(30.0)


def make(directory: Path) -> list[Call]:
    with new_server(directory) as server, recording(server.address) as (proxy, calls):
        use(proxy, directory / "spool")
        written = next(call for call in calls if call.method == WRITE)
        sent = [content for side, content in written.messages if side == CLIENT]
        successor = sent[0].replace(f"{1:032x}".encode(), f"{77:032x}".encode())
        for messages in (
            sent[:3],  # chunks that the server has: acknowledged, and stored once
            [successor, sent[1]],  # another process of this writer
            sent[:2],  # the first one again: refused, because it has a successor
        ):
            calls.append(_send(messages, proxy, calls))
    return calls


def _send(messages: list[bytes], proxy: str, calls: list[Call]) -> Call:
    """Send messages of a write stream by hand, reading an answer after each."""
    num_before = len(calls)
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(proxy) as channel:
        answers = channel.stream_stream(f"/{SERVICE}/{WRITE}")(iter(outgoing.get, None))
        try:
            for message in messages:
                outgoing.put(message)
                next(answers)
            outgoing.put(None)
            assert list(answers) == []
        except grpc.RpcError:  # it is in the transcript
            outgoing.put(None)
    call = calls.pop(num_before)
    call.by_hand = True
    return call


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = make(Path(temporary))
    save(TRANSCRIPT, found)
    for call in found:
        print(call.method, call.code, len(call.messages), call.trailer, call.by_hand)
