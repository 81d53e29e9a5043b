"""Splicer: whatever chunks are dropped, a store takes the rest, and no row gets a neighbour that it did not have."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.writing import Collector

from understudy.core import EpisodeInfo, Step
from understudy.core.examples import small_spec
from understudy.replay import Reader, Store, Writer, verify
from understudy.replay.format.chunk import Chunk, Part
from understudy.service.client.splice_episodes import Splicer

SPEC = small_spec()


def part(episode: int, first_index: int, num_rows: int, state: Any = "open", **attributes: Any) -> Part:
    return Part(
        episode=episode, first_index=first_index, num_rows=num_rows, state=state, info=EpisodeInfo(**attributes)
    )


# ---- by hand


def test_nothing_dropped_nothing_changed() -> None:
    splicer = Splicer()
    for parts in ([part(0, 0, 5)], [part(0, 5, 3, "ended"), part(1, 0, 2)], [part(1, 2, 0, "cut", success=False)]):
        assert splicer.splice(parts) == tuple(parts)


def test_a_gap_in_the_middle_cuts_and_begins_anew() -> None:
    splicer = Splicer()
    splicer.splice([part(0, 0, 5, task="a")])
    assert splicer.splice([part(0, 8, 4, "ended", task="a", success=True)]) == (
        part(0, 5, 0, "cut", task="a"),
        part(1, 0, 4, "ended", task="a", success=True, labels={"steps_missing_before": "3"}),
    )
    assert splicer.splice([part(1, 0, 2, "ended")]) == (part(2, 0, 2, "ended"),)


def test_the_label_of_a_gap_stays_until_the_end() -> None:
    splicer = Splicer()
    splicer.splice([part(0, 4, 2)])
    (found,) = splicer.splice([part(0, 6, 2, "ended", labels={"colour": "red"})])
    assert found == part(0, 2, 2, "ended", labels={"steps_missing_before": "4", "colour": "red"})


def test_the_end_of_an_episode_of_which_nothing_came_is_nothing() -> None:
    splicer = Splicer()
    assert splicer.splice([part(0, 4, 0, "cut")]) == ()
    assert splicer.splice([part(1, 0, 2)]) == (part(0, 0, 2),)
    assert splicer.splice([part(2, 4, 0, "cut")]) == (part(0, 2, 0, "cut"),)
    assert splicer.splice([part(3, 0, 1)]) == (part(1, 0, 1),)


# ---- by chance


@st.composite
def histories(draw: Callable[..., Any]) -> tuple[list[tuple[int, str]], int, bool, list[bool]]:
    """Episodes as (steps, how they end), how they are cut into chunks, and which chunks are dropped."""
    episodes = draw(
        st.lists(
            st.tuples(st.integers(1, 12), st.sampled_from(["end", "cut", "cut later", "cut with last"])), max_size=6
        )
    )
    return (
        episodes,
        draw(st.integers(1, 5)),
        draw(st.booleans()),
        draw(st.lists(st.booleans(), min_size=100, max_size=100)),
    )


def chunks_of(episodes: list[tuple[int, str]], commit_steps: int, flush_each_episode: bool) -> list[Chunk]:
    """Chunks whose rows say in their observation which they are: episode, index."""
    collector = Collector()
    writer = Writer(collector, "w", "i", SPEC, commit_steps=commit_steps, flush_each_episode=flush_each_episode)
    for number, (num_steps, ending) in enumerate(episodes):
        writer.begin(seed=number)
        for index in range(num_steps):
            writer.append(
                Step(
                    observation=row(number, index),
                    action=np.zeros(2, np.float32),
                    reward=0.0,
                    terminated=ending == "end" and index == num_steps - 1,
                )
            )
        if ending == "end":
            writer.end(row(number, num_steps), success=True)
        elif ending == "cut with last":
            writer.cut(row(number, num_steps))
        else:
            if ending == "cut later":
                writer.flush()
            writer.cut()
    writer.flush()
    return collector.chunks


def row(episode: int, index: int) -> np.ndarray[Any, Any]:
    return np.array([episode, index, 0, 0], np.float32)


@settings(max_examples=100)
@given(histories())
def test_what_is_left_is_taken_and_no_row_has_a_wrong_neighbour(
    history: tuple[list[tuple[int, str]], int, bool, list[bool]],
) -> None:
    *how, dropped = history
    chunks = chunks_of(*how)
    kept = [chunk for chunk, gone in zip(chunks, dropped, strict=False) if not gone]
    sent = [tuple(ids) for chunk in kept for ids in chunk.columns["observation"][:, :2].astype(int).tolist()]
    splicer = Splicer()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "store"
        with Store.open(place, segment_bytes=2**16) as store:
            store.begin_writer("w", "i")
            seq = 0
            for chunk in kept:
                parts = splicer.splice(chunk.parts)
                assert sum(p.num_rows for p in parts) == chunk.num_rows
                if parts:
                    store.commit(replace(chunk, seq=seq, parts=parts))
                    seq += 1
        stored = []
        gone_before = {number: 0 for number, _ in enumerate(how[0])}  # the row of each episode that would come next
        with Reader(place) as reader:
            for record in reader.episodes():
                _, columns = reader.rows(record.id)
                ids = [tuple(pair) for pair in columns["observation"][:, :2].astype(int).tolist()]
                number, first = ids[0]
                assert ids == [(number, first + offset) for offset in range(len(ids))]
                assert record.info.seed == number
                missing = first - gone_before[number]
                assert record.info.labels == ({"steps_missing_before": str(missing)} if missing else {})
                assert record.state != "open" or record.id == reader.catalog.last_episode_id()
                complete = ids[-1] == (number, how[0][number][0]) and how[0][number][1] == "end"
                assert (record.state == "ended") == complete
                assert (record.info.success is True) == complete
                gone_before[number] = first + len(ids)
                stored += ids
        assert sorted(stored) == sorted(sent)
        assert len(set(stored)) == len(stored)
        assert verify(place).ok


@given(histories())
def test_without_drops_the_parts_are_what_they_were(
    history: tuple[list[tuple[int, str]], int, bool, list[bool]],
) -> None:
    *how, _ = history
    splicer = Splicer()
    for chunk in chunks_of(*how):
        assert splicer.splice(chunk.parts) == chunk.parts
