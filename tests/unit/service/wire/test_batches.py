"""Batches: requests and batches come back from their messages, and a condition reads attributes and nothing else."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import StoreError, WireError
from understudy.core import tree as trees
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EVERYTHING, Reader, Store
from understudy.replay.read.batch_shapes import Sequences, Transitions
from understudy.replay.sample.sampler import Sampler
from understudy.replay.sample.selectors import Uniform
from understudy.service.wire.batches import (
    encode_batch,
    fill_batch,
    num_bytes_of,
    selector_from_json,
    selector_to_json,
    shape_from_json,
    shape_to_json,
    view_from_json,
    view_to_json,
)
from understudy.service.wire.message import Assembly, pieces


@pytest.mark.parametrize("shape", [Transitions(), Sequences(length=4)])
def test_a_request_comes_back_from_json(shape: Any) -> None:
    assert shape_from_json(shape_to_json(shape)) == shape
    assert view_from_json(view_to_json(EVERYTHING)) == EVERYTHING
    assert selector_from_json(selector_to_json(Uniform(last_steps=7))).options == {"last_steps": 7}  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["1; drop table episodes", "(select 1)", "load_extension('x')", "randomblob(9) > ''"])
def test_a_condition_that_does_more_than_read_attributes_is_refused(where: str) -> None:
    with pytest.raises(StoreError, match=r"view 'v': .*; a condition may use"):
        view_from_json({"name": "v", "clauses": [{"where": where, "sources": [0]}]})


@pytest.mark.parametrize("parse", [view_from_json, shape_from_json, selector_from_json])
def test_what_is_no_request_is_a_wire_error(parse: Any) -> None:
    for value in (None, 3, "x", {}, [], {"kind": "x"}):
        with pytest.raises(WireError):
            parse(value)


def test_a_batch_arrives_in_a_part_of_another(tmp_path: Any) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store:
        write_episode(store.writer("w", spec), random_episode(spec, 20, 1))
    with Reader(tmp_path / "store") as reader, closing(Sampler(reader, EVERYTHING, batch_size=4, seed=3)) as sampler:
        sampler.follow()
        sent = sampler.sample()
        first, *rest = pieces(encode_batch(sent, {}))
        assembly = Assembly(first, max_bytes=2**20)
        for piece in rest:
            assembly.add(piece)
        batch = sampler.shape.make(spec, 10)
        fill_batch(batch, slice(3, 7), assembly, spec)
    assert trees.equal(trees.map_leaves(lambda leaf: leaf[3:7], batch.observation), sent.observation)
    assert np.array_equal(batch.reward[3:7], sent.reward)
    assert num_bytes_of(sent) > 0
