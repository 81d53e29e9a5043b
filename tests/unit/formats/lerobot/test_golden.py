"""Datasets that the real lerobot wrote are read as it reads them itself; see tests/golden/formats/lerobot/make.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.formats.lerobot.made import GOLDEN, copy_of_golden, edit_json, read

from understudy.core import Episode, Source
from understudy.formats import FormatError, find_format
from understudy.formats.lerobot import stats

FIELDS = {
    "top": "observation.images.top",
    "wrist": "observation.images.wrist",
    "state": "observation.state",
    "touch": "observation.touch",
}


@pytest.fixture(params=["v3", "v21"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def truth(name: str) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The frames of each episode, as lerobot decoded them."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        frames = dict(file)
    numbers = frames["episode_index"]
    return [{key: column[numbers == n] for key, column in frames.items()} for n in range(int(numbers.max()) + 1)]


def assert_rows(episode: Episode, frames: dict[str, np.ndarray[Any, Any]]) -> None:
    """All rows of the episode are the first of the frames."""
    num = len(episode)
    for ours, theirs in FIELDS.items():
        column = episode.observation[ours][: len(frames[theirs])]
        assert column.dtype == frames[theirs].dtype
        assert np.array_equal(column, frames[theirs][: len(column)]), ours
    assert np.array_equal(episode.action, frames["action"][:num])
    assert np.array_equal(episode.reward, frames["next.reward"][:num])
    assert episode.extras["force"].dtype == np.float64  # lerobot rounds it, we do not
    assert np.array_equal(episode.extras["force"][:, 0].astype(np.float32), frames["force"][:num])
    assert np.array_equal(episode.extras["task_index"][:, 0], frames["task_index"][:num])


def test_every_number_and_every_pixel_is_what_lerobot_reads(name: str) -> None:
    wanted = truth(name)
    got = read(GOLDEN / name)
    assert [len(frames["index"]) for frames in wanted] == [6, 9, 2]
    for frames, episode in zip(wanted, got, strict=True):
        assert_rows(episode, frames)


def test_an_end_repeats_the_last_frame_and_a_stop_drops_it(name: str) -> None:
    ended, stopped, short = read(GOLDEN / name)
    assert (len(ended), len(stopped), len(short)) == (6, 8, 1)  # of 6, 9 and 2 frames
    assert ended.terminated.tolist() == [False] * 5 + [True]
    assert not ended.truncated.any()
    assert np.array_equal(ended.observation["top"][6], ended.observation["top"][5])
    assert ended.info.labels["last_observation"] == "repeats the last frame"
    assert stopped.truncated.tolist() == [False] * 7 + [True]
    assert not stopped.terminated.any()
    assert np.array_equal(stopped.observation["top"][8], truth(name)[1]["observation.images.top"][8])
    assert stopped.info.labels["last_observation"] == "is the last frame"


@pytest.mark.parametrize(("last", "lengths"), [("step", [6, 9, 2]), ("observation", [5, 8, 1])])
def test_last_chooses_for_all(name: str, last: str, lengths: list[int]) -> None:
    got = read(GOLDEN / name, last=last)
    assert [len(episode) for episode in got] == lengths
    for frames, episode in zip(truth(name), got, strict=True):
        assert_rows(episode, frames)
        assert (episode.terminated | episode.truncated)[-1]
    assert got[0].terminated[-1] == (last == "step")  # the step that ended the task is dropped, too


def test_who_drove_what_was_asked_and_how_it_went(name: str) -> None:
    first, second, _ = (episode for episode in read(GOLDEN / name))
    assert second.source.tolist() == [Source.POLICY] * 3 + [Source.HUMAN] * 3 + [Source.POLICY] * 2
    assert (first.info.kind, second.info.kind) == ("practice", "correction")
    assert (first.info.success, second.info.success) == (True, False)
    assert first.info.instruction == first.info.task == "push the block"
    assert first.info.labels["fps"] == "10"


@pytest.mark.parametrize(
    ("given", "source", "kind"),
    [
        ({}, Source.HUMAN, "demonstration"),
        ({"source": "script"}, Source.SCRIPT, "demonstration"),
        ({"source": "policy"}, Source.POLICY, "practice"),
        ({"source": "random"}, Source.RANDOM, "practice"),
    ],
)
def test_without_interventions_it_is_a_demonstration_unless_said_otherwise(
    tmp_path: Path, name: str, given: dict[str, str], source: Source, kind: str
) -> None:
    dataset_dir = copy_of_golden(name, tmp_path, lambda info: info["features"].pop("intervention"))
    for episode in read(dataset_dir, **given):
        assert (episode.source == source).all()
        assert episode.info.kind == kind


def test_the_end_of_the_task_by_what_is_there(tmp_path: Path) -> None:
    def rename(info: dict[str, Any], old: str, new: str) -> None:
        info["features"] = {new if key == old else key: value for key, value in info["features"].items()}

    by_success = copy_of_golden("v3", tmp_path / "a", lambda info: info["features"].pop("next.done"))
    assert read(by_success)[0].terminated[-1]
    unknown = copy_of_golden(
        "v3", tmp_path / "b", lambda i: [i["features"].pop(f"next.{x}") for x in ("done", "success")]
    )
    first = read(unknown)[0]
    assert first.truncated[-1]
    assert first.info.success is None
    with pytest.raises(FormatError, match=r"expected one column 'next\.truncated', got 0"):
        read(copy_of_golden("v3", tmp_path / "c", lambda info: rename(info, "next.success", "next.truncated")))


def test_version_2_0_is_read_like_2_1(tmp_path: Path) -> None:
    dataset_dir = copy_of_golden("v21", tmp_path, lambda info: info.update(codebase_version="v2.0"))
    (dataset_dir / "meta" / "episodes_stats.jsonl").unlink()
    assert all(a.equals(b) for a, b in zip(read(dataset_dir), read(GOLDEN / "v21"), strict=True))


def test_channels_may_stand_first_in_info(tmp_path: Path, name: str) -> None:
    def turn(info: dict[str, Any]) -> None:
        for key in ("observation.images.top", "observation.images.wrist"):
            height, width, channels = info["features"][key]["shape"]
            info["features"][key]["shape"] = [channels, height, width]

    dataset_dir = copy_of_golden(name, tmp_path, turn)
    assert all(a.equals(b) for a, b in zip(read(dataset_dir), read(GOLDEN / name), strict=True))


def test_episodes_in_one_film_are_decoded_once(name: str) -> None:
    source: Any = find_format("lerobot").read(GOLDEN / name, {})
    videos = {}
    for _ in source.episodes():
        videos |= {key: file for key, file in source._open.items() if key.startswith("observation.images.top")}
    assert len(videos) == (1 if name == "v3" else 3)
    assert sum(video.num_decoded for video in videos.values()) == 17
    source.close()


def test_a_skipped_episode_is_not_decoded() -> None:
    source: Any = find_format("lerobot").read(GOLDEN / "v3", {})
    (found,) = source.episodes({"episode_000000", "episode_000001"})
    assert_rows(found[1], truth("v3")[2])
    (video,) = (file for key, file in source._open.items() if key.startswith("observation.images.top"))
    assert video.num_decoded <= 4  # two, and what is between them and the key frame before
    source.close()


def test_statistics_are_those_of_lerobot() -> None:
    theirs = json.loads((GOLDEN / "v3" / "meta" / "stats.json").read_text())
    together = stats.MergedStats()
    for frames in truth("v3"):
        numbers = {key: stats.of_numbers(frames[key]) for key in ("observation.state", "action")}
        together.add({**numbers, "observation.images.wrist": stats.of_camera(frames["observation.images.wrist"])})
    ours = stats.as_lists(together.result())
    assert ours
    for key, wanted in theirs.items():
        if key in ours:
            assert ours[key].keys() == wanted.keys()
            for what in ("min", "max", "mean", "std", "count"):
                assert np.allclose(ours[key][what], wanted[what], atol=1e-5), (key, what)
                assert np.shape(ours[key][what]) == np.shape(wanted[what])
            for what in stats.QUANTILES:  # theirs are read off a histogram
                spread = np.subtract(wanted["max"], wanted["min"])
                assert (np.abs(np.subtract(ours[key][what], wanted[what])) < 0.3 * spread).all(), (key, what)


def test_the_mapping_says_what_becomes_of_each_field(tmp_path: Path) -> None:
    dataset_dir = copy_of_golden("v3", tmp_path, lambda info: info["features"].pop("next.reward"))
    source = find_format("lerobot").read(dataset_dir, {})
    lines = {line.internal: (line.external, line.how) for line in source.mapping}
    source.close()
    assert lines["observation/top"] == ("observation.images.top", "video, decoded")
    assert lines["observation/wrist"] == ("observation.images.wrist", "images, decoded")
    assert lines["reward"] == ("", "0 where there is none")
    assert lines["source"] == ("intervention", "human where it is true, else policy")
    assert not read(dataset_dir)[0].reward.any()


def test_dots_make_a_tree_unless_a_name_is_both_leaf_and_branch(tmp_path: Path) -> None:
    def rename(info: dict[str, Any]) -> None:
        info["features"]["observation.state.more"] = info["features"].pop("observation.touch")

    dataset_dir = copy_of_golden("v3", tmp_path, rename)
    source = find_format("lerobot").read(dataset_dir, {})
    assert sorted(source.spec.observation.flat) == ["state", "state.more", "top", "wrist"]
    source.close()
    edit_json(dataset_dir / "meta" / "info.json", lambda info: info["features"].pop("observation.state"))
    source = find_format("lerobot").read(dataset_dir, {})
    assert sorted(source.spec.observation.flat) == ["state/more", "top", "wrist"]
    source.close()
