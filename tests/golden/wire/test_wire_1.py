"""A client and a server of protocol version 1, as recorded, work with the server and the client of today.

Additions pass: a field that a recorded message does not have, an array, an entry of the trailer. What a recorded
message has must be there, with the same value.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.golden.wire.make_wire_1 import TRANSCRIPT, WEIGHTS, new_server, use
from tests.golden.wire.replay import SERVER, Call, check_has, load, replay_client, replayed_server

from understudy.core import RefusedError
from understudy.core import tree as trees
from understudy.core.examples import CANONICAL
from understudy.replay import EVERYTHING, Reader, verify
from understudy.service import connect
from understudy.service.wire.protocol import VERSION


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return load(TRANSCRIPT)


def test_the_recorded_client_works_with_the_server_of_today(calls: list[Call], tmp_path: Path) -> None:
    with new_server(tmp_path) as server:
        for call in calls:
            replay_client(call, server.address)
    _, episode = CANONICAL["nested"]()
    with Reader(tmp_path / "store") as reader:
        assert reader.read(1).equals(episode)
    assert verify(tmp_path / "store").ok


def test_the_client_of_today_works_with_the_recorded_server(calls: list[Call], tmp_path: Path) -> None:
    with replayed_server(calls) as (address, problems):
        delivered, status, first, second, third, *versions, parameters = use(address, tmp_path / "spool")
    assert problems == []
    _, episode = CANONICAL["nested"]()
    assert delivered == len(episode) + 1
    assert next(iter(status.values()))["steps"] == {"everything": len(episode)}
    assert [len(batch.reward) for batch in (first, second, third)] == [4, 4, 4]
    rewards = set(episode.reward.tolist())
    assert all(reward in rewards for batch in (first, second, third) for reward in batch.reward.tolist())
    assert versions == [1, 2]
    assert parameters.version == 2
    assert trees.flatten(parameters.tree, "").keys() == trees.flatten(WEIGHTS, "").keys()


# ---- versions that are not the same


def with_replies(calls: list[Call], **more: object) -> list[Call]:
    """The recorded calls, with more fields in each small answer of the server."""
    changed = []
    for call in calls:
        messages = [
            (side, json.dumps({**json.loads(content), **more}).encode())
            if side == SERVER and content.startswith(b"{") and call.method in ("Write", "Sample")
            else (side, content)
            for side, content in call.messages
        ]
        changed.append(replace(call, messages=messages))
    return changed


def test_the_client_of_today_works_with_a_server_of_tomorrow(calls: list[Call], tmp_path: Path) -> None:
    newer = with_replies(calls, version=VERSION + 1, tomorrow=[1])
    with replayed_server(newer) as (address, problems):
        assert use(address, tmp_path / "spool")[0] > 0
    assert problems == []


def test_a_server_that_is_too_new_is_refused(calls: list[Call], tmp_path: Path) -> None:
    newer = with_replies(calls, version=VERSION + 2)
    text = "the server speaks version 3 of the protocol, .*: update the client with `pip install"
    with replayed_server(newer) as (address, _), connect("shard-0=127.0.0.1:1") as remote:
        spec, episode = CANONICAL["nested"]()
        writer = remote.writer("arm", spec, spool=tmp_path / "spool")
        writer.begin(episode.info)
        writer.append(next(iter(episode.steps())))
        writer.flush()  # before it finds the server: once it is refused, flush raises too
        remote.update_address("shard-0", address)
        with pytest.raises(RefusedError, match=text):
            writer.wait_delivered(30.0)
        with pytest.raises(RefusedError, match=text):
            writer.close(0.0)  # what was recorded stays in the spool, for a client that is new enough
        assert list((tmp_path / "spool").rglob("*.safetensors"))
        with remote.sampler(EVERYTHING, batch_size=4) as sampler, pytest.raises(RefusedError, match=text):
            sampler.sample()


def test_a_client_that_is_too_new_is_refused(calls: list[Call], tmp_path: Path) -> None:
    call = next(call for call in calls if call.method == "Write")
    hello = {**json.loads(call.messages[0][1]), "version": VERSION + 2}
    with new_server(tmp_path) as server, connect(server.address) as remote:
        stream = next(iter(remote._connections.values())).exchange("Write", iter([json.dumps(hello).encode()]))
        with pytest.raises(RefusedError, match=r"the client speaks version 3 of .*: update the server with `pip"):
            next(stream)


# ---- the comparison itself


def test_the_transcript_has_every_call(calls: list[Call]) -> None:
    assert {call.method for call in calls} == {"Write", "Status", "Sample", "Publish", "Subscribe"}
    assert [call.code for call in calls if call.by_hand] == ["OK", "OK", "FAILED_PRECONDITION"]


RECORDED = {"seq": 3, "stores": ["a"], "state": {"commit": 7}, "parts": json.dumps([[0, 1]])}


@pytest.mark.parametrize(
    "found",
    [
        RECORDED,
        {**RECORDED, "new": 1},
        {**RECORDED, "state": {"commit": 7, "new": 1}},
        {**RECORDED, "stores": ["a", "b"]},
        {**RECORDED, "parts": json.dumps([[0, 1, 2]])},
    ],
)
def test_additions_pass(found: dict[str, object]) -> None:
    check_has(found, RECORDED, "message")


@pytest.mark.parametrize(
    "found",
    [
        {name: value for name, value in RECORDED.items() if name != "seq"},
        {**RECORDED, "seq": 4},
        {**RECORDED, "state": {}},
        {**RECORDED, "stores": []},
        {**RECORDED, "parts": json.dumps([[0]])},
        [],
    ],
)
def test_removals_and_changes_fail(found: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        check_has(found, RECORDED, "message")
