"""NaN in what is stored: a writer is told once for each field, and verify counts the rows."""

import logging
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from understudy.core import ArraySpec, Spec, Step, StepSpec
from understudy.replay import Reader, Store, Writer, verify

SPEC = StepSpec(
    observation=Spec(
        {
            "state": ArraySpec(shape=(3,), dtype="float32"),
            "depth": ArraySpec(shape=(32, 32), dtype="float32"),
            "count": ArraySpec(shape=(), dtype="int64"),
        }
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="float32")),
)


def write(writer: Writer, *, bad_at: int | None = None, bad: float = np.nan, bad_action: bool = False) -> None:
    writer.begin()
    for index in range(5):
        state, action = np.zeros(3, np.float32), np.zeros(2, np.float32)
        (action if bad_action else state)[1] = bad if index == bad_at else 0
        writer.append(Step(observation=seen(state), action=action, reward=0.0, terminated=index == 4))
    writer.end(seen(np.zeros(3, np.float32)))


def seen(state: np.ndarray) -> dict[str, object]:
    return {"state": state, "depth": np.full((32, 32), np.nan, np.float32), "count": 1}


@pytest.mark.parametrize("background", [True, False])
def test_each_field_is_named_once_for_each_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    with caplog.at_level(logging.WARNING), Store.open(tmp_path / "store") as store:
        writer = store.writer("arm-1", SPEC, commit_steps=2, background=background)
        write(writer)
        assert caplog.messages == []  # a depth camera has NaN in every frame
        write(writer, bad_at=3)
        write(writer, bad_at=0)
        write(writer, bad_at=2, bad=-np.inf, bad_action=True)
        write(store.writer("arm-2", SPEC), bad_at=4, bad=np.inf)
    assert [message.partition(". ")[0] for message in caplog.messages] == [
        "writer 'arm-1', episode 1, step 3: observation/state has nan",
        "writer 'arm-1', episode 3, step 2: action has -inf",
        "writer 'arm-2', episode 0, step 4: observation/state has inf",
    ]
    with Reader(tmp_path / "store") as reader:
        assert np.isnan(reader.rows(2)[1]["observation/state"][3, 1])


def test_episodes_in_one_commit_are_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Store.open(tmp_path / "store") as store:
        writer = store.writer("arm-1", SPEC, commit_steps=50, flush_each_episode=False)
        write(writer)
        write(writer, bad_at=1)
        writer.flush()
    assert [message.partition(":")[0] for message in caplog.messages] == ["writer 'arm-1', episode 1, step 1"]


def test_verify_counts_the_rows_and_finds_no_damage(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("arm-1", SPEC, commit_steps=2)
        write(writer)
        write(writer, bad_at=3)
        write(writer, bad_at=0)
    report = verify(tmp_path / "store")
    assert report.ok
    assert report.notes == [
        "observation/state: 2 rows have NaN or infinity, the first at episode 2, step 3; they are as they were "
        "written, and training on them makes a network NaN"
    ]


def test_rows_that_are_not_finite_do_not_change_how_damage_is_named(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write(store.writer("arm-1", SPEC), bad_at=3)
    with closing(sqlite3.connect(tmp_path / "store" / "catalog.sqlite")) as catalog:
        catalog.execute("update spans set row_check = row_check + 1")
        catalog.commit()
        (problem,) = verify(tmp_path / "store").problems
    assert re.fullmatch(r".*\.safetensors: episode 1: rows 0 to 5 are not those that the catalog lists", problem)
