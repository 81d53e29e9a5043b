"""StepIndex: where rows are, commit by commit, in an order that does not depend on who looks when."""

import numpy as np
import pytest

from understudy.core import Source
from understudy.replay import Reader, Store, compact
from understudy.replay.format.segment import Segment
from understudy.replay.read.step_index import NO_STEP, Column, StepIndex

LENGTHS = (3, 10, 1, 25, 7, 14)  # steps of the episodes 1 to 6, see conftest.py


def every_row(index: StepIndex) -> tuple[np.ndarray, np.ndarray]:
    lengths = index.span_num_rows.values
    span = np.repeat(np.arange(len(lengths)), lengths)
    return span, np.concatenate([np.arange(length) for length in lengths])


def test_every_row_is_in_it_once(reader: Reader) -> None:
    index = StepIndex(reader)
    assert index.follow().tolist() == [1, 2, 3, 4, 5, 6]
    span, offset = every_row(index)
    episode, number = index.identity(span, offset)
    found = set(zip(episode.tolist(), number.tolist(), strict=True))
    assert found == {(e, i) for e, length in enumerate(LENGTHS, 1) for i in range(length + 1)}
    assert index.row_number(span, offset).tolist() == list(range(len(span)))
    assert [part.tolist() for part in index.row_position(np.arange(len(span)))] == [span.tolist(), offset.tolist()]


def test_rows_are_where_it_says(reader: Reader) -> None:
    index = StepIndex(reader)
    index.follow()
    span, offset = every_row(index)
    for (segment, row), identity in zip(
        zip(*index.locate(span, offset), strict=True), zip(*index.identity(span, offset), strict=True), strict=True
    ):
        opened = reader.segment(int(segment))
        stored = (opened.read_column(name, int(row), 1)[0] for name in ("row/episode", "row/index"))
        assert tuple(stored) == identity


def test_rows_that_compaction_moves_while_it_follows_are_found(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, compactions = reader.segment, [0.0]

    def compact_first(segment_id: int) -> Segment:
        if compactions:
            with Store.open(reader.path) as store:
                store.delete([3])
                compact(store, min_dead=compactions.pop())
        return segment(segment_id)

    monkeypatch.setattr(reader, "segment", compact_first)
    index, commit = StepIndex(reader), reader.last_commit()
    assert index.follow(commit).tolist() == [1, 2, 4, 5, 6]
    span, offset = every_row(index)
    for number, row in zip(*index.locate(span, offset), strict=True):
        assert segment(int(number)).read_column("row/episode", int(row), 1)[0] in (1, 2, 4, 5, 6)


def test_the_order_is_the_same_however_it_is_followed(reader: Reader) -> None:
    at_once, one_by_one = StepIndex(reader), StepIndex(reader)
    at_once.follow()
    for commit in range(reader.last_commit() + 1):
        one_by_one.follow(commit)
    assert one_by_one.commit == at_once.commit
    for name, column in vars(at_once).items():
        if isinstance(column, Column):
            assert column.values.tolist() == getattr(one_by_one, name).values.tolist(), name


def test_stepping_along_an_episode_crosses_spans(reader: Reader) -> None:
    index = StepIndex(reader)
    index.follow()
    first = np.array([index.find_span(4, 0)])
    assert index.span_next.values[first] != -1  # 26 rows in several commits
    span, offset = index.step_by(first, np.zeros(1, np.int64), 20)
    assert [int(part[0]) for part in index.identity(span, offset)] == [4, 20]
    assert index.row_number_of(4, 20) == index.row_number(span, offset)[0]
    back = index.step_by(span, offset, -20)
    assert [part.tolist() for part in back] == [first.tolist(), [0]]


def test_a_run_has_one_source_and_an_episodes_first_row_has_none(reader: Reader) -> None:
    index = StepIndex(reader)
    index.follow()
    assert set(index.run_source.values.tolist()) == {int(Source.POLICY), NO_STEP}
    assert (index.run_source.values == NO_STEP).sum() == len(LENGTHS)
    assert index.run_length.values.sum() == sum(LENGTHS) + len(LENGTHS)


def test_a_column_grows() -> None:
    column = Column(np.int32)
    column.append(np.arange(100))
    column.resize(102, fill=-1)
    column.resize(50)  # never shorter
    assert column.values.tolist() == [*range(100), -1, -1]
    assert len(column) == 102
