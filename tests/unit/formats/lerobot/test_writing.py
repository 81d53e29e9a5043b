"""What is written comes back: exactly without loss, and with video up to the loss that the dataset states."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.unit.formats.lerobot.made import SPEC, edit_json, read, smooth_episode, write

from understudy.core import ArraySpec, Episode, EpisodeInfo, Spec, StepSpec
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.core.tree import equal_leaf
from understudy.formats import FormatError, find_format, parse_dataset_path
from understudy.formats.lerobot import file_rotation as shelf
from understudy.replay import Reader
from understudy.training.data.dataset_io import export_episodes, import_episodes, open_import_target

EPISODES = [smooth_episode(5, 0), smooth_episode(1, 1), smooth_episode(7, 2)]


def info_of(dataset_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((dataset_dir / "meta" / "info.json").read_text())
    return found


def error_of(wanted: Episode, got: Episode) -> float:
    """The mean error of the camera; all else must be equal."""
    theirs = got.columns()
    assert wanted.info == got.info
    for path, column in wanted.columns().items():
        if path != "observation/front":
            assert equal_leaf(column, theirs[path]), path
    return float(np.abs(wanted.observation["front"][:-1].astype(int) - got.observation["front"][:-1]).mean())


@pytest.mark.parametrize("version", ["3", "2.1"])
@pytest.mark.parametrize("video", ["av1", "h264"])
def test_video_loses_what_the_data_set_states_and_no_more(tmp_path: Path, video: str, version: str) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, video=video, version=version)
    stated = json.loads((dataset_dir / "meta" / "understudy" / "spec.json").read_text())["mean_error"]
    errors = [error_of(wanted, got) for wanted, got in zip(EPISODES, read(dataset_dir), strict=True)]
    assert 0 < max(errors) < 4
    assert stated == {"observation.images.front": max(errors)}
    for wanted, got in zip(EPISODES, read(dataset_dir), strict=True):
        assert np.array_equal(wanted.last_observation["front"], got.last_observation["front"])  # kept beside the video


@pytest.mark.parametrize("version", ["3", "2.1"])
@pytest.mark.parametrize("video", ["lossless", "png"])
def test_lossless_and_png_are_exact(tmp_path: Path, video: str, version: str) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, video=video, version=version)
    assert all(wanted.equals(got) for wanted, got in zip(EPISODES, read(dataset_dir), strict=True))


def test_lossless_keeps_noise_and_odd_sizes(tmp_path: Path) -> None:
    spec = StepSpec(observation=Spec({"eye": ArraySpec(shape=(9, 11, 3), dtype="uint8")}), action=small_spec().action)
    noise = random_episode(spec, 6, 1)
    (got,) = read(write(tmp_path / "d", [noise], spec, video="lossless"))
    assert noise.equals(got)


@pytest.mark.parametrize(
    ("video", "codec", "dtype"), [("av1", "av1", "video"), ("h264", "h264", "video"), ("lossless", "h264", "video")]
)
def test_video_chooses_the_codec(tmp_path: Path, video: str, codec: str, dtype: str) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, video=video)
    feature = info_of(dataset_dir)["features"]["observation.images.front"]
    assert (feature["dtype"], feature["info"]["video.codec"]) == (dtype, codec)
    (file,) = dataset_dir.rglob("*.mp4")
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        assert codec in (stream.codec.name, stream.codec.canonical_name)
        assert stream.codec_context.pix_fmt == ("gbrp" if video == "lossless" else "yuv420p")
        assert stream.frames == 13


def test_png_goes_into_the_table(tmp_path: Path) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, video="png")
    assert info_of(dataset_dir)["features"]["observation.images.front"]["dtype"] == "image"
    assert not list(dataset_dir.rglob("*.mp4"))
    (table,) = (dataset_dir / "data").rglob("*.parquet")
    assert pq.read_table(table)["observation.images.front"][0].as_py()["bytes"].startswith(b"\x89PNG")


def test_fps_is_the_clock_of_tables_and_films(tmp_path: Path) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, fps="25")
    assert info_of(dataset_dir)["fps"] == 25
    (table,) = (dataset_dir / "data").rglob("*.parquet")
    assert np.allclose(pq.read_table(table)["timestamp"].to_numpy()[:5], np.arange(5) / 25)
    (video,) = dataset_dir.rglob("*.mp4")
    with av.open(str(video)) as container:
        assert container.streams.video[0].average_rate == 25
    assert len(read(dataset_dir)) == 3


@pytest.mark.parametrize("option", [("fps", "0"), ("fps", "fast"), ("fps", "1001"), ("video", "gif"), ("version", "4")])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    with pytest.raises(FormatError, match=f"lerobot: expected {option[0]}="):
        find_format("lerobot").write(tmp_path / "d", SPEC, dict([option]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [("last", "x"), ("source", "x"), ("rest", "x")])
def test_options_of_reading_too(tmp_path: Path, option: tuple[str, str]) -> None:
    with pytest.raises(FormatError, match=rf"lerobot: expected {option[0]}=\w+\|"):
        find_format("lerobot").read(tmp_path, dict([option]))


def test_what_video_would_ruin_is_refused(tmp_path: Path) -> None:
    spec = robot_spec(32)  # of which random images are noise
    with pytest.raises(FormatError, match=r"av1 changes the pixels of episode 0 by \d+\.\d of 255 in the mean"):
        write(tmp_path / "d", [random_episode(spec, 8, 0)], spec)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="only Linux can say how a thread is scheduled")
def test_an_export_leaves_the_thread_scheduled_as_it_was(tmp_path: Path) -> None:
    before = os.sched_getscheduler(0)  # as root, the encoder takes the highest real-time priority
    write(tmp_path / "d", EPISODES[:1], video="av1", version="3")
    assert os.sched_getscheduler(0) == before


def test_av1_refuses_what_its_encoders_crash_on(tmp_path: Path) -> None:
    spec = robot_spec(16)
    with pytest.raises(FormatError, match=r"wrist_1: av1 needs 32 x 32 pixels, got 16 x 16; use \?video=png"):
        write(tmp_path / "d", [random_episode(spec, 2, 0)], spec)


def test_h264_refuses_odd_sizes(tmp_path: Path) -> None:
    spec = StepSpec(observation=Spec({"eye": ArraySpec(shape=(9, 11, 3), dtype="uint8")}), action=small_spec().action)
    with pytest.raises(FormatError, match=r"h264 cannot hold 9 x 11 pixels .*; use \?video=png"):
        write(tmp_path / "d", [random_episode(spec, 2, 0)], spec, video="h264")


def test_lerobot_sees_what_its_users_look_for(tmp_path: Path) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, video="png")
    (path,) = (dataset_dir / "data").rglob("*.parquet")
    table = pq.read_table(path).to_pydict()
    assert table["next.done"] == [False] * 4 + [True, True] + [False] * 6 + [True]
    assert table["next.truncated"] == [False] * 13
    assert table["next.success"] == table["next.done"]
    assert table["next.reward"] == [float(ended) for ended in table["next.done"]]
    assert table["intervention"][:5] == [False, True, False, False, True]
    assert table["index"] == list(range(13))
    assert table["episode_index"] == [0] * 5 + [1] + [2] * 7
    assert table["observation.prompt"][:2] == ["step 0", "step 1"]
    assert np.array_equal(np.float32(table["complementary_info.log_prob"][:5]), EPISODES[0].extras["log_prob"])
    assert info_of(dataset_dir)["features"]["action"] == {"dtype": "float32", "shape": [2], "names": None}
    tasks = pq.read_table(dataset_dir / "meta" / "tasks.parquet").to_pydict()
    assert tasks == {"task_index": [0], "task": ["push it"]}


def test_rest_ignore_reads_it_as_lerobot_has_it(tmp_path: Path) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, video="png")
    first, _, _ = read(dataset_dir, rest="ignore")
    assert np.array_equal(first.action, EPISODES[0].action)
    assert first.info.labels["last_observation"] == "repeats the last frame"
    assert first.info.seed is None
    assert first.source.tolist() == EPISODES[0].source.tolist()


def test_a_data_set_that_was_changed_afterwards_says_so(tmp_path: Path) -> None:
    dataset_dir = write(tmp_path / "d", EPISODES, version="2.1", video="png")
    lines = (dataset_dir / "meta" / "episodes.jsonl").read_text().splitlines()
    (dataset_dir / "meta" / "episodes.jsonl").write_text("\n".join(lines[:2]))
    edit_json(dataset_dir / "meta" / "info.json", lambda info: info.update(total_episodes=2))
    with pytest.raises(FormatError, match=r"has 3 episodes and the dataset has 2.*\?rest=ignore"):
        read(dataset_dir)
    assert len(read(dataset_dir, rest="ignore")) == 2


def test_files_are_filled_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.formats.lerobot.writer.DATA_FILE_BYTES", 1)
    monkeypatch.setattr("understudy.formats.lerobot.writer.VIDEO_FILE_BYTES", 1)
    monkeypatch.setattr(shelf, "CHUNK_FILES", 2)
    dataset_dir = write(tmp_path / "d", EPISODES, video="lossless")
    names = sorted(str(path.relative_to(dataset_dir / "data")) for path in (dataset_dir / "data").rglob("*.parquet"))
    assert names == ["chunk-000/file-000.parquet", "chunk-000/file-001.parquet", "chunk-001/file-000.parquet"]
    assert len(list(dataset_dir.rglob("*.mp4"))) == 3
    assert all(wanted.equals(got) for wanted, got in zip(EPISODES, read(dataset_dir), strict=True))


def test_names_that_lerobot_would_stumble_over(tmp_path: Path) -> None:
    number = ArraySpec(shape=(2,), dtype="float32")
    camera = ArraySpec(shape=(8, 8, 3), dtype="uint8")
    spec = StepSpec(
        observation=Spec({"a b": number, "a_b": number, "image size": number, "images": {"x": camera}, "x": camera}),
        action=Spec({"arm": number}),
        extras=Spec(number),
    )
    episode = random_episode(spec, 3, 0)
    dataset_dir = write(tmp_path / "d", [episode], spec, video="png")
    assert [key for key in info_of(dataset_dir)["features"] if "." in key and not key.startswith("next.")] == [
        "observation.a_b",
        "observation.a_b_",
        "observation.img_size",
        "observation.images.images.x",
        "observation.images.x",
        "action.arm",
        "complementary_info.value",
    ]
    assert episode.equals(read(dataset_dir)[0])


def test_an_empty_data_set_is_one(tmp_path: Path) -> None:
    for version in ("3", "2.1"):
        assert read(write(tmp_path / version, [], version=version)) == []


def test_no_room_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="cannot be written"):
        write(tmp_path / "file" / "d", EPISODES)


JOINTS = {"motors": ["shoulder_pan.pos", "elbow.pos"]}
FIELDS = ["x", "y", "z"]


def as_others_have_it(folder: Path, *, success: bool) -> Path:
    """A data set of 30 fps with names and a robot, as lerobot records one: without Understudy's own files."""
    dataset_dir = write(folder / "theirs", EPISODES, video="png", fps="30")
    shutil.rmtree(dataset_dir / "meta" / "understudy")

    def change(info: dict[str, Any]) -> None:
        info["robot_type"] = "so101_follower"
        info["features"]["action"]["names"] = JOINTS
        info["features"]["observation.state"]["names"] = FIELDS
        for key in ("next.done", "next.truncated", "intervention", *(() if success else ("next.success",))):
            del info["features"][key]

    edit_json(dataset_dir / "meta" / "info.json", change)
    return dataset_dir


@pytest.mark.parametrize("success", [False, True])
def test_a_data_set_goes_through_a_store_and_keeps_what_it_says_of_itself(tmp_path: Path, success: bool) -> None:
    theirs = as_others_have_it(tmp_path, success=success)
    for source, store in ((f"lerobot:{theirs}", "a"), (f"lerobot:{tmp_path / 'ours'}?rest=ignore", "b")):
        dataset = parse_dataset_path(source)
        with (
            closing(dataset.format.read(dataset.path, dataset.options)) as opened,
            open_import_target(str(tmp_path / store)) as target,
        ):
            import_episodes(opened, target, dataset)
        with Reader(tmp_path / store) as reader:
            infos = [record.info for record in reader.episodes()]
        assert {info.success for info in infos} == {True if success else None}
        for info in infos:
            assert (info.labels["fps"], info.labels["robot_type"]) == ("30", "so101_follower")
            assert info.names["action"] == ("shoulder_pan.pos", "elbow.pos")
            assert info.names["observation/state"] == ("x", "y", "z")
        if store == "a":
            export_episodes(tmp_path / "a", parse_dataset_path(f"lerobot:{tmp_path / 'ours'}?video=png"))
    ours, before = info_of(tmp_path / "ours"), info_of(theirs)
    assert (ours["fps"], ours["robot_type"]) == (before["fps"], before["robot_type"]) == (30, "so101_follower")
    assert ours["features"]["action"]["names"] == JOINTS
    assert ours["features"]["observation.state"]["names"] == FIELDS
    assert ("next.success" in ours["features"]) == success
    (path,) = (tmp_path / "ours" / "data").rglob("*.parquet")
    assert np.allclose(pq.read_table(path)["timestamp"].to_numpy()[:2], [0, 1 / 30])


def test_episodes_that_disagree(tmp_path: Path) -> None:
    def infos(*labels: dict[str, str]) -> list[EpisodeInfo]:
        return [EpisodeInfo(labels=one) for one in labels]

    def fields(*labels: dict[str, str], **options: str) -> dict[str, Any]:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        target = find_format("lerobot").write(place, SPEC, {"video": "png", **options}, infos(*labels))
        target.add("0", EPISODES[0])
        target.close()
        return info_of(place)

    with pytest.raises(FormatError, match=r"different frame rates \(10, 30\).*'\$.fps'\) = '10'"):
        fields({"fps": "10"}, {"fps": "30"})
    assert fields({"fps": "10"}, {"fps": "30"}, fps="25")["fps"] == 25
    with pytest.raises(FormatError, match=r"have 29.97 frames per second; give a whole number with \?fps="):
        fields({"fps": "29.97"})
    names = [json.dumps({"action": ["a", one]}) for one in "bc"]
    same = fields({"names": names[0], "robot_type": "r", "fps": "20"}, {})  # the second was recorded elsewhere
    assert (same["features"]["action"]["names"], same["robot_type"], same["fps"]) == (["a", "b"], "r", 20)
    other = fields({"names": names[0], "robot_type": "r"}, {"names": names[1], "robot_type": "s"})
    assert (other["features"]["action"]["names"], other["robot_type"], other["fps"]) == (None, None, 10)
    wrong = fields({"names": json.dumps({"action": ["only one"], "observation/state": 3})})
    assert wrong["features"]["action"]["names"] is None
