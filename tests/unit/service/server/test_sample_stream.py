"""SampleStream: a client's sampler on the server, from a store that is empty at first."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import ArraySpec, Spec, SpecError, Step, StepSpec, StoreError, UnavailableError, WireError, text
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import EVERYTHING, Store
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.sample.selectors import Uniform
from understudy.service.server import sample_stream
from understudy.service.server.batch_memory import BatchMemory
from understudy.service.server.sample_stream import RAGGED_COPIES, SampleStream
from understudy.service.wire.batches import num_bytes_of, selector_to_json, shape_to_json, view_to_json
from understudy.service.wire.message import from_json, to_json
from understudy.service.wire.protocol import VERSION, ReplacedError


def hello(**changes: Any) -> dict[str, Any]:
    return {
        "version": VERSION,
        "view": view_to_json(EVERYTHING),
        "shape": shape_to_json(Transitions()),
        "selector": selector_to_json(Uniform()),
        "batch_size": 4,
        "seed": 0,
        "spec": None,
        "rank": 0,
        "world_size": 1,
        **changes,
    }


def stream_of(store: Store, /, *, memory_bytes: int = 2**30, **changes: Any) -> SampleStream:
    return SampleStream(store.path, hello(**changes), BatchMemory(memory_bytes))


def test_an_empty_store_has_nothing_to_draw_until_it_has(store: Store) -> None:
    stream = stream_of(store)
    assert from_json(stream.hello_reply())["available"] == 0
    with pytest.raises(StoreError, match="there is nothing to draw: the store is empty"):
        stream.answer(to_json({"size": 4}))
    write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 12, 1))
    (status,) = stream.answer(to_json({"size": 0}))
    assert from_json(status)["available"] == 12
    status, header, *_ = stream.answer(to_json({"size": 4}))
    assert from_json(status)["record"] is not None
    assert b'"reward":' in header
    stream.close()
    assert stream.answer(to_json({"size": 4})) == []  # its client has left


def test_the_memory_of_a_sampler_is_free_when_its_stream_is_closed(store: Store) -> None:
    write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 12, 1))
    stream = stream_of(store)
    stream.answer(to_json({"size": 4}))
    sampler = weakref.ref(stream._sampler)
    gc.disable()  # in a server it may come only after many learners have left
    try:
        stream.close()
        assert sampler() is None
    finally:
        gc.enable()


def test_another_store_than_before_is_refused(store: Store) -> None:
    with pytest.raises(ReplacedError, match="this server has another store than the one that the sampler began with"):
        stream_of(store, store="another")


@pytest.mark.parametrize(
    "changes", [{"seed": -1}, {"batch_size": "4"}, {"spec": "x"}, {"version": "9"}, {"shape": None}]
)
def test_a_hello_that_cannot_be_is_a_wire_error(store: Store, changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        stream_of(store, **changes)


@pytest.mark.parametrize("request_", [{"size": -1}, {"size": 4, "part": [3, 2]}, {"size": 4, "part": "x"}, {"x": 1}])
def test_a_request_that_cannot_be_is_a_wire_error(tmp_path: Path, store: Store, request_: dict[str, Any]) -> None:
    write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 12, 1))
    stream = stream_of(store)
    with pytest.raises(WireError):
        stream.answer(to_json(request_))
    stream.close()


def test_text_is_counted_before_a_batch_is_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StepSpec(observation=Spec({"said": text()}), action=Spec(ArraySpec(shape=(1,), dtype="float32")))
    writer = store.writer("w", spec)
    writer.begin()
    writer.append(Step(observation={"said": "x" * 10_000}, action=np.zeros(1, np.float32), reward=0.0, terminated=True))
    writer.end({"said": "y"})
    stream = stream_of(store, batch_size=64)
    stream.answer(to_json({"size": 64}))
    (taken,) = stream._taken
    fixed, ragged = taken
    assert fixed == num_bytes_of(stream._batch)
    assert ragged == 64 * 10_001 * RAGGED_COPIES  # observation and next observation
    assert stream._memory.num_bytes == 2 * fixed + ragged  # the batch that is filled again, and what is sent
    monkeypatch.setattr(sample_stream, "MAX_BATCH_BYTES", ragged - 1)
    with pytest.raises(StoreError, match=r"\d+ bytes of text and ragged values in one batch, and \d+ is the most"):
        stream.answer(to_json({"size": 64}))
    stream.sent()
    assert stream._memory.num_bytes == fixed
    stream.close()
    assert stream._memory.num_bytes == 0


def test_a_batch_that_has_no_room_is_refused_for_now(store: Store) -> None:
    write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 12, 1))
    stream = stream_of(store, memory_bytes=100_000)
    request = to_json({"size": 8})
    stream.answer(request)
    num_bytes = stream._memory.num_bytes
    while stream._memory.num_bytes + num_bytes // 2 <= 100_000:
        stream.answer(request)
    with pytest.raises(UnavailableError, match=r"no room for a batch that takes \d+ bytes: .* of the 100000 for batch"):
        stream.answer(request)
    stream.sent()
    stream.answer(to_json({"size": 8}))
    stream.close()
    assert stream._memory.num_bytes == 0


@pytest.mark.parametrize(
    "value", [5, "all", {}, {"all": 5}, {"all": {"size": 5, "crop": None}}, {"fields": 5}, {"fields": {"a": {}}}]
)
def test_a_size_that_is_none_is_refused(store: Store, value: Any) -> None:
    with pytest.raises(WireError, match="resize: not a size"):
        stream_of(store, resize=value)


@pytest.mark.parametrize(
    "value",
    [
        {"all": {"size": [5], "crop": None}},
        {"all": {"size": ["5", "5"], "crop": None}},
        {"all": {"size": [10**9, 10**9], "crop": None}},
        {"all": {"size": [2, 2], "crop": [0, 0, -4, 4]}},
        {"fields": {"nowhere": {"size": [2, 2], "crop": None}}},
    ],
)
def test_a_size_that_no_camera_has_to_give_is_refused(store: Store, value: Any) -> None:
    write_episode(store.writer("w", robot_spec(16)), random_episode(robot_spec(16), 3, 0))
    with pytest.raises(SpecError, match="resize: "):
        stream_of(store, resize=value)
