"""Commit: which chunks are refused, and that a store changes only when the commit is published."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from understudy.core import CopiedError, EpisodeInfo, FencedError, SequenceError, SpecError
from understudy.core.episode import stack
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Store
from understudy.replay.format.chunk import Chunk, EpisodeState, Part
from understudy.replay.format.records import KEPT_CHECKS
from understudy.replay.write.commit import Commit

SPEC = small_spec()


@pytest.fixture
def store(tmp_path: Path):
    with Store.open(tmp_path / "store") as opened:
        opened.begin_writer("w", "one")
        yield opened


def begin(store: Store) -> Commit:
    return Commit(store.state, store.catalog, store._open_segment, store.segment_bytes, store.clock())


def chunk(
    num_steps: int = 3, *, seq: int = 0, first_index: int = 0, state: EpisodeState = "open", writer="w", **changes
) -> Chunk:
    """The first steps of an episode; with the state `ended`, all of them and the last observation."""
    steps, last = random_steps(SPEC, num_steps, seed=0, terminated=True)
    rows = [SPEC.row(step) for step in steps]
    if state == "open":
        rows[-1]["terminated"] = np.False_
    if state == "ended":
        rows.append(SPEC.last_row(last))
    columns = {path: stack([row[path] for row in rows], leaf) for path, leaf in SPEC.columns.items()} | changes
    part = Part(episode=0, first_index=first_index, num_rows=len(rows), state=state, info=EpisodeInfo())
    return Chunk(writer=writer, incarnation="one", seq=seq, spec=SPEC, columns=columns, parts=(part,))


def test_nothing_changes_before_it_is_published(store: Store) -> None:
    number = store.last_commit
    commit = begin(store)
    assert commit.add(chunk())
    assert commit.changes
    commit.record()  # durable now
    assert (store.last_commit, store.state.episodes) == (number, {})
    assert commit.publish() == []  # no segment was sealed
    assert store.last_commit == number + 1
    assert [episode.num_steps for episode in store.state.episodes.values()] == [3]


def test_a_chunk_again_is_nothing_new(store: Store) -> None:
    commit = begin(store)
    assert [commit.add(chunk()), commit.add(chunk())] == [True, False]
    assert commit.num_rows == 3


def test_another_chunk_of_a_number_that_is_stored_is_refused(store: Store) -> None:
    def numbered(seq: int, check: int) -> Chunk:
        return replace(chunk(seq=seq, first_index=3 * seq), check=check)

    for seq in range(KEPT_CHECKS + 2):
        store.commit(numbered(seq, 100 + seq))
    num_commits = store.last_commit
    store.commit(numbered(KEPT_CHECKS + 1, 100 + KEPT_CHECKS + 1))  # as after a lost acknowledgement
    store.commit(numbered(KEPT_CHECKS, 100 + KEPT_CHECKS))
    for odd in (numbered(KEPT_CHECKS + 1, 5), numbered(KEPT_CHECKS, 5), numbered(0, 100)):  # the last is too old to say
        with pytest.raises(CopiedError, match="a copy of this writer is alive: the store has another chunk"):
            store.commit(odd)
    assert store.last_commit == num_commits
    path = store.path
    store.close()
    with Store.open(path) as again, pytest.raises(CopiedError, match="the store has another chunk 9 of the same"):
        again.commit(numbered(KEPT_CHECKS + 1, 5))


def test_an_episode_that_ends_is_open_no_more(store: Store) -> None:
    commit = begin(store)
    commit.add(chunk(state="ended"))
    commit.record()
    commit.publish()
    assert store.state.episodes == {}
    again = begin(store)
    with pytest.raises(SequenceError, match="episode 0 has ended; give the next one a new number"):
        again.add(chunk(seq=1))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (chunk(writer="stranger"), SequenceError, "'stranger' has not begun, so its chunk 0 is refused"),
        (chunk(seq=2), SequenceError, "expected chunk 0, got 2; send the chunks between them"),
        (chunk(first_index=4), SequenceError, "expected rows from index 0 of an open episode, got rows from 4"),
        (chunk(reward=np.zeros(3, np.float64)), SpecError, "reward: expected 3 rows of .* got something else"),
        (chunk(colour=np.zeros(3)), SpecError, "colour: is in the chunk only; send the columns of the spec"),
        (chunk(is_step=np.array([True, False, True])), SpecError, "only the last row of an episode may hold no step"),
        (chunk(is_step=np.array([True, True, False])), SpecError, "a last observation ends the episode"),
        (chunk(terminated=np.array([True, False, False])), SpecError, "only the last step of an episode may be termin"),
        (chunk(state="ended", is_step=np.ones(4, bool)), SpecError, "an episode ends with the row of its last observ"),
        (chunk(reward=np.full(3, 3e38, np.float32)), None, ""),
    ],
)
def test_a_wrong_chunk_is_refused_whole(store: Store, wrong: Chunk, error: type[Exception] | None, text: str) -> None:
    commit = begin(store)
    if error is None:
        assert commit.add(wrong)
        return
    with pytest.raises(error, match=text):
        commit.add(wrong)
    assert not commit.changes
    assert commit.num_rows == 0


def test_an_older_process_is_fenced_off(store: Store) -> None:
    store.begin_writer("w", "two")
    with pytest.raises(FencedError, match="was replaced by a newer process of the same name"):
        begin(store).add(chunk())


def test_practice_with_human_steps_is_a_correction(store: Store) -> None:
    commit = begin(store)
    commit.add(chunk(9))  # steps 6 to 8 are a takeover
    commit.record()
    commit.publish()
    (episode,) = store.state.episodes.values()
    assert (episode.info.kind, episode.num_human, episode.num_policy) == ("correction", 3, 6)
