"""Datasets made with the real TensorFlow Datasets, and what it reads from them, against what is read here."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core import tree as trees
from understudy.formats import NamedDataset, find_format
from understudy.formats.rlds import read_rlds

ARCHIVE = Path(__file__).parents[3] / "golden" / "formats" / "rlds" / "rlds.tar.xz"
SAMPLE = Path(__file__).parents[5] / "shared" / "data" / "rlds_sample"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset_dir = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(dataset_dir, filter="data")
    return dataset_dir


@pytest.fixture(scope="module")
def truth(golden: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(golden / "truth.npz") as found:
        return dict(found)


def rows_of(truth: dict[str, Any], prefix: str, path: str) -> list[Any]:
    """What TensorFlow Datasets read of a field, row by row."""
    found = []
    while f"{prefix}/steps/#{len(found)}/{path}" in truth:
        found.append(truth[f"{prefix}/steps/#{len(found)}/{path}"])
    return found


def assert_same(got: Any, wanted: Any, path: str) -> None:
    if isinstance(got, str):
        assert got == str(wanted), path
    else:
        assert got.dtype == wanted.dtype, path
        np.testing.assert_array_equal(got, wanted, err_msg=path)


@pytest.mark.parametrize(
    "dataset_dir",
    ["tfrecord/nested", "array_record/nested", "tfrecord/plain", "array_record/plain", "gzip/plain", "zlib/plain"],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_all_rows_are_those_that_tensorflow_datasets_reads(
    golden: Path, truth: dict[str, Any], dataset_dir: str, workers: int
) -> None:
    name = dataset_dir.partition("/")[2]
    count = 0
    for split in ("train", "val") if name == "nested" else ("train",):
        episodes = read_rlds(golden / dataset_dir, split, workers)
        assert len(episodes) == (3 if split == "val" else 6 if name == "nested" else 7)
        for number, episode in enumerate(episodes):
            prefix = f"{name}/{split}/{number}"
            steps = trees.flatten(episode.pop("steps"))
            for path, column in steps.items():
                wanted = rows_of(truth, prefix, path)
                assert len(column) == len(wanted) > 0, path
                for got, value in zip(column, wanted, strict=True):
                    assert_same(got, value, path)
                count += 1
            for path, value in trees.flatten(episode).items():
                assert_same(value if isinstance(value, str) else np.asarray(value), truth[f"{prefix}/{path}"], path)
    assert count > 20


def test_what_is_not_read_is_said(golden: Path) -> None:
    unread = read_rlds(golden / "tfrecord" / "nested").reader.unread
    assert unread == {
        "episode_metadata/start": "of an episode, only text and single numbers are kept",
        "steps/observation/boxes/name": "it is a list of texts",
        "steps/observation/grid": "it has several dimensions of unknown length",
        "steps/observation/words": "it is a list of texts",
    }


def test_episodes_of_a_nested_data_set(golden: Path, truth: dict[str, Any]) -> None:
    source = find_format("rlds").read(golden / "tfrecord" / "nested", {})
    assert source.num_episodes == 9
    assert isinstance(source, NamedDataset)
    assert source.name == "nested/1.0.0"
    found = list(source.episodes())
    assert [key for key, _ in found] == [*(f"train/{n}" for n in range(6)), *(f"val/{n}" for n in range(3))]
    assert [episode.info.split for _, episode in found] == ["train"] * 6 + ["eval"] * 3
    for number, (_, episode) in enumerate(found[:6]):
        prefix = f"nested/train/{number}"
        assert episode.info.instruction == "stelle die Tasse ab ☕"
        assert episode.info.success == bool(truth[f"{prefix}/episode_metadata/success"])
        assert episode.info.labels["episode_metadata/file_path"] == str(truth[f"{prefix}/episode_metadata/file_path"])
        images = rows_of(truth, prefix, "observation/image")
        assert len(episode) == len(images) - 1
        np.testing.assert_array_equal(episode.observation["image"], images)
        np.testing.assert_array_equal(episode.action["grip"], rows_of(truth, prefix, "action/grip")[:-1])
        np.testing.assert_array_equal(episode.reward, rows_of(truth, prefix, "reward")[:-1])
        np.testing.assert_array_equal(episode.extras["discount"], rows_of(truth, prefix, "discount")[:-1])
        terminal = bool(rows_of(truth, prefix, "is_terminal")[-1])
        assert (episode.terminated[-1], episode.truncated[-1]) == (terminal, not terminal)


def test_a_record_of_one_row_has_no_step(golden: Path) -> None:
    """Unless every row is a step: then the last observation stands twice."""
    dataset_dir = golden / "tfrecord" / "plain"
    rows = [len(episode["steps"]["is_first"]) for episode in read_rlds(dataset_dir)]
    assert 1 in rows
    steps = [len(episode) for _, episode in find_format("rlds").read(dataset_dir, {}).episodes()]
    assert steps == [n - 1 for n in rows if n > 1]
    every = [episode for _, episode in find_format("rlds").read(dataset_dir, {"last": "step"}).episodes()]
    assert [len(episode) for episode in every] == rows
    for episode in every:
        assert np.array_equal(episode.observation[-1], episode.observation[-2])
        assert episode.terminated[-1] or episode.truncated[-1]


# ---- a sample that others made

needs_sample = pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample dataset is not beside this project")


@needs_sample
@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_the_sample_is_its_truth(kind: str) -> None:
    with np.load(SAMPLE / "truth.npz") as found:
        truth = dict(found)
    for number, episode in enumerate(read_rlds(SAMPLE / kind)):
        for path, column in trees.flatten(episode["steps"]).items():
            wanted = truth[f"episode_{number}/{path}"]
            if path == "observation/wrist_image":  # JPEG
                assert np.abs(column.astype(int) - wanted).mean() < 3
            elif isinstance(column, list):
                assert column == list(wanted)
            else:
                assert column.dtype == wanted.dtype
                np.testing.assert_array_equal(column, wanted)
    assert number == 2


@needs_sample
@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_the_sample_as_episodes(kind: str) -> None:
    with np.load(SAMPLE / "truth.npz") as found:
        truth = dict(found)
    (_, first), (_, second) = find_format("rlds").read(SAMPLE / kind, {}).episodes()  # the third has a single row
    assert (first.terminated.tolist(), first.truncated.tolist()) == ([False] * 3 + [True], [False] * 4)
    assert (second.terminated.tolist(), second.truncated.tolist()) == ([False] * 3, [False, False, True])
    assert first.reward.tolist() == [0, 0, 0, 1]
    assert second.source.tolist() == [0, 1, 1]
    np.testing.assert_array_equal(first.observation["image"], truth["episode_0/observation/image"])
    np.testing.assert_array_equal(second.action, truth["episode_1/action"][:-1])
    assert first.info.instruction == "pick up the can"
    assert (first.info.success, second.info.success) == (True, False)
