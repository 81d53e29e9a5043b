"""What goes through the shared memory and the messages comes out bit for bit."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

import numpy as np
import pytest

from understudy.core import StepSpec
from understudy.core import tree as trees
from understudy.core.examples import nested_spec, random_tree, robot_spec, small_spec, text_spec
from understudy.envs.workers.channel import (
    Channel,
    ChannelClosed,
    ChannelGarbage,
    ChannelStuck,
    decode_leaf,
    encode_leaf,
)
from understudy.envs.workers.shared_memory import Layout, SharedArrays, create_memory, size_memory

SPECS: list[Callable[[], StepSpec]] = [nested_spec, text_spec, small_spec, lambda: robot_spec(16)]


@pytest.mark.parametrize("make", SPECS)
def test_observations_and_actions_come_out_as_they_went_in(make: Callable[[], StepSpec]) -> None:
    spec = make()
    layout = Layout(spec, 3)
    memory = create_memory()
    size_memory(memory, layout.size_bytes)
    ours, theirs = SharedArrays(layout, memory), SharedArrays(layout, memory)
    os.close(memory)
    rng = np.random.default_rng(0)
    for _ in range(20):
        observation = random_tree(spec.observation, rng)
        ragged = theirs.write_observation(spec.observation.check(observation, "observation"))
        leaves = dict(spec.observation.leaves("observation"))
        assert trees.equal(ours.read_observation(travel(ragged, leaves)), observation)
        actions = [random_tree(spec.action, rng) for _ in range(3)]
        rows = [ours.write_action(row, spec.action.check(action, "action")) for row, action in enumerate(actions)]
        leaves = dict(spec.action.leaves("action"))
        for row, action in enumerate(actions):
            assert trees.equal(theirs.read_action(row, travel(rows[row], leaves)), action)
    theirs.request = 2**40
    assert ours.request == 2**40


def travel(ragged: dict, leaves: dict) -> dict:
    """Ragged leaves, through a message."""
    coded = json.loads(json.dumps({path: encode_leaf(leaf) for path, leaf in ragged.items()}))
    return {path: decode_leaf(leaves[path], leaf, path) for path, leaf in coded.items()}


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux seals memory")
def test_nobody_can_cut_the_memory_off() -> None:
    memory = create_memory()
    size_memory(memory, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 0)
    os.close(memory)


def test_a_channel_carries_messages_and_names_what_is_none() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    assert channel.take() is None
    theirs.sendall(b'{"a": 1}\n{"b": 2}\n{"c"')
    assert channel.take() == {"a": 1}
    assert channel.take() == {"b": 2}
    assert channel.take() is None
    theirs.sendall(b": 3}\n[1]\nnonsense\n")
    assert channel.take() == {"c": 3}
    with pytest.raises(ChannelGarbage, match="1"):
        channel.take()
    with pytest.raises(ChannelGarbage, match="nonsense"):
        channel.take()
    with pytest.raises(ChannelStuck):
        channel.send({"long": "x" * 10_000_000}, timeout_s=0.05)
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.take()
    with pytest.raises(ChannelClosed):
        channel.send({})
    ours.close()
