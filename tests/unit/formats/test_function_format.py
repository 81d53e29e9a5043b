"""A data set that a function of the user reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core import Source
from understudy.formats import DatasetReader, FormatError, parse_dataset_path
from understudy.formats.function_format import FunctionReader
from understudy.replay import Reader
from understudy.training.data.dataset_io import import_episodes, open_import_target

FUNCTION = """
import numpy as np

def episodes(path, num="2"):
    for number in range(int(num)):
        yield {
            "name": f"part-{number}",
            "observation": {"state": np.full((4 + number, 2), number, "float32"), "flag": np.ones(4 + number, bool)},
            "action": np.zeros((3 + number, 1)),
            "reward": np.arange(3 + number),
            "success": number == 1,
            "task": "tidy",
            "labels": {"folder": path.name},
        }
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_reader.py").write_text(FUNCTION)
    (tmp_path / "data").mkdir()
    yield tmp_path
    sys.modules.pop("own_reader", None)


def test_each_episode_is_imported_once(here: Path) -> None:
    counts = []
    for name in ("own_reader:episodes:data", "own_reader:episodes:data", "own_reader:episodes:data?num=3"):
        dataset = parse_dataset_path(name)
        with (
            closing(dataset.format.read(dataset.path, dataset.options)) as reader,
            open_import_target("store") as target,
        ):
            report = import_episodes(reader, target, dataset)
        counts.append((report.num_imported, report.num_known))
    assert counts == [(2, 0), (0, 2), (1, 2)]
    with Reader("store") as reader:
        first, second = (reader.read(number) for number in (1, 2))
        assert reader.record(1).info.labels["origin"].startswith("own_reader.episodes:data@")
    assert (len(first), len(second)) == (3, 4)
    assert first.action.dtype == np.float64
    assert second.observation["state"].tolist() == [[1, 1]] * 5
    assert second.reward.tolist() == [0, 1, 2, 3]
    assert (first.terminated.any(), first.truncated[-1]) == (False, True)  # nothing says that its task ended
    assert (second.terminated[-1], second.truncated.any()) == (True, False)
    assert set(first.source) == {Source.HUMAN}
    assert (first.info.kind, first.info.success, second.info.success) == ("demonstration", False, True)
    assert (first.info.task, first.info.instruction, first.info.labels["folder"]) == ("tidy", "tidy", "data")


def opened(name: str) -> DatasetReader:
    dataset = parse_dataset_path(name)
    return dataset.format.read(dataset.path, dataset.options)


GOOD = {"observation": np.zeros((3, 2)), "action": np.zeros((2, 1))}


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({**GOOD, "observation": np.zeros((2, 2))}, "observation: expected 3 rows, because there are 2 actions"),
        ({**GOOD, "observation": np.zeros((3, 5))}, r"observation: expected float64 \[2\], got float64 \[5\]"),
        ({**GOOD, "observation": {"other": np.zeros((3, 2))}}, "observation"),
        ({**GOOD, "reward": [0.0]}, r"reward: expected \[2\], got float32 \[1\]"),
        ({**GOOD, "rewards": [0.0]}, "'rewards' is unknown; an episode has observation, action, reward"),
        ({**GOOD, "source": "ghost"}, "source: expected one of"),
        ({**GOOD, "kind": "play"}, "kind: expected one of"),
        ({**GOOD, "success": "maybe", "labels": 3}, "labels: expected a dict"),
        ({"observation": np.zeros((3, 2))}, "has no 'action'"),
        ({**GOOD, "action": np.zeros((0, 1))}, "expected"),
        ({**GOOD, "action": ["left", "right"]}, "action: expected an array of numbers with a row per step"),
        ([1, 2], "expected a dict with observation"),
    ],
)
def test_an_episode_that_does_not_fit_is_named(tmp_path: Path, second: Any, says: str) -> None:
    def function(path: Path) -> Iterator[Mapping[str, Any]]:
        yield from (GOOD, second)

    reader = FunctionReader(function, tmp_path, {}, "mine")
    with pytest.raises(FormatError, match=f"mine: episode 1: .*{says}"):
        list(reader.episodes())


def test_a_wrong_name_says_what_to_do(here: Path) -> None:
    for name, says in (
        ("own_reader:nothing:data", "own_reader.py has no 'nothing'"),
        ("no_reader:episodes:data", "format 'no_reader': is unknown; there are rlds, .*or module:function"),
        (
            "own_reader:episodes:nowhere",
            "nowhere: is not there; name the file or folder that own_reader",
        ),
        ("own_reader:episodes:data?num=0", "found no episode there"),
    ):
        with pytest.raises(FormatError, match=says):
            opened(name)
    dataset = parse_dataset_path("own_reader:episodes:data")
    with pytest.raises(FormatError, match="can be read and not written"):
        dataset.format.write(Path("out"), FunctionReader(lambda path: iter([GOOD]), here, {}, "x").spec, {})
