"""MCAP files, read by the mcap library."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core import ArraySpec, Episode, Spec, Step, StepSpec
from understudy.core.examples import nested_spec, random_episode, robot_spec, small_spec, text_spec
from understudy.formats import FormatError, find_format

reader = pytest.importorskip("mcap.reader", reason="the extra `mcap` is not installed")
pillow = pytest.importorskip("PIL.Image", reason="the extra `mcap` is not installed")
FORMAT = find_format("mcap")


def write(path: Path, spec: StepSpec, *episodes: Episode, **options: str) -> Path:
    target = FORMAT.write(path, spec, options)
    try:
        for number, episode in enumerate(episodes):
            target.add(f"key {number}", episode)
        target.close()
    except BaseException:
        target.abandon()
        raise
    return path


def messages(path: Path) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    with path.open("rb") as file:
        for schema, channel, message in reader.make_reader(file, validate_crcs=True).iter_messages():
            assert channel.message_encoding == "json"
            assert schema.encoding == "jsonschema"
            json.loads(schema.data)
            found.setdefault(channel.topic, []).append((message.log_time, json.loads(message.data)))
    return found


def image(message: Any) -> np.ndarray[Any, Any]:
    with pillow.open(io.BytesIO(base64.b64decode(message["data"]))) as opened:
        assert opened.format.lower() == message["format"]
        return np.asarray(opened)


def test_cameras_numbers_and_attributes_are_there(tmp_path: Path) -> None:
    spec = robot_spec(16)
    episode = random_episode(spec, 9, 0)
    path = write(tmp_path / "a.mcap", spec, episode, images="png", hz="20")
    found = messages(path)
    assert [time for time, _ in found["/observation/wrist_1"]] == [n * 50_000_000 for n in range(10)]
    for row, (time, message) in enumerate(found["/observation/wrist_1"]):
        np.testing.assert_array_equal(image(message), episode.observation["wrist_1"][row])
        assert message["timestamp"] == {"sec": 0, "nsec": time}
        assert message["frame_id"] == "wrist_1"
    assert [message["value"] for _, message in found["/action"]] == episode.action.tolist()
    assert len(found["/proposal"]) == int(episode.has_proposal.sum()) > 0
    steps = [message for _, message in found["/step"]]
    assert [step["reward"] for step in steps] == episode.reward.tolist()
    assert {step["source"] for step in steps} == {"policy", "human"}
    assert steps[-1]["terminated"] is True
    with path.open("rb") as file:
        opened = reader.make_reader(file)
        (about,) = (record for record in opened.iter_metadata() if record.name == "understudy")
        summary = opened.get_summary()
        assert {"foxglove.CompressedImage", "understudy.Step"} <= {schema.name for schema in summary.schemas.values()}
    assert about.metadata["key"] == "key 0"
    assert json.loads(about.metadata["info"])["task"] == "task-0"


@pytest.mark.parametrize(("labels", "hz"), [({"fps": "25"}, 25), ({}, 10), ({"fps": "fast"}, 10)])
def test_the_rate_is_that_of_the_episode(tmp_path: Path, labels: dict[str, str], hz: int) -> None:
    episode = random_episode(small_spec(), 3, 0)
    episode = replace(episode, info=replace(episode.info, labels=labels))
    found = messages(write(tmp_path / "a.mcap", small_spec(), episode))
    assert [time for time, _ in found["/step"]] == [n * 10**9 // hz for n in range(3)]


def test_jpeg_is_smaller_and_close(tmp_path: Path) -> None:
    spec = robot_spec(32)
    smooth = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8)[:, None, None], (4, 32, 32, 3)).copy()
    episode = random_episode(spec, 3, 0)
    episode = Episode(**{**vars(episode), "observation": {**episode.observation, "wrist_1": smooth}})
    found = messages(write(tmp_path / "a.mcap", spec, episode))
    _, message = found["/observation/wrist_1"][0]
    assert message["format"] == "jpeg"
    assert np.abs(image(message).astype(int) - smooth[0]).max() < 16


def test_a_directory_has_a_file_for_each_episode_and_one_file_has_them_in_a_row(tmp_path: Path) -> None:
    spec = small_spec()
    episodes = [random_episode(spec, 3, n) for n in range(2)]
    folder = write(tmp_path / "many", spec, *episodes)
    assert sorted(path.name for path in folder.iterdir()) == ["episode_000000.mcap", "episode_000001.mcap"]
    times = [time for time, _ in messages(write(tmp_path / "one.mcap", spec, *episodes))["/observation"]]
    assert times == [
        0,
        100_000_000,
        200_000_000,
        300_000_000,
        1_300_000_000,
        1_400_000_000,
        1_500_000_000,
        1_600_000_000,
    ]


def test_times_that_were_recorded_are_kept(tmp_path: Path) -> None:
    clock = ArraySpec(shape=(), dtype="float64")
    spec = StepSpec(
        observation=Spec({"x": clock}),
        action=Spec(clock),
        extras=Spec({"time": clock, "clock_ns": ArraySpec(shape=(), dtype="int64")}),
    )
    steps = [
        Step(
            observation={"x": 0.0},
            action=0.0,
            reward=0.0,
            truncated=n == 2,
            extras={"time": 5.5 + n, "clock_ns": 7 * n},
        )
        for n in range(3)
    ]
    episode = Episode.from_steps(spec, steps, {"x": 0.0})
    assert [t for t, _ in messages(write(tmp_path / "a.mcap", spec, episode))["/step"]] == [
        5500000000,
        6500000000,
        7500000000,
    ]
    found = messages(write(tmp_path / "b.mcap", spec, episode, time="extras/clock_ns"))
    assert [t for t, _ in found["/step"]] == [0, 7, 14]
    assert [t for t, _ in found["/observation/x"]][-1] == 14 + 100_000_000
    with pytest.raises(
        FormatError, match=r"expected time= the path of a single number, got 'extras/t'; there are .*extras/time"
    ):
        write(tmp_path / "c.mcap", spec, episode, time="extras/t")


def test_text_trees_stacks_and_what_json_has_no_number_for(tmp_path: Path) -> None:
    for spec in (text_spec(), nested_spec()):
        episode = random_episode(spec, 4, 0)
        found = messages(write(tmp_path / f"{len(spec.columns)}.mcap", spec, episode))
        if "prompt" in spec.observation.flat:
            assert [message["value"] for _, message in found["/observation/prompt"]] == episode.observation["prompt"]
        else:
            assert len(found["/observation/cameras/front"]) == 5
            assert [message["value"] for _, message in found["/action/gripper"]] == episode.action["gripper"].tolist()
    spec = StepSpec(
        observation=Spec({"cam": ArraySpec(shape=(2, 8, 8, 1), dtype="uint8")}),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )
    frames = np.stack([np.zeros((8, 8, 1), np.uint8), np.full((8, 8, 1), 9, np.uint8)])
    step = Step(observation={"cam": frames}, action=np.array([np.nan, 1], np.float32), reward=0.0, truncated=True)
    found = messages(write(tmp_path / "c.mcap", spec, Episode.from_steps(spec, [step], {"cam": frames}), images="png"))
    assert (image(found["/observation/cam"][0][1]) == 9).all()
    assert found["/action"][0][1] == {"value": [None, 1.0]}


def test_compression_is_what_was_asked_for(tmp_path: Path) -> None:
    spec = small_spec()
    found = {}
    for how in ("zstd", "lz4", "none"):
        path = write(tmp_path / f"{how}.mcap", spec, random_episode(spec, 3, 0), compression=how)
        with path.open("rb") as file:
            found[how] = {chunk.compression for chunk in reader.make_reader(file).get_summary().chunk_indexes}
    assert found == {"zstd": {"zstd"}, "lz4": {"lz4"}, "none": {""}}


def test_the_notes_say_what_was_lost(tmp_path: Path) -> None:
    spec = StepSpec(
        observation=Spec({"stack": ArraySpec(shape=(2, 8, 8, 3), dtype="uint8")}),
        action=Spec(ArraySpec(shape=(3,), dtype="float32")),
    )
    episode = random_episode(spec, 4, 0)
    episode.action[1] = [np.nan, np.inf, 0.1]
    target: Any = FORMAT.write(tmp_path / "a.mcap", spec, {"images": "png"})
    stacks = "observation/stack: of stacked frames, only the newest is written"
    assert target.notes == (stacks,)
    target.add("a", episode)
    target.close()
    assert target.notes == (stacks, "action: NaN and infinity are written as null, and read back as NaN")


def read(path: Path, **options: str) -> tuple[StepSpec, list[Episode]]:
    source = FORMAT.read(path, options)
    return source.spec, [episode for _, episode in source.episodes()]


def test_what_is_lost_when_it_is_read_back_is_only_what_the_format_says(tmp_path: Path) -> None:
    spec = StepSpec(
        observation=Spec(
            {
                "stack": ArraySpec(shape=(2, 8, 8, 3), dtype="uint8"),
                "dim": ArraySpec(shape=(8, 8, 1), dtype="uint8", high=60),
            }
        ),
        action=Spec(ArraySpec(shape=(3,), dtype="float32")),
    )
    episode = random_episode(spec, 4, 0)
    episode.action[1] = [np.nan, np.inf, 0.1]
    exact_spec, (exact,) = read(write(tmp_path / "a.mcap", spec, episode, images="png"))
    assert exact_spec.observation.flat["stack"].shape == (8, 8, 3)
    np.testing.assert_array_equal(exact.observation["stack"], episode.observation["stack"][:, -1])
    np.testing.assert_array_equal(exact.observation["dim"], episode.observation["dim"])
    np.testing.assert_array_equal(exact.action[1], np.asarray([np.nan, np.nan, 0.1], np.float32))
    np.testing.assert_array_equal(exact.action[[0, 2, 3]], episode.action[[0, 2, 3]])
    assert exact.info == episode.info
    _, (lossy,) = read(write(tmp_path / "b.mcap", spec, episode, images="jpeg"))
    assert not np.array_equal(lossy.observation["dim"], episode.observation["dim"])
    assert lossy.observation["dim"].max() <= 60, "what JPEG adds stays within the bounds"


def test_with_options_our_own_file_is_read_like_any_recording(tmp_path: Path) -> None:
    spec = robot_spec(16)
    episode = random_episode(spec, 6, 0)
    path = write(tmp_path / "a.mcap", spec, episode, images="png", hz="20")
    _, (found,) = read(
        path,
        **{"action": "/action:value", "observation/state": "/observation/state:value", "tick": "/observation/state"},
    )
    assert list(found.observation) == ["state"]
    np.testing.assert_array_equal(found.observation["state"], episode.observation["state"].astype(np.float64))
    np.testing.assert_array_equal(found.action, episode.action.astype(np.float64))
    _, (cameras,) = read(path, action="/action:value")
    assert sorted(cameras.observation) == ["wrist_1", "wrist_2"]
    np.testing.assert_array_equal(cameras.observation["wrist_1"], episode.observation["wrist_1"])


def test_the_times_of_a_recording_are_those_of_its_export(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mcap", robot_spec(16), random_episode(robot_spec(16), 6, 0), hz="7")
    source = FORMAT.read(path, {"action": "/action:value"})
    (episode,) = (found for _, found in source.episodes())
    again = messages(write(tmp_path / "b.mcap", source.spec, episode))
    assert [time for time, _ in again["/step"]] == episode.extras["time"]["tick"].tolist()
    assert [time for time, _ in messages(path)["/observation/wrist_1"]][: len(episode)] == [
        t for t, _ in again["/step"]
    ]


def test_a_folder_of_files_with_other_fields_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", small_spec(), random_episode(small_spec(), 3, 0))
    write(folder / "z.mcap", nested_spec(), random_episode(nested_spec(), 3, 0))
    with pytest.raises(FormatError, match=r"z.mcap: has other fields than episode_000000.mcap; import it by itself"):
        read(folder)
    (folder / "metadata.yaml").write_text("")
    with pytest.raises(FormatError, match="is a ROS 2 bag, whose files belong together; read it as rosbag2:"):
        read(folder)


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="nothing to show"):
        write(tmp_path / "a.mcap", small_spec())
    target = FORMAT.write(tmp_path / "a.mcap", small_spec(), {})
    target.add("k", random_episode(small_spec(), 3, 0))
    assert not (tmp_path / "a.mcap").exists()
    target.abandon()
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a.mcap", small_spec(), random_episode(small_spec(), 3, 0))
    with pytest.raises(FormatError, match="already exists"):
        FORMAT.write(tmp_path / "a.mcap", small_spec(), {})
    with pytest.raises(FormatError, match="has no option 'colour'"):
        FORMAT.write(tmp_path / "b.mcap", small_spec(), {"colour": "red"})
