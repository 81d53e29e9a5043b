"""Chunks: as messages and back, bit by bit; what the spec does not allow is refused with the field's path."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.writing import Collector

from understudy.core import (
    EpisodeError,
    EpisodeInfo,
    SequenceError,
    SpecError,
    Step,
    StepSpec,
    UnderstudyError,
    WireError,
)
from understudy.core.examples import CANONICAL, nested_spec, random_steps, robot_spec, small_spec, text_spec
from understudy.core.tree import equal_leaf
from understudy.replay import Store, Writer, verify
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.format.encoded_columns import encoded_chunk
from understudy.service.wire.chunks import decode_chunk, encode_chunk
from understudy.service.wire.message import pack, unpack


def chunks_of(spec: StepSpec, steps: list[Step], last: Any, info: EpisodeInfo, commit_steps: int) -> list[Chunk]:
    collector = Collector()
    writer = Writer(collector, "w", "i", spec, commit_steps=commit_steps)
    writer.begin(info)
    for step in steps:
        writer.append(step)
    writer.end(last)
    return collector.chunks


def message_of(chunk: Chunk) -> bytes:
    return b"".join(encode_chunk(chunk.seq, chunk.columns, chunk.parts))


def decode(message: bytes, spec: StepSpec) -> Chunk:
    return decode_chunk(message, writer="w", incarnation="i", spec=spec)


@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.parametrize("commit_steps", [4, 5000])
def test_canonical_episodes_come_back(name: str, commit_steps: int) -> None:
    spec, episode = CANONICAL[name]()
    for given in chunks_of(spec, list(episode.steps()), episode.last_observation, episode.info, commit_steps):
        chunk = encoded_chunk(given)
        found = decode(message_of(chunk), spec)
        assert (found.writer, found.incarnation, found.seq, found.spec) == ("w", "i", chunk.seq, spec)
        assert found.parts == chunk.parts
        assert found.columns.keys() == chunk.columns.keys()
        for path, column in chunk.columns.items():
            assert equal_leaf(found.columns[path], column), path


def test_a_part_without_rows_and_text_of_all_kinds_come_back() -> None:
    spec = text_spec()
    info = EpisodeInfo(task='å猫🤖\0"\\', success=False, split="eval", labels={"": "\n"}, kind="demonstration")
    columns = {
        path: [] if leaf.ragged else np.zeros((0, *leaf.shape), leaf.dtype) for path, leaf in spec.columns.items()
    }
    parts = (Part(episode=3, first_index=5, num_rows=0, state="cut", info=info),)
    found = decode(b"".join(encode_chunk(9, columns, parts)), spec)
    assert (found.seq, found.parts, found.num_rows) == (9, parts, 0)


# ---- what is refused


def altered(
    spec: StepSpec,
    columns: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
    drop: tuple[str, ...] = (),
) -> bytes:
    """The message of a good chunk of 4 rows, with some arrays or metadata exchanged."""
    steps, last = random_steps(spec, 3, 1)
    (chunk,) = chunks_of(spec, steps, last, EpisodeInfo(), 50)
    said, arrays = unpack(message_of(chunk))
    arrays = {name: array.copy() for name, array in arrays.items() if name not in drop}
    for path, change in (columns or {}).items():
        arrays[path] = change(arrays.get(path)) if callable(change) else change
    return b"".join(pack({**said, **(metadata or {})}, arrays))


def with_value(value: Any, at: Any = 1) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[at] = value
        return array

    return change


def parts(*entries: Any) -> dict[str, str]:
    return {"parts": json.dumps(entries)}


SMALL, ROBOT, NESTED, TEXT = small_spec(), robot_spec(4), nested_spec(), text_spec()
GOOD: list[Any] = [0, 0, 4, "ended", {}]
WRONG: dict[str, tuple[StepSpec, bytes, type[UnderstudyError], str]] = {
    "above a bound": (
        ROBOT,
        altered(ROBOT, {"action": with_value(1.5)}),
        SpecError,
        r"^action: expected values from -1.0 to 1.0; clip them before append",
    ),
    "below a bound": (
        NESTED,
        altered(NESTED, {"action/gripper": with_value(-1)}),
        SpecError,
        r"^action/gripper: expected values from 0.0 to 2.0",
    ),
    "not a number where bounded": (ROBOT, altered(ROBOT, {"action": with_value(np.nan)}), SpecError, r"^action: "),
    "proposal above a bound": (ROBOT, altered(ROBOT, {"proposal": with_value(9)}), SpecError, r"^proposal: "),
    "source 4": (
        SMALL,
        altered(SMALL, {"source": with_value(4)}),
        SpecError,
        r"^source: expected numbers below 4, got 4; pass a Source",
    ),
    "source 255": (SMALL, altered(SMALL, {"source": with_value(255)}), SpecError, r"^source: .* got 255"),
    "reward nan": (
        SMALL,
        altered(SMALL, {"reward": with_value(np.nan)}),
        SpecError,
        r"^reward: expected finite numbers; check the environment",
    ),
    "reward inf": (SMALL, altered(SMALL, {"reward": with_value(-np.inf, 3)}), SpecError, r"^reward: expected finite"),
    "missing field": (
        SMALL,
        altered(SMALL, drop=("observation",)),
        SpecError,
        r"^observation: expected float32 \[4\], got nothing; send all fields of the spec",
    ),
    "missing flag": (SMALL, altered(SMALL, drop=("is_step",)), SpecError, r"^is_step: expected bool \[\], got nothing"),
    "surplus field": (
        SMALL,
        altered(SMALL, {"observation/x": np.zeros(4)}),
        SpecError,
        r"^observation/x: expected no such field; send what the spec says",
    ),
    "missing lengths": (
        TEXT,
        altered(TEXT, drop=("length/observation/prompt",)),
        SpecError,
        r"^observation/prompt: expected text, got something else; send all fields",
    ),
    "lengths of another dtype": (
        TEXT,
        altered(TEXT, {"length/action": lambda a: a.astype(np.int64)}),
        SpecError,
        r"^action: expected int32 \[\?, 4\], got something else",
    ),
    "lengths in two dimensions": (TEXT, altered(TEXT, {"length/action": lambda a: a[None]}), SpecError, r"^action: "),
    "lengths that are too long": (
        TEXT,
        altered(TEXT, {"length/action": with_value(2**32 - 1)}),
        WireError,
        r"^action: expected \d+ bytes of values, got \d+; send them end to end",
    ),
    "bytes in two dimensions": (TEXT, altered(TEXT, {"ragged/action": lambda a: a[None]}), WireError, r"^action: "),
    "not UTF-8": (
        TEXT,
        altered(
            TEXT,
            {
                "ragged/observation/prompt": np.full(3, 0xFF, np.uint8),
                "length/observation/prompt": np.array([3, 0, 0, 0], np.uint32),
            },
        ),
        WireError,
        r"^observation/prompt: expected text, got bytes that are not; check the sender",
    ),
    "half an element": (
        TEXT,
        altered(TEXT, {"ragged/action": np.zeros(18, np.uint8), "length/action": np.array([18, 0, 0, 0], np.uint32)}),
        WireError,
        r"^action: expected int32 \[\?, 4\], got bytes that are not",
    ),
    "seq that is no number": (SMALL, altered(SMALL, metadata={"seq": "x"}), WireError, r"^not the parts of a chunk: "),
    "parts that are no JSON": (SMALL, altered(SMALL, metadata={"parts": "["}), WireError, r"^not the parts of a chunk"),
    "parts that are a number": (SMALL, altered(SMALL, metadata={"parts": "3"}), WireError, r"^not the parts"),
    "parts that are null": (SMALL, altered(SMALL, metadata={"parts": "null"}), WireError, r"^not the parts"),
    "deep parts": (SMALL, altered(SMALL, metadata={"parts": "[" * 100_000}), WireError, r"^not the parts"),
    "a part of four": (SMALL, altered(SMALL, metadata=parts(GOOD[:4])), WireError, r"^not the parts"),
    "a part that is a dict": (SMALL, altered(SMALL, metadata=parts({"a": 1})), WireError, r"^not the parts"),
    "negative episode": (
        SMALL,
        altered(SMALL, metadata=parts([-1, *GOOD[1:]])),
        WireError,
        r"^not the numbers of a part: \(-1, 0, 4\)",
    ),
    "huge episode": (SMALL, altered(SMALL, metadata=parts([2**31, *GOOD[1:]])), WireError, r"^not the numbers"),
    "negative rows": (
        SMALL,
        altered(SMALL, metadata=parts([0, 0, 8, "open", {}], [0, 8, -4, "ended", {}])),
        WireError,
        r"^not the numbers of a part: \(0, 8, -4\)",
    ),
    "float index": (SMALL, altered(SMALL, metadata=parts([0, 0.0, *GOOD[2:]])), WireError, r"^not the numbers"),
    "bool episode": (SMALL, altered(SMALL, metadata=parts([True, *GOOD[1:]])), WireError, r"^not the numbers"),
    "unknown state": (
        SMALL,
        altered(SMALL, metadata=parts([0, 0, 4, "done", {}])),
        WireError,
        r"^not the state of an episode: done",
    ),
    "state that is a list": (SMALL, altered(SMALL, metadata=parts([0, 0, 4, [], {}])), WireError, r"^not the state"),
    "too few rows": (
        SMALL,
        altered(SMALL, metadata=parts([0, 0, 3, "ended", {}])),
        WireError,
        r"^expected 3 rows as in its parts, got 4; send all",
    ),
    "no parts": (
        SMALL,
        altered(SMALL, metadata=parts()),
        WireError,
        r"^expected 0 rows as in its parts, got 4; send all",
    ),
    "unknown attribute": (SMALL, altered(SMALL, metadata=parts([*GOOD[:4], {"tusk": 1}])), WireError, r"^not the"),
    "attribute of another type": (
        SMALL,
        altered(SMALL, metadata=parts([*GOOD[:4], {"task": 1}])),
        EpisodeError,
        r"^task: expected str or None, got int 1",
    ),
    "labels that are numbers": (
        SMALL,
        altered(SMALL, metadata=parts([*GOOD[:4], {"labels": {"a": 1}}])),
        EpisodeError,
        r"^labels: expected names and values that are text",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_the_spec_does_not_allow_is_refused(kind: str) -> None:
    spec, message, error, text = WRONG[kind]
    with pytest.raises(error, match=text) as caught:
        decode(message, spec)
    assert len(str(caught.value)) < 1000


# Shapes and dtypes that numpy itself trips over: any of our errors will do, and nothing but those.
BOUNDS = replace(SMALL, action=replace(SMALL.action, tree=replace(SMALL.action.tree, low=(-1, -1), high=(1, 1))))
ODD: dict[str, tuple[StepSpec, bytes]] = {
    "source without rows or dimensions": (SMALL, altered(SMALL, {"source": np.array(0, np.uint8)})),
    "source of no size": (SMALL, altered(SMALL, {"source": np.zeros((4, 0), np.uint8)})),
    "is_step without dimensions": (SMALL, altered(SMALL, {"is_step": np.array(True)})),
    "bounded field without dimensions": (ROBOT, altered(ROBOT, {"action": np.float32(0.5)})),
    "bounded field of another width": (BOUNDS, altered(BOUNDS, {"action": np.zeros((4, 3), np.float32)})),
    "bounded field of another rank": (BOUNDS, altered(BOUNDS, {"action": np.zeros((4, 2, 3), np.float32)})),
    "bounded field of flags": (ROBOT, altered(ROBOT, {"action": np.zeros((4, 7), bool)})),
    "reward of another dtype": (SMALL, altered(SMALL, {"reward": np.zeros(4, np.uint64)})),
    "reward of flags": (SMALL, altered(SMALL, {"reward": np.zeros(4, bool)})),
    "more rewards than rows": (SMALL, altered(SMALL, {"reward": np.zeros(5, np.float32)})),
    "half a character in the task": (SMALL, altered(SMALL, metadata=parts([*GOOD[:4], {"task": "\ud800"}]))),
    "half a character in a label": (SMALL, altered(SMALL, metadata=parts([*GOOD[:4], {"labels": {"\udfff": ""}}]))),
    "a seed that SQLite cannot hold": (SMALL, altered(SMALL, metadata=parts([*GOOD[:4], {"seed": 2**63}]))),
    "a start state that SQLite cannot hold": (
        SMALL,
        altered(SMALL, metadata=parts([*GOOD[:4], {"init_state": -(2**70)}])),
    ),
    "the end of an episode that never was": (SMALL, altered(SMALL, metadata=parts(GOOD, [1, 0, 0, "cut", {}]))),
    "an episode that goes on after it ended": (SMALL, altered(SMALL, {"terminated": np.array([1, 1, 1, 0], bool)})),
    "ended, and the last row is a step": (SMALL, altered(SMALL, {"is_step": np.ones(4, bool)})),
    "a last observation in the middle": (SMALL, altered(SMALL, {"is_step": np.array([1, 0, 1, 0], bool)})),
    "open, and the last row is no step": (SMALL, altered(SMALL, metadata=parts([0, 0, 4, "open", {}]))),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_trips_numpy_or_the_store_is_refused_by_us(kind: str, tmp_path: Path) -> None:
    """Checked where it counts: in a real store, which must go on to take a good chunk afterwards."""
    spec, message = ODD[kind]
    with Store.open(tmp_path / "store") as store:
        store.begin_writer("w", "i")
        with pytest.raises(UnderstudyError):
            store.commit(decode(message, spec))
        store.commit(decode(altered(spec), spec))


def test_rewards_whose_sum_is_no_number_do_not_stop_the_store(tmp_path: Path) -> None:
    """Each is finite, and their sum over the episode is not: infinite first, and then infinity less infinity."""
    spec = replace(SMALL, reward=replace(SMALL.reward, dtype="float64"))
    big = np.full(4, 1.7e308)
    with Store.open(tmp_path / "store") as store:
        store.begin_writer("w", "i")
        for seq, sign in enumerate((1, -1)):
            said = {"seq": str(seq), **parts([0, 4 * seq, 4, "open", {}])}
            message = altered(
                spec, {"reward": sign * big, "is_step": np.ones(4, bool), "terminated": np.zeros(4, bool)}, said
            )
            with suppress(SpecError, SequenceError):  # it may be refused, and then what follows is
                store.commit(decode(message, spec))
        last = store.state.writers["w"].last_seq
        store.commit(decode(altered(spec, metadata={"seq": str(last + 1), **parts([1, *GOOD[1:]])}), spec))
    assert verify(tmp_path / "store").ok
