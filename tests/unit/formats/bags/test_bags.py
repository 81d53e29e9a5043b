"""MCAP files and ROS 2 bags that real libraries wrote: pixels and times are exact, and errors say what to do."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the extra `rosbag2` is not installed")
pytest.importorskip("mcap", reason="the extra `mcap` is not installed")

from PIL import Image
from rosbags.rosbag2 import CompressionMode, StoragePlugin
from tests.unit.formats.bags.recordings import (
    FRONT,
    JOINTS,
    LEADER,
    START,
    STATE,
    WRIST,
    Recording,
    Sent,
    compressed,
    header,
    joints,
    make,
    pixels,
    raw,
    robot,
    write_bag,
    write_mcap,
)
from tests.unit.formats.mutation import check

from understudy.cli import main
from understudy.core import Episode, Source
from understudy.formats import FormatError, NotedDataset, parse_dataset_path
from understudy.replay import Reader

ROBOT = robot()
FORMATS: dict[str, Callable[[Path, Any], Path]] = {
    "db3": lambda path, sent: write_bag(path / "bag", sent),
    "db3_file": lambda path, sent: write_bag(path / "bag", sent) / "bag.db3",
    "mcap_bag": lambda path, sent: write_bag(path / "bag", sent, StoragePlugin.MCAP),
    "mcap": lambda path, sent: write_mcap(path / "bag.mcap", sent),
    "mcap_without_index": lambda path, sent: write_mcap(path / "bag.mcap", sent, use_chunking=False),
}


def read(path: Path, **options: str) -> tuple[Any, dict[str, Episode]]:
    """The reader and its episodes; an option's `__` is a slash."""
    dataset = parse_dataset_path(str(path))
    source = dataset.format.read(dataset.path, {name.replace("__", "/"): value for name, value in options.items()})
    episodes = dict(source.episodes())
    for episode in episodes.values():
        check(source.spec, episode)
    return source, episodes


def unpacked(source: Any, episodes: dict[str, Episode]) -> tuple[Any, list[Episode]]:
    return source, list(episodes.values())


def only(path: Path, **options: str) -> Episode:
    (episode,) = read(path, **options)[1].values()
    return episode


def refused(path: Path, **options: str) -> str:
    with pytest.raises(FormatError) as raised:
        read(path, **options)
    text = str(raised.value)
    assert "\n" not in text
    return text


def sent(topic: str, times: list[int], message: Callable[[int], Any]) -> list[Sent]:
    return [Sent(topic, time, time, message(time), None) for time in times]


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", FORMATS)
@pytest.mark.parametrize("clock", ["log", "header"])
def test_each_row_has_the_latest_message_of_each_topic_and_its_exact_time(
    tmp_path: Path, written: str, clock: str
) -> None:
    path = FORMATS[written](tmp_path, ROBOT.sent)
    episode = only(path, action=f"{LEADER}:position", fps="20", stamp=clock)
    ticks = episode.extras["time"]["tick"]
    first = min(getattr(one, clock) for one in ROBOT.sent)
    ready = max(min(getattr(one, clock) for one in ROBOT.of(topic)) for topic in (WRIST, FRONT, STATE, LEADER))
    last = max(getattr(one, clock) for one in ROBOT.sent)
    wanted = [tick for k in range(30) if ready <= (tick := first + k * 50_000_000) <= last]
    assert ticks.tolist() == wanted[:-1]
    assert len(episode) == len(wanted) - 1 > 15
    times = episode.extras["time"]
    for row, tick in enumerate(wanted):
        wrist, front, state, leader = (ROBOT.latest(topic, tick, clock) for topic in (WRIST, FRONT, STATE, LEADER))
        np.testing.assert_array_equal(episode.observation["wrist"][row], wrist.value)
        np.testing.assert_array_equal(episode.observation["front"][row], front.value)
        np.testing.assert_array_equal(episode.observation["joint_states"]["position"][row], state.value[0])
        np.testing.assert_array_equal(episode.observation["joint_states"]["velocity"][row], state.value[1])
        if row < len(episode):
            np.testing.assert_array_equal(episode.action[row], leader.value)
            assert times["observation"]["wrist"][row] == getattr(wrist, clock)
            assert times["observation"]["front"][row] == getattr(front, clock)
            assert times["observation"]["joint_states"]["position"][row] == getattr(state, clock)
            assert times["action"][row] == getattr(leader, clock)
    assert times["observation"]["wrist"].dtype == np.int64
    assert "effort" not in episode.observation["joint_states"]
    assert episode.info.names["observation/joint_states/position"] == episode.info.names["action"] == JOINTS
    assert (episode.info.labels["fps"], episode.info.labels["stamp"]) == ("20", clock)
    assert episode.truncated.tolist() == [False] * (len(episode) - 1) + [True]


def test_a_row_for_each_message_of_a_topic_and_by_default_of_the_slowest_camera(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "bag.mcap", ROBOT.sent)
    for options, topic in (({}, FRONT), ({"tick": WRIST}, WRIST), ({"tick": LEADER}, LEADER)):
        episode = only(path, action=LEADER, **options)
        ready = ROBOT.of(FRONT)[0].log
        ticks = [one.log for one in ROBOT.of(topic) if one.log >= ready]
        assert episode.extras["time"]["tick"].tolist() == ticks[:-1]
    assert episode.info.labels["measured_fps"] == "50"
    assert "fps" not in episode.info.labels  # nobody has said it
    no_camera = write_mcap(tmp_path / "b.mcap", [*ROBOT.of(STATE), *ROBOT.of(LEADER)])
    assert len(only(no_camera, action=LEADER)) == len(ROBOT.of(LEADER)) - 1


def test_a_rate_does_not_drift(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "bag.mcap", ROBOT.sent)
    ticks = only(path, action=LEADER, fps="29.97").extras["time"]["tick"]
    first = ROBOT.sent[0].log
    assert ticks.tolist() == [first + k * 10**9 * 100 // 2997 for k in range(2, 2 + len(ticks))]


def test_the_action_may_be_the_joints_position_in_the_next_row(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "bag.mcap", [*ROBOT.of(STATE), *ROBOT.of(WRIST)])
    episode = only(path, action="next")
    np.testing.assert_array_equal(episode.action, episode.observation["joint_states"]["position"][1:])
    position = episode.extras["time"]["observation"]["joint_states"]["position"]
    assert episode.extras["time"]["action"][:-1].tolist() == position[1:].tolist()
    assert episode.info.names["action"] == JOINTS
    velocity = only(path, action="next:observation/joint_states/velocity")
    np.testing.assert_array_equal(velocity.action, velocity.observation["joint_states"]["velocity"][1:])
    text = refused(path, action="next:observation/joint_states/velocty")
    assert "no such field; did you mean 'observation/joint_states/velocity'?" in text
    both = write_mcap(tmp_path / "both.mcap", ROBOT.sent)
    text = refused(both, action="next")
    assert "there are observation/joint_states/position, observation/leader_joint_states/position" in text
    assert "name a field: action=next:observation/joint_states/position" in text


def test_messages_that_were_not_used_or_late_are_counted(tmp_path: Path) -> None:
    swapped = list(ROBOT.sent)
    numbers = [index for index, one in enumerate(swapped) if one.topic == WRIST]
    swapped[numbers[4]], swapped[numbers[5]] = swapped[numbers[5]], swapped[numbers[4]]
    path = write_mcap(tmp_path / "bag.mcap", swapped)
    source, (episode,) = unpacked(*read(path, action=LEADER, fps="10"))
    assert isinstance(source, NotedDataset)
    ticks = [*episode.extras["time"]["tick"].tolist(), ROBOT.sent[0].log + 900_000_000]
    used = {topic: {ROBOT.latest(topic, tick).log for tick in ticks} for topic in (WRIST, STATE)}
    notes = " ".join(source.notes)
    assert f"{WRIST}: 30 messages, {len(used[WRIST])} used, {30 - len(used[WRIST])} dropped" in notes
    assert f"{STATE}: 200 messages, {len(used[STATE])} used" in notes
    assert "dropped (no row needed them), 1 late" in notes
    assert "before every topic had had a message: 1" in notes
    oldest = max(tick - ROBOT.latest(STATE, tick).log for tick in ticks)
    assert f"0 late; the oldest in a row was {oldest / 1e6:.3f} ms old" in notes
    in_order = only(write_mcap(tmp_path / "in_order.mcap", ROBOT.sent), action=LEADER, fps="10")
    assert episode.equals(in_order)


@pytest.mark.parametrize("clock", ["log", "header"])
def test_all_messages_of_a_fast_topic_are_kept_with_their_times(tmp_path: Path, clock: str) -> None:
    swapped = list(ROBOT.sent)
    numbers = [index for index, one in enumerate(swapped) if one.topic == STATE]
    swapped[numbers[50]], swapped[numbers[51]] = swapped[numbers[51]], swapped[numbers[50]]
    path = write_mcap(tmp_path / "bag.mcap", swapped)
    source, (episode,) = unpacked(*read(path, action=LEADER, fps="20", stamp=clock, samples=f"{STATE},{LEADER}"))
    ticks = episode.extras["time"]["tick"].tolist()
    samples, times = episode.extras["samples"], episode.extras["samples_time"]
    positions = samples["observation"]["joint_states"]["position"]
    moments = times["observation"]["joint_states"]["position"]
    assert ROBOT.latest(STATE, ticks[0], clock).value[0].tolist() == positions[0][0].tolist()
    for row in range(1, len(episode)):
        between = [one for one in ROBOT.of(STATE) if ticks[row - 1] < getattr(one, clock) <= ticks[row]]
        between.sort(key=lambda one: getattr(one, clock))
        assert len(between) >= 9
        assert moments[row].tolist() == [getattr(one, clock) for one in between]
        assert positions[row].tolist() == [one.value[0].tolist() for one in between]
        assert positions[row][-1].tolist() == episode.observation["joint_states"]["position"][row].tolist()
    assert times["action"][3].tolist() == [
        getattr(one, clock) for one in ROBOT.of(LEADER) if ticks[2] < getattr(one, clock) <= ticks[3]
    ]
    assert set(samples["observation"]) == {"joint_states"}
    kept = sum(map(len, positions))
    (note,) = (note for note in source.notes if note.startswith(f"{STATE}:"))
    assert f"200 messages, {kept + 1} used" in note  # and that of the last observation
    assert "samples/observation/joint_states/position" in {
        field.internal.removeprefix("extras/") for field in source.mapping
    }
    assert (
        main(["import", str(path), str(tmp_path / "s"), "--options", f"action={LEADER}", "fps=20", f"samples={STATE}"])
        == 0
    )
    with Reader(tmp_path / "s") as reader:
        stored = reader.read(1).extras["samples"]["observation"]["joint_states"]["position"]
    if clock == "log":
        assert [one.tolist() for one in stored] == [one.tolist() for one in positions]


# --- episodes ---------------------------------------------------------------------------------------------------------


def test_a_pause_ends_an_episode_and_nothing_is_carried_over(tmp_path: Path) -> None:
    second = robot(0.5, seed=1, start=START + 60 * 10**9)
    path = write_bag(tmp_path / "bag", [*ROBOT.sent, *second.sent])
    assert len(read(path, action=LEADER)[1]) == 1
    source, episodes = read(path, action=LEADER, gap_s="2.5")
    assert list(episodes) == ["episode_000000", "episode_000001"]
    assert source.num_episodes is None
    early, late = episodes.values()
    assert early.equals(only(write_bag(tmp_path / "a", ROBOT.sent), action=LEADER))
    assert late.equals(only(write_bag(tmp_path / "b", second.sent), action=LEADER))


def test_a_topic_says_where_episodes_begin(tmp_path: Path) -> None:
    cuts = [START + 200_000_000, START + 500_000_000, START + 700_000_000]
    marks = sent("/mark", cuts, lambda time: make("std_msgs/Empty", structure_needs_at_least_one_member=0))
    states = [(START + 50_000_000, False), (cuts[0], True), (START + 300_000_000, True), (cuts[1], False)]
    flags = [Sent("/on", time, time, make("std_msgs/Bool", data=value), None) for time, value in states]
    numbers = [Sent("/n", time, time, make("std_msgs/Int32", data=index // 2), None) for index, time in enumerate(cuts)]
    texts = [Sent("/name", t, t, make("std_msgs/String", data=name), None) for t, name in zip(cuts, "aab", strict=True)]
    path = write_bag(tmp_path / "bag", [*ROBOT.sent, *marks, *flags, *numbers, *texts])

    def spans(**options: str) -> list[tuple[int, int]]:
        source, found = read(path, action=LEADER, tick=LEADER, **options)
        assert any("rows in no episode" in note for note in source.notes)
        return [(int(e.extras["time"]["tick"][0]), len(e) + 1) for e in found.values()]

    ticks = [one.log for one in ROBOT.of(LEADER)]

    def between(start: int, stop: int) -> tuple[int, int]:
        inside = [tick for tick in ticks if start <= tick < stop]
        return inside[0], len(inside)

    end = START + 10**10
    assert spans(episode="/mark") == [between(*pair) for pair in zip(cuts, [*cuts[1:], end], strict=True)]
    assert spans(episode="/on:data") == [between(cuts[0], cuts[1])]
    assert spans(episode="/n:data") == [between(cuts[0], cuts[2]), between(cuts[2], end)]
    assert spans(episode="/name:data") == [between(cuts[0], cuts[2]), between(cuts[2], end)]
    assert "episode=/on:date: the message has no field 'date'; did you mean 'data'?" in refused(
        path, action=LEADER, episode="/on:date"
    )


def test_a_directory_of_bags_has_an_episode_for_each(tmp_path: Path) -> None:
    for kind, suffix in (("bags", ""), ("files", ".mcap")):
        folder = tmp_path / kind
        folder.mkdir()
        for seed in (2, 10):
            (write_mcap if suffix else write_bag)(folder / f"take_{seed}{suffix}", robot(0.5, seed=seed).sent)
        source, episodes = read(folder, action=LEADER)
        assert list(episodes) == [f"take_{seed}{suffix}/episode_000000" for seed in (2, 10)]
        assert source.num_episodes == 2
        assert f"{LEADER}: 50 messages" in " ".join(source.notes)
    folder = tmp_path / "bags"
    looked_at = parse_dataset_path(f"{folder}?action={LEADER}")
    source = looked_at.format.read(looked_at.path, looked_at.options)
    shutil.rmtree(folder / "take_10")
    assert list(source.episodes(skip=("take_2/episode_000000", "take_10/episode_000000"))) == [], (
        "what is known is not read"
    )
    whole, metadata = (read(tmp_path / "bags" / "take_2" / name, action=LEADER)[1] for name in ("", "metadata.yaml"))
    assert whole["episode_000000"].equals(metadata["episode_000000"])
    lost = [one for one in robot(0.5, seed=3).sent if one.topic != FRONT]
    write_bag(tmp_path / "bags" / "take_11", lost)
    assert "take_11: has no topic /front/image_raw" in refused(tmp_path / "bags", action=LEADER)


# --- fields -----------------------------------------------------------------------------------------------------------


def test_fields_are_those_that_were_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times = [START + k * 10**7 for k in range(20)]
    poses = [rng.normal(size=7) for _ in times]

    def pose(values: Any, time: int) -> Any:
        point = make("geometry_msgs/Point", x=values[0], y=values[1], z=values[2])
        turn = make("geometry_msgs/Quaternion", x=values[3], y=values[4], z=values[5], w=values[6])
        inner = make("geometry_msgs/Pose", position=point, orientation=turn)
        return make("geometry_msgs/PoseStamped", header=header(time), pose=inner)

    layout = make("std_msgs/MultiArrayLayout", dim=[make("std_msgs/MultiArrayDimension", label="x", size=2, stride=2)],
                  data_offset=0)  # fmt: skip
    messages = [
        *[Sent("/tcp", t, t, pose(v, t), v) for t, v in zip(times, poses, strict=True)],
        *sent("/cmd", times, lambda t: make("std_msgs/Float32MultiArray", layout=layout,
                                            data=np.asarray([t % 1000, 0.1], np.float32))),
        *sent("/grip", times, lambda t: make("std_msgs/Int8", data=-3)),
        *sent("/text", times, lambda t: make("std_msgs/String", data="hello")),
    ]  # fmt: skip
    path = write_bag(tmp_path / "bag", messages)
    options = {"observation.tcp": "/tcp", "observation__x": "/tcp:pose.position.x", "extras__grip": "/grip:data"}
    source, (episode,) = unpacked(*read(path, **options, action__arm="/cmd:data", action__second="/cmd:data.1"))
    np.testing.assert_array_equal(episode.observation["tcp"], np.stack(poses))
    np.testing.assert_array_equal(episode.observation["x"], np.stack(poses)[:, 0])
    assert episode.observation["x"].shape == (20,)
    assert episode.info.names["observation/tcp"][:4] == (
        "pose.position.x", "pose.position.y", "pose.position.z", "pose.orientation.x",
    )  # fmt: skip
    assert (episode.extras["grip"].dtype, episode.extras["grip"][0]) == (np.int8, -3)
    assert (episode.action["arm"].dtype, episode.action["arm"].shape) == (np.float32, (19, 2))
    assert episode.action["second"].tolist() == [np.float32(0.1)] * 19
    assert {line.internal: line.external for line in source.mapping}["observation/x"] == "/tcp:pose.position.x"
    assert any(line.external == "/text" and "left out" in line.how for line in source.mapping)
    given = {"action": "/cmd:data"}
    assert "the message: layout.dim.0.label is text; name a field of numbers, of layout, data" in refused(
        path, observation__x="/cmd", **given
    )
    assert "data: is text" in refused(path, observation__x="/text:data", **given)
    assert "pose.position has no field 'a'; it has x, y, z" in refused(
        path, observation__x="/tcp:pose.position.a", **given
    )
    assert "did you mean 'position'?" in refused(path, observation__x="/tcp:pose.positon.x", **given)
    assert "has no camera and no joints, so give observation/NAME=/topic:field" in refused(path, **given)


@pytest.mark.parametrize("bigendian", [0, 1])
@pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "mono8", "16UC1", "mono16", "32FC1"])
def test_raw_images_are_exact_also_with_padded_rows(tmp_path: Path, encoding: str, bigendian: int) -> None:
    rng = np.random.default_rng(1)
    dtype = {"16UC1": "u2", "mono16": "u2", "32FC1": "f4"}.get(encoding, "u1")
    channels = 3 if encoding in ("rgb8", "bgr8") else 1
    images = [rng.integers(0, 200, (5, 7, channels)).astype(dtype) * 3 for _ in range(4)]
    found = []
    for index, image in enumerate(images):
        stored = image[..., ::-1] if encoding == "bgr8" else image
        rows = np.ascontiguousarray(stored.astype((">" if bigendian else "<") + dtype)).view(np.uint8).reshape(5, -1)
        padded = np.pad(rows, ((0, 0), (0, 9)), constant_values=7)
        time = START + index * 10**8
        message = raw(padded.ravel(), time, encoding, height=5, width=7, step=padded.shape[1], bigendian=bigendian)
        found.append(Sent("/cam/image_raw", time, time, message, image))
    path = write_mcap(tmp_path / "bag.mcap", [*found, *ROBOT.of(LEADER)])
    episode = only(path, action=LEADER, tick="/cam/image_raw")
    np.testing.assert_array_equal(episode.observation["cam"], np.stack(images)[1:])
    assert episode.observation["cam"].dtype == np.dtype(dtype)


def test_compressed_images_are_those_that_pillow_decodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    depth = rng.integers(0, 60000, (6, 8)).astype(np.uint16)
    messages = []
    for index in range(4):
        time = START + index * 10**8
        grey, colour = pixels(rng, 9, 11, 1), pixels(rng, 16, 16)
        out = io.BytesIO()
        Image.fromarray(depth + index).save(out, "png")
        data = np.frombuffer(out.getvalue(), np.uint8)
        deep = make("sensor_msgs/CompressedImage", header=header(time), format="16UC1; png compressed", data=data)
        jpeg = compressed(colour, time, "jpeg")
        decoded = np.asarray(Image.open(io.BytesIO(jpeg.data.tobytes())))
        jpeg = replace(jpeg, format="rgb8; jpeg compressed bgr8")
        messages += [
            Sent("/grey/image/compressed", time, time, compressed(grey, time), grey),
            Sent("/colour/compressed", time, time, jpeg, decoded),
            Sent("/deep", time, time, deep, (depth + index)[..., None]),
        ]
    recording = Recording(sent=[*messages, *ROBOT.of(LEADER)])
    episode = only(write_mcap(tmp_path / "bag.mcap", recording.sent), action=LEADER, tick="/deep")
    for name, topic in (("grey", "/grey/image/compressed"), ("colour", "/colour/compressed"), ("deep", "/deep")):
        wanted = [one.value for one in recording.of(topic)][1:]
        np.testing.assert_array_equal(episode.observation[name], np.stack(wanted))
    assert episode.observation["deep"].dtype == np.uint16


def test_a_camera_that_was_recorded_raw_and_compressed_is_read_once(tmp_path: Path) -> None:
    again = "/front/image_raw/compressed"
    copies = [one._replace(topic=again, message=compressed(one.value, one.log)) for one in ROBOT.of(FRONT)]
    source, (episode,) = unpacked(*read(write_bag(tmp_path / "bag", [*ROBOT.sent, *copies]), action=LEADER))
    assert sorted(episode.observation) == ["front", "joint_states", "wrist"]
    left_out = {line.external: line.how for line in source.mapping if not line.internal}
    assert left_out[again] == "left out: /front/image_raw is the same camera"


def test_topics_whose_names_would_be_one_field_become_two(tmp_path: Path) -> None:
    arm = [one._replace(topic="/arm") for one in ROBOT.of(STATE)]
    camera = [one._replace(topic="/arm/image_raw") for one in ROBOT.of(FRONT)]
    source, _ = read(write_mcap(tmp_path / "bag.mcap", [*arm, *camera, *ROBOT.of(LEADER)]), action=LEADER)
    fields = {line.internal: line.external for line in source.mapping}
    assert fields["observation/arm/position"] == "/arm:position"
    assert fields["observation/arm_"] == "/arm/image_raw"


def test_joints_in_another_order_are_put_in_order_and_others_refused(tmp_path: Path) -> None:
    times = [START + k * 10**8 for k in range(4)]
    turned = [
        Sent(
            "/joints",
            t,
            t,
            joints([3, 1, 2] if k % 2 else [1, 2, 3], t, ["c", "a", "b"] if k % 2 else ["a", "b", "c"]),
            None,
        )
        for k, t in enumerate(times)
    ]
    episode = only(write_bag(tmp_path / "a", turned), action="next")
    assert episode.observation["joints"]["position"].tolist() == [[1, 2, 3]] * 4
    gripper = Sent("/joints", START + 150_000_000, 0, joints([0.5], START, ["finger"]), None)
    text = refused(write_bag(tmp_path / "b", [*turned, gripper]), action="next", fps="20")
    assert "/joints:position: expected a, b, c as in the first message, got finger; record each publisher" in text


def test_task_and_source_are_those_of_the_options(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "bag.mcap", ROBOT.sent)
    episode = only(path, action=LEADER, task="pick the cube", source="policy")
    assert (episode.info.task, episode.info.instruction) == ("pick the cube", "pick the cube")
    assert (episode.info.kind, set(episode.source.tolist())) == ("practice", {Source.POLICY})
    assert only(path, action=LEADER).info.kind == "demonstration"


def test_floats_are_rounded_only_if_asked(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "bag.mcap", ROBOT.sent)
    exact, rounded = only(path, action=LEADER), only(path, action=LEADER, floats="float32")
    assert (exact.action.dtype, rounded.action.dtype) == (np.float64, np.float32)
    np.testing.assert_array_equal(rounded.action, exact.action.astype(np.float32))
    np.testing.assert_array_equal(rounded.extras["time"]["action"], exact.extras["time"]["action"])
    assert "expected floats=keep|float32" in refused(path, action=LEADER, floats="float16")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    path = write_bag(tmp_path / "bag", ROBOT.sent)
    text = refused(path, action="/leader/joint_state:position")
    assert f"{path}: has no topic /leader/joint_state; did you mean '{LEADER}'? It has " in text
    assert f"{WRIST} (sensor_msgs/msg/CompressedImage, 30 messages)" in text
    text = refused(path)
    assert "no topic is named as the action; give action=/topic:field, or action=next" in text
    assert f"{STATE} (sensor_msgs/msg/JointState, 200 messages)" in text
    for options, wanted in (
        ({"fps": "0"}, "expected fps= a number above 0, got '0'"),
        ({"fps": "20", "tick": WRIST}, "expected fps= or tick=, got both"),
        ({"tick": "/wrist"}, "has no topic /wrist"),
        ({"stamp": "publish"}, "expected stamp=log|header, got 'publish'"),
        ({"gap_s": "x"}, "expected gap_s= a number above 0, got 'x'"),
        ({"observation__": WRIST}, "give the field a name"),
        ({"observation__a": WRIST, "observation__a__b": FRONT}, "is a field and has fields below"),
        ({"extras__time": "/joint_states:position"}, "is taken by the times"),
        ({"extras__samples__a": "/joint_states:position"}, "is taken by the times"),
        ({"samples": WRIST}, "expected a topic of numbers that a field is made of, got a camera"),
        ({"samples": STATE, "observation__a": WRIST}, "that a field is made of, got another; name a field of it"),
        ({"samples": "/joint_state"}, "did you mean '/joint_states'?"),
        ({"observation__a": ""}, "expected observation/a=/topic or /topic:field"),
        ({"source": "me"}, "expected source=policy|human|script|random"),
        ({"fsp": "20"}, "has no option 'fsp'; did you mean 'fps'?"),
        ({"observation__a": f"{LEADER}:velocity"}, "is empty in the first message; leave observation/a out"),
    ):
        assert wanted in refused(path, action=LEADER, **options)


def test_times_that_cannot_be_are_refused(tmp_path: Path) -> None:
    times = [START + k * 10**8 for k in range(4)]
    numbers = sent("/n", times, lambda t: make("std_msgs/Int8", data=1))
    path = write_bag(tmp_path / "bag", [*ROBOT.sent, *numbers])
    text = refused(path, action="/n:data", stamp="header")
    assert "/n: its messages have no header, so stamp=header has no time for them; use stamp=log" in text
    unset = [one._replace(message=replace(one.message, header=header(0))) for one in ROBOT.of(LEADER)[:1]]
    path = write_bag(tmp_path / "unset", [*ROBOT.sent, *unset])
    text = refused(path, action=LEADER, stamp="header", fps="30")
    assert "its messages span 472,222.2 hours, which are more than 5,000,000 rows; if a topic has wrong times" in text


def test_an_episode_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    message = compressed(np.zeros((2000, 2000, 3), np.uint8), START)
    times = [START, START + 10**9]
    path = write_mcap(tmp_path / "bag.mcap", [*sent("/cam", times, lambda time: message), *ROBOT.of(LEADER)])
    text = refused(path, action=LEADER, fps="1000000")
    assert "an episode of 9" in text
    assert "rows takes 11,9" in text
    assert "GB of memory; give a lower fps=, name fewer cameras, or split it by gap_s= or episode=" in text


def test_an_image_that_cannot_be_read_names_its_topic(tmp_path: Path) -> None:
    def with_camera(name: str, message: Any) -> Path:
        return write_bag(tmp_path / name, [Sent("/cam", START, START, message, None), *ROBOT.of(LEADER)])

    data = np.zeros(12, np.uint8)
    bayer = raw(data, START, "bayer_rggb8", height=3, width=4, step=4)
    assert "/cam: its images are 'bayer_rggb8', and rgb8, bgr8, mono8" in refused(
        with_camera("a", bayer), action=LEADER
    )
    short = raw(data, START, "rgb8", height=3, width=4, step=12)
    assert "/cam: an image of 4 x 3 pixels (rgb8) has 12 bytes" in refused(with_camera("b", short), action=LEADER)
    no_jpeg = make("sensor_msgs/CompressedImage", header=header(START), format="jpeg", data=data)
    assert "/cam: an image ('jpeg') is neither a JPEG nor a PNG" in refused(with_camera("c", no_jpeg), action=LEADER)
    deep = make("sensor_msgs/CompressedImage", header=header(START), format="16UC1; compressedDepth png", data=data)
    assert "take the topic of the raw depth" in refused(with_camera("d", deep), action=LEADER)
    size = [
        Sent("/cam", START + k * 10**7, 0, compressed(np.zeros((8, 8 + k, 3), np.uint8), START), None) for k in range(3)
    ]
    text = refused(write_bag(tmp_path / "e", [*size, *ROBOT.of(LEADER)]), action=LEADER, fps="100")
    assert "/cam: expected uint8 [8, 8, 3] as in the first message, got uint8 [8, 9, 3]" in text


def test_empty_truncated_and_missing_bags(tmp_path: Path) -> None:
    empty = write_bag(tmp_path / "empty", [])
    assert f"{empty}: holds no messages; the recording is empty" in refused(empty, action="next")
    empty = write_mcap(tmp_path / "empty.mcap", [])
    assert "holds no messages" in refused(empty, action="next")
    (tmp_path / "zero.mcap").write_bytes(b"")
    assert "zero.mcap: is empty; the recording did not write anything" in refused(tmp_path / "zero.mcap", action="next")
    whole = write_mcap(tmp_path / "whole.mcap", ROBOT.sent).read_bytes()
    cut = tmp_path / "cut.mcap"
    for share in (0.01, 0.5, 0.999):
        cut.write_bytes(whole[: int(len(whole) * share)])
        assert "it is damaged or was cut off; `mcap recover` may save what is there" in refused(cut, action="next")
    bag = write_bag(tmp_path / "bag", ROBOT.sent)
    data = (bag / "bag.db3").read_bytes()
    for share in (0.1, 0.5, 0.9):
        (bag / "bag.db3").write_bytes(data[: int(len(data) * share)])
        assert "it is damaged or was cut off; `ros2 bag reindex` may repair it" in refused(bag, action=LEADER)
    (bag / "bag.db3").unlink()
    assert "bag.db3: is missing, though metadata.yaml lists it; fetch the whole bag" in refused(bag, action=LEADER)
    (bag / "bag.db3").write_bytes(data)
    (bag / "metadata.yaml").write_text("rosbag2_bagfile_information: [")
    assert "metadata.yaml" in refused(bag, action=LEADER)
    (bag / "metadata.yaml").unlink()
    assert (
        "has no metadata.yaml, which a ROS 2 bag has; give the .db3 file itself, or run `ros2 bag reindex`"
        in refused(bag, action=LEADER)
    )


def test_a_bag_of_ros_1_and_joints_without_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.bag").write_bytes(b"#ROSBAG V2.0\n")
    assert "is a bag of ROS 1; make a ROS 2 bag of it with `rosbags-convert --src" in refused(tmp_path / "old.bag")
    empty = sent("/empty", [START], lambda time: joints([], time, []))
    path = write_bag(tmp_path / "bag", [*ROBOT.sent, *empty])
    text = refused(path, action="/empty")
    assert "/empty: its first message has no positions of joints; leave action out" in text
    source, _ = read(path, action=LEADER)
    left_out = {line.external: line.how for line in source.mapping if not line.internal}
    assert left_out == {"/empty": "left out: its first message has no joints"}


def test_the_files_of_a_bag_count_and_not_what_its_metadata_says_of_them(tmp_path: Path) -> None:
    whole = only(write_bag(tmp_path / "whole", ROBOT.sent), action=LEADER)
    half = len(ROBOT.sent) // 2
    bag, rest = write_bag(tmp_path / "bag", ROBOT.sent[:half]), write_bag(tmp_path / "rest", ROBOT.sent[half:])
    (rest / "rest.db3").rename(bag / "rest.db3")
    text = (bag / "metadata.yaml").read_text()
    split = text.replace("  - bag.db3\n", "  - bag.db3\n  - rest.db3\n")
    assert split != text
    (bag / "metadata.yaml").write_text(split)
    assert only(bag, action=LEADER).equals(whole)
    other = split.replace("offered_qos_profiles: []", "offered_qos_profiles: [{depth: 3}]")
    assert other != split
    (bag / "metadata.yaml").write_text(other)
    assert only(bag, action=LEADER).equals(whole)
    (bag / "metadata.yaml").write_text(split.replace("  relative_file_paths:\n  - bag.db3\n  - rest.db3\n", ""))
    assert "metadata.yaml: lists no files (relative_file_paths); run `ros2 bag reindex`" in refused(bag, action=LEADER)
    lz4 = split.replace("compression_format: ''", "compression_format: lz4")
    (bag / "metadata.yaml").write_text(lz4.replace("compression_mode: ''", "compression_mode: FILE"))
    assert "is compressed as 'lz4', and only zstd is read" in refused(bag, action=LEADER)


def test_what_a_killed_recorder_left_in_its_log_is_read(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / "bag", ROBOT.sent)
    wanted = only(bag, action=LEADER)
    copy = tmp_path / "copy"
    database = sqlite3.connect(bag / "bag.db3")
    try:
        database.execute("pragma journal_mode = wal")
        database.execute("pragma wal_autocheckpoint = 0")
        database.execute("insert into messages select null, topic_id, timestamp + 3000000000, data from messages")
        database.commit()
        shutil.copytree(bag, copy)
    finally:
        database.close()
    assert (copy / "bag.db3-wal").stat().st_size
    assert len(only(copy, action=LEADER)) > len(wanted)


def test_a_message_type_without_a_definition_is_refused_and_one_of_ros_is_known(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / "bag", ROBOT.sent)
    wanted = only(bag, action=LEADER)
    with closing(sqlite3.connect(bag / "bag.db3")) as database, database:  # as bags before ROS 2 Iron are
        database.execute("delete from message_definitions")
        database.execute("update schema set schema_version = 3")
    assert only(bag, action=LEADER).equals(wanted)
    with closing(sqlite3.connect(bag / "bag.db3")) as database, database:
        database.execute("update topics set type = 'my_robot/msg/State' where name = ?", (LEADER,))
    text = (bag / "metadata.yaml").read_text().split("name: /leader")
    (bag / "metadata.yaml").write_text(
        "name: /leader".join([text[0], text[1].replace("sensor_msgs/msg/JointState", "my_robot/msg/State", 1)])
    )
    text = refused(bag, action=f"{LEADER}:position")
    assert f"{LEADER}: its message type my_robot/msg/State is unknown: the bag has no definition of it" in text


def test_definitions_that_are_no_definitions_are_not_run(tmp_path: Path) -> None:
    from mcap.writer import Writer as McapWriter

    evil = tmp_path / "evil"
    names = ["x/msg/Y:\n  pass\nopen('evil','w')\nclass Z", "x/msg/Y"]
    texts = ["float64 a", f"float64 a=open({str(evil)!r},'w')"]
    for number, (name, text) in enumerate(zip(names, texts, strict=True)):
        path = tmp_path / f"{number}.mcap"
        with path.open("wb") as file:
            writer = McapWriter(file)
            writer.start(profile="ros2")
            schema = writer.register_schema(name=name, encoding="ros2msg", data=text.encode())
            channel = writer.register_channel(topic="/t", message_encoding="cdr", schema_id=schema)
            writer.add_message(channel_id=channel, log_time=1, publish_time=1, data=b"\0\1\0\0" + bytes(8))
            writer.finish()
        with pytest.raises(FormatError):
            read(path, observation__x="/t:a", action="/t:a")
        assert not evil.exists()


def test_other_encodings_than_cdr_and_json_are_refused(tmp_path: Path) -> None:
    from mcap.writer import Writer as McapWriter

    path = tmp_path / "a.mcap"
    with path.open("wb") as file:
        writer = McapWriter(file)
        writer.start()
        schema = writer.register_schema(name="foxglove.Pose", encoding="protobuf", data=b"\x0a")
        channel = writer.register_channel(topic="/t", message_encoding="protobuf", schema_id=schema)
        writer.add_message(channel_id=channel, log_time=1, publish_time=1, data=b"")
        writer.finish()
    text = refused(path, observation__x="/t", action="/t")
    assert "/t: its messages (foxglove.Pose) are protobuf, and only cdr (ROS 2) and json are read" in text


def test_a_definition_in_idl_is_read_and_several_publishers_are_one_topic(tmp_path: Path) -> None:
    from mcap.writer import Writer as McapWriter

    line = "=" * 80 + "\n"
    pair = "module my { module msg { struct Pair { my::msg::One one; float b; }; }; };\n"
    one = "module my { module msg { struct One { double a; }; }; };\n"
    text = f"{line}IDL: my/msg/Pair\n{pair}{line}IDL: my/msg/One\n{one}"
    for types in (("my/msg/Pair", "my/msg/Pair"), ("my/msg/Pair", "my/msg/Other")):
        path = tmp_path / f"{types[1][7:]}.mcap"
        with path.open("wb") as file:
            writer = McapWriter(file)
            writer.start(profile="ros2")
            schemas = [writer.register_schema(name=n, encoding="ros2idl", data=text.encode()) for n in types]
            channels = [writer.register_channel(topic="/t", message_encoding="cdr", schema_id=s) for s in schemas]
            for index in range(6):
                data = b"\0\1\0\0" + np.float64(index).tobytes() + np.float32(0.1).tobytes()
                writer.add_message(channel_id=channels[index % 2], log_time=index, publish_time=0, data=data)
            writer.finish()
    episode = only(tmp_path / "Pair.mcap", observation__a="/t:one.a", action="/t:b")
    assert episode.observation["a"].tolist() == list(range(6))
    assert (episode.action.dtype, episode.action[0]) == (np.float32, np.float32(0.1))
    assert "the messages of /t have the types my/msg/Pair (cdr) and my/msg/Other (cdr)" in refused(
        tmp_path / "Other.mcap", observation__a="/t:one.a", action="/t:b"
    )


def test_the_first_episode_is_decoded_once_for_an_import_that_looks_at_it_first(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "bag.mcap", ROBOT.sent)
    dataset = parse_dataset_path(f"{path}?action={LEADER}")
    source = dataset.format.read(dataset.path, dataset.options)
    looking: Any = source.episodes()
    _, first = next(looking)
    looking.close()
    (again,) = (episode for _, episode in source.episodes())
    assert again is first
    (third,) = (episode for _, episode in source.episodes())
    assert third is not first
    assert third.equals(first)
    looking = source.episodes()
    next(looking)
    looking.close()
    assert list(source.episodes(skip=("episode_000000",))) == []


def test_json_messages_of_others_are_read(tmp_path: Path) -> None:
    from mcap.writer import Writer as McapWriter

    path = tmp_path / "a.mcap"
    with path.open("wb") as file:
        writer = McapWriter(file)
        writer.start()
        schema = writer.register_schema(name="my.State", encoding="jsonschema", data=b"{}")
        channel = writer.register_channel(topic="/t", message_encoding="json", schema_id=schema)
        for index in range(5):
            stamp = {"sec": 7, "nsec": index}
            message = {"timestamp": stamp, "arm": {"q": [index, 0.5], "on": True}, "tip": {"x": None}, "note": "a"}
            writer.add_message(channel_id=channel, log_time=index, publish_time=0, data=json.dumps(message).encode())
        writer.finish()
    episode = only(path, observation__q="/t:arm.q", observation__x="/t:tip.x", action="/t:arm.on", stamp="header")
    assert episode.observation["q"].tolist() == [[index, 0.5] for index in range(5)]
    assert np.isnan(episode.observation["x"]).all()
    assert episode.action.tolist() == [True] * 4
    assert episode.extras["time"]["tick"].tolist() == [7 * 10**9 + index for index in range(4)]
    assert "the message: note is text" in refused(path, observation__x="/t", action="/t:arm.on")


@pytest.mark.parametrize("mode", [CompressionMode.FILE, CompressionMode.MESSAGE])
def test_compressed_bags_are_read(tmp_path: Path, mode: CompressionMode) -> None:
    wanted = only(write_bag(tmp_path / "plain", ROBOT.sent), action=LEADER)
    assert only(write_bag(tmp_path / "bag", ROBOT.sent, compression=mode), action=LEADER).equals(wanted)


@pytest.mark.parametrize("num", ["20", pytest.param("600", marks=pytest.mark.nightly)])
def test_damage_is_refused(num: str) -> None:
    """In a process of its own, which may not crash, hang, or take much memory."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "benchmarks/mutate.py", "--only", "bags", "--num", num],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_imports_a_bag_and_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_bag(tmp_path / "bag", ROBOT.sent)
    given = ["import", str(path), str(tmp_path / "store"), "--options", f"action={LEADER}:position", "fps=20"]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "1 episodes imported (18 steps)" in said
    assert f"{STATE}: 200 messages, 19 used, 181 dropped (no row needed them), 0 late" in said
    with Reader(tmp_path / "store") as store:
        (record,) = store.episodes()
        episode = store.read(record.id)
        assert record.info.labels["origin"].startswith("rosbag2:bag@")
    direct = only(path, action=f"{LEADER}:position", fps="20")
    assert all(np.array_equal(column, direct.columns()[name]) for name, column in episode.columns().items())
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "1 were in the store already" in said
    assert "messages" not in said, "nothing was read, so nothing was left out"
    query = f"{path}?action={LEADER}:position&fps=20"
    assert main(["import", query, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "rosbag2, 1 episodes" in said
    assert "bgr8, decoded" in said
    assert main(["import", query, str(tmp_path / "store"), "--options", "fps=10"]) == 1
    assert "fps is given twice" in capsys.readouterr().err
    assert main(["import", query, str(tmp_path / "store"), "--options", "fps"]) == 1
    assert "expected NAME=VALUE, got 'fps'" in capsys.readouterr().err
