"""Minari: datasets that the real Minari wrote, and what each option changes."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.formats.mutation import damage, read_all

from understudy.core import Episode, Source
from understudy.core.examples import small_spec
from understudy.formats import FormatError, find_format

h5py = pytest.importorskip("h5py", reason="the extra `hdf5` is not installed")
FORMAT = find_format("minari")
GOLDEN = Path(__file__).parents[3] / "golden" / "formats" / "minari"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minari")
    with tarfile.open(GOLDEN / "data.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def read(path: Path, **options: str) -> dict[str, Episode]:
    with closing(FORMAT.read(path, options)) as source:
        return dict(source.episodes())


def test_it_reads_what_minari_reads(golden: Path) -> None:
    found = read(golden / "hdf5-v0")
    wanted = json.loads((GOLDEN / "wanted.json").read_text())
    assert list(found) == ["episode_0", "episode_1"]
    for episode, theirs in zip(found.values(), wanted, strict=True):
        assert episode.observation["pose"].tolist() == theirs["pose"]
        assert episode.observation["goal"]["0"].tolist() == theirs["goal"][0]
        assert episode.observation["goal"]["1"] == theirs["goal"][1]
        assert hashlib.sha256(episode.observation["picture"].tobytes()).hexdigest() == theirs["pictures"]
        assert episode.action["0"].tolist() == theirs["arm"]
        assert episode.action["1"].tolist() == theirs["gripper"]
        assert episode.reward.tolist() == theirs["rewards"]
        assert episode.terminated.tolist() == theirs["terminations"]
        assert episode.truncated.tolist() == theirs["truncations"]
        assert episode.extras["contact"]["force"].tolist() == theirs["force"][1:]  # the first is of the reset
    infos = [episode.info for episode in found.values()]
    assert [(info.seed, info.success, info.actor, info.task) for info in infos] == [
        (7, True, "random", "toy/hdf5-v0"),
        (8, False, "random", "toy/hdf5-v0"),
    ]
    assert list(read(golden / "hdf5-v0" / "data")) == list(found)


def test_options(golden: Path) -> None:
    source = FORMAT.read(golden / "hdf5-v0", {})
    source.close()
    assert [(leaf.low, leaf.high) for leaf in source.spec.action.flat.values()] == [(-1.0, 1.0), (0.0, 2.0)]
    source = FORMAT.read(golden / "hdf5-v0", {"bounds": "none"})
    source.close()
    assert not any(leaf.bounded for leaf in source.spec.action.flat.values())
    episode = read(golden / "hdf5-v0", infos="none", kind="practice", source="script")["episode_0"]
    assert (episode.extras, episode.info.kind, int(episode.source[0])) == ({}, "practice", int(Source.SCRIPT))
    assert read(golden / "hdf5-v0")["episode_0"].info.kind == "demonstration"


def test_actions_beyond_their_space_are_refused_with_a_way_out(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden / "hdf5-v0", tmp_path / "a")
    with h5py.File(tmp_path / "a" / "data" / "main_data.hdf5", "a") as file:
        file["episode_1/actions/_index_0"][0, 0] = 1.5
    with pytest.raises(
        FormatError, match=r"episode_1: action/0\[0\]: expected a value from -1 to 1, got 1.5.*bounds=none"
    ):
        read(tmp_path / "a")
    assert read(tmp_path / "a", bounds="none")["episode_1"].action["0"][0, 0] == 1.5


def test_arrow_is_refused_and_nothing_is_written(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"metadata\.json: the data format is 'arrow', and only hdf5 is read"):
        read(golden / "arrow-v0")
    with pytest.raises(FormatError, match="can be read, not written; write robomimic"):
        FORMAT.write(tmp_path / "a", small_spec(), {})
    with pytest.raises(FormatError, match="has no option 'colour'"):
        FORMAT.read(golden / "hdf5-v0", {"colour": "red"})
    with pytest.raises(FormatError, match=r"metadata\.json: cannot be read"):
        read(tmp_path)


def test_rows_that_do_not_fit_are_refused(golden: Path, tmp_path: Path) -> None:
    def change(name: str, value: Any, match: str) -> None:
        path = tmp_path / name.replace("/", "-")
        shutil.copytree(golden / "hdf5-v0", path)
        with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
            del file[name]
            file[name] = value
        with pytest.raises(FormatError, match=match):
            read(path)

    change(
        "episode_1/observations/pose",
        np.zeros((2, 3)),
        r"episode_1: observations/pose: expected 3 rows of float64 \[3\]",
    )
    change(
        "episode_1/terminations", np.array([True, False]), r"episode_1: steps\[0\]: terminated or truncated, but 1 more"
    )
    change("episode_1/rewards", np.array([np.nan, 0]), "episode_1: reward: expected a finite number")
    change("episode_1/observations/picture", np.zeros((3, 9), np.uint8), "an image is not a JPEG")


@pytest.mark.parametrize("value", [1.5, -1, None, "x", 10**20])
def test_a_space_of_an_absurd_shape_is_refused(golden: Path, tmp_path: Path, value: Any) -> None:
    shutil.copytree(golden / "hdf5-v0", tmp_path / "a")
    path = tmp_path / "a" / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    space = json.loads(metadata["observation_space"])
    space["subspaces"]["picture"]["shape"][0] = value
    path.write_text(json.dumps({**metadata, "observation_space": json.dumps(space)}))
    with pytest.raises(FormatError, match="observations/picture: "):
        read(tmp_path / "a")


def test_damage_is_refused(golden: Path, tmp_path: Path) -> None:
    """As the contract of formats wants it, for a format that is not written here."""
    for number in range(25):
        rng, path = random.Random(number), tmp_path / str(number)
        shutil.copytree(golden / "hdf5-v0", path)
        damage(path, rng)
        try:
            source = FORMAT.read(path, {})
            try:
                read_all(source)
            finally:
                source.close()
        except FormatError:
            pass
