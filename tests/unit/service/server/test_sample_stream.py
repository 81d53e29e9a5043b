"""SampleStream: a client's sampler on the server, from a store that is empty at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.writing import write_episode

from understudy.core import StoreError, WireError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EVERYTHING, Store
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.sample.selectors import Uniform
from understudy.service.server.sample_stream import SampleStream
from understudy.service.wire.batches import selector_to_json, shape_to_json, view_to_json
from understudy.service.wire.protocol import VERSION, ReplacedError, from_json, to_json


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


def test_an_empty_store_has_nothing_to_draw_until_it_has(store: Store) -> None:
    stream = SampleStream(store.path, hello())
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


def test_another_store_than_before_is_refused(store: Store) -> None:
    with pytest.raises(ReplacedError, match="this server has another store than the one that the sampler began with"):
        SampleStream(store.path, hello(store="another"))


@pytest.mark.parametrize(
    "changes", [{"seed": -1}, {"batch_size": "4"}, {"spec": "x"}, {"version": "9"}, {"shape": None}]
)
def test_a_hello_that_cannot_be_is_a_wire_error(store: Store, changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        SampleStream(store.path, hello(**changes))


@pytest.mark.parametrize("request_", [{"size": -1}, {"size": 4, "part": [3, 2]}, {"size": 4, "part": "x"}, {"x": 1}])
def test_a_request_that_cannot_be_is_a_wire_error(tmp_path: Path, store: Store, request_: dict[str, Any]) -> None:
    write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 12, 1))
    stream = SampleStream(store.path, hello())
    with pytest.raises(WireError):
        stream.answer(to_json(request_))
    stream.close()
