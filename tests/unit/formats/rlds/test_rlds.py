"""RLDS: its options, its semantics, and files made to hurt."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import threading
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from PIL import Image
from tests.unit.formats.mutation import read_all

from understudy.core import Episode, Source, StepSpec
from understudy.core.examples import CANONICAL, random_episode, robot_spec, small_spec
from understudy.formats import DatasetReader, FormatError, find_format
from understudy.formats.rlds import read_rlds
from understudy.formats.rlds.example import Malformed, parse, serialize
from understudy.formats.rlds.features import Leaf, features_json
from understudy.formats.rlds.images import encode_image
from understudy.formats.rlds.records import read_records, write_records

SCALAR = {"reward": "float32", "discount": "float32", "is_first": "bool", "is_last": "bool", "is_terminal": "bool"}


def written(dataset_dir: Path, spec: StepSpec, episodes: list[Episode], **options: str) -> Path:
    target = find_format("rlds").write(dataset_dir, spec, options)
    for number, episode in enumerate(episodes):
        target.add(str(number), episode)
    target.close()
    return dataset_dir


def opened(dataset_dir: Path, **options: str) -> DatasetReader:
    return find_format("rlds").read(dataset_dir, options)


def foreign(
    dataset_dir: Path,
    episodes: list[dict[str, Any]],
    features: dict[str, Leaf] | None = None,
    *,
    lengths: list[int] | None = None,
) -> Path:
    """A dataset as somebody else would have made it: each episode is what its Example holds."""
    dataset_dir.mkdir(parents=True)
    number = Leaf(kind="tensor", shape=(2,), dtype="float32")
    leaves = {name: Leaf(kind="tensor", dtype=dtype) for name, dtype in SCALAR.items()}
    content = features_json({"observation": number, "action": number, **leaves, **(features or {})}, {})
    (dataset_dir / "features.json").write_text(json.dumps(content))
    split = {"name": "train", "shardLengths": [str(n) for n in lengths or [len(episodes)]]}
    (dataset_dir / "dataset_info.json").write_text(
        json.dumps({"name": "foreign", "version": "1.0.0", "splits": [split]})
    )
    writer = write_records(dataset_dir / "foreign-train.tfrecord-00000-of-00001", "tfrecord")
    for episode in episodes:
        writer.write(serialize({f"steps/{name}": value for name, value in episode.items()}))
    writer.close()
    return dataset_dir


def rows(count: int = 3, **others: Any) -> dict[str, Any]:
    at = np.arange(count)
    return {
        "observation": np.arange(2 * count, dtype=np.float32),
        "action": -np.arange(2 * count, dtype=np.float32),
        "reward": np.linspace(0, 1, count, dtype=np.float32),
        "discount": np.ones(count, np.float32),
        "is_first": (at == 0).astype(np.int64),
        "is_last": (at == count - 1).astype(np.int64),
        "is_terminal": np.zeros(count, np.int64),
        **others,
    }


# ---- what rows mean


def test_the_last_row_is_an_observation_or_a_step(tmp_path: Path) -> None:
    dataset_dir = foreign(tmp_path / "data", [rows()])
    ((_, episode),) = opened(dataset_dir).episodes()
    assert (len(episode), episode.reward.tolist(), episode.truncated.tolist()) == (2, [0, 0.5], [False, True])
    ((_, every),) = opened(dataset_dir, last="step").episodes()
    assert (len(every), every.reward.tolist(), every.truncated.tolist()) == (3, [0, 0.5, 1], [False, False, True])
    assert every.observation.tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]


def test_a_reward_that_would_be_left_out_is_pointed_at(tmp_path: Path) -> None:
    (line,) = (line for line in opened(foreign(tmp_path / "a", [rows()])).mapping if line.internal == "reward")
    assert line.how == "as it is; the last row's is left out, and the first episode's is 1: see the option `last`"
    (line,) = (line for line in opened(tmp_path / "a", last="step").mapping if line.internal == "reward")
    assert line.how == "as it is"
    quiet = foreign(tmp_path / "b", [rows(reward=np.zeros(3, np.float32))])
    (line,) = (line for line in opened(quiet).mapping if line.internal == "reward")
    assert line.how == "as it is"


def test_an_episode_that_was_never_ended(tmp_path: Path) -> None:
    ((_, episode),) = opened(foreign(tmp_path / "data", [rows(is_last=np.zeros(3, np.int64))])).episodes()
    assert not episode.terminated.any()
    assert not episode.truncated.any()
    again = written(tmp_path / "again", small_spec(), [unended := random_unended()])
    ((_, back),) = opened(again).episodes()
    assert back.equals(unended)


def random_unended() -> Episode:
    episode = random_episode(small_spec(), 4, 1)
    episode.terminated[-1] = False
    return episode


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"is_terminal": np.array([0, 1, 0])}, "steps/is_terminal: row 1 of 3 is set, and more rows follow"),
        ({"is_last": np.array([0, 1, 1])}, "steps/is_last: row 1 of 3 is set, and more rows follow"),
        ({"is_first": np.array([1, 0, 1])}, "steps/is_first: row 2 is set, so these are two episodes"),
        ({"is_first": np.array([1, 0, 2])}, "steps/is_first: holds numbers other than 0 and 1"),
        ({"reward": np.array([0, np.nan, 0], np.float32)}, "steps/reward: is not finite"),
        ({"reward": np.array([0, 1], np.float32)}, "its fields have different numbers of rows"),
        ({"reward": np.array([0, 1, 2])}, "steps/reward: holds whole numbers where float32 is wanted"),
        ({"action": np.zeros(7, np.float32)}, "steps/action: has 7 numbers, and 3 rows of float32 .2. are 6"),
        ({"action": [b"a", b"b", b"c"]}, "steps/action: holds bytes where numbers are wanted"),
    ],
)
def test_rows_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    dataset_dir = foreign(tmp_path / "data", [rows(reward=np.zeros(3, np.float32)), rows(**change)])
    found = opened(dataset_dir).episodes()
    next(found)
    with pytest.raises(FormatError, match=f"foreign-train.*record 1: {text}"):
        next(found)


def test_a_missing_reward_or_flag_is_made_up(tmp_path: Path) -> None:
    dataset_dir = foreign(tmp_path / "data", [rows()])
    content = json.loads((dataset_dir / "features.json").read_text())
    steps = content["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    for name in ("reward", "discount", "is_first", "is_last", "is_terminal"):
        del steps[name]
    (dataset_dir / "features.json").write_text(json.dumps(content))
    source = opened(dataset_dir)
    ((_, episode),) = source.episodes()
    assert episode.reward.tolist() == [0, 0]
    assert episode.truncated.tolist() == [False, True]
    assert {line.internal: line.how for line in source.mapping}["reward"] == "0.0: there is none"
    del steps["action"]
    (dataset_dir / "features.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match="its steps have no action that can be read; they have observation"):
        opened(dataset_dir)


def test_who_acted(tmp_path: Path) -> None:
    human = {"is_human": Leaf(kind="tensor", dtype="bool")}
    dataset_dir = foreign(tmp_path / "data", [rows(is_human=np.array([0, 1, 0]))], human)
    ((_, episode),) = opened(dataset_dir).episodes()
    assert episode.source.tolist() == [Source.POLICY, Source.HUMAN]
    ((_, episode),) = opened(dataset_dir, source="script").episodes()
    assert episode.source.tolist() == [Source.SCRIPT, Source.HUMAN]


def test_pictures_without_a_size_have_that_of_the_first(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)
    camera = {"observation": Leaf(kind="image", shape=(None, None, 3), dtype="uint8", encoding="png")}
    small = encode_image(image[:3], "png")
    whole = [encode_image(image, "png")] * 3
    dataset_dir = foreign(tmp_path / "data", [rows(observation=whole), rows(observation=[*whole[:2], small])], camera)
    source = opened(dataset_dir)
    assert source.spec.observation.flat[""].shape == (5, 4, 3)
    found = source.episodes()
    np.testing.assert_array_equal(next(found)[1].observation, np.stack([image] * 3))
    with pytest.raises(FormatError, match="record 1: an image has 3x4 pixels and not 5x4"):
        next(found)


def test_kinds_of_fields_that_are_rare(tmp_path: Path) -> None:
    """Text as a tensor, half-length floats, sequences of a fixed length, single values that may be missing."""
    features = {
        "said": Leaf(kind="tensor", dtype="string"),
        "brief": Leaf(kind="tensor", shape=(2,), dtype="bfloat16"),
        "packed": Leaf(kind="tensor", shape=(2,), dtype="bfloat16", encoding="bytes"),
        "pairs": Leaf(kind="tensor", dtype="int64", sequences=(2,)),
        "same": Leaf(kind="tensor", shape=(None, 2), dtype="int32"),
    }
    upper = np.array([1.5, -2], np.float32).view(np.uint32) >> 16
    episode = rows(
        said=["é".encode(), b"", b"b"],
        brief=np.array([1.5, -2] * 3, np.float32),
        packed=[upper.astype("<u2").tobytes()] * 3,
        same=np.arange(12),
        **{"pairs/ragged_flat_values": np.arange(6), "pairs/ragged_row_lengths_0": np.array([2, 2, 2])},
    )
    ((_, found),) = opened(foreign(tmp_path / "data", [episode], features)).episodes()
    assert found.extras["said"] == ["é", ""]
    assert found.extras["brief"].tolist() == found.extras["packed"].tolist() == [[1.5, -2], [1.5, -2]]
    assert found.extras["pairs"].tolist() == [[0, 1], [2, 3]]
    assert [value.tolist() for value in found.extras["same"]] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    wrong = {**episode, "pairs/ragged_row_lengths_0": np.array([1, 3, 2])}
    with pytest.raises(FormatError, match="steps/pairs: a row does not have the declared 2 elements"):
        list(opened(foreign(tmp_path / "wrong", [wrong], features)).episodes())


# ---- options


def test_workers_read_the_same_in_the_same_order(tmp_path: Path) -> None:
    spec = robot_spec(8)
    dataset_dir = written(tmp_path / "data", spec, [random_episode(spec, 3, n) for n in range(12)], shard_mb="1")
    one, three = list(opened(dataset_dir).episodes()), list(opened(dataset_dir, workers="3").episodes())
    assert [key for key, _ in three] == [f"train/{n}" for n in range(12)]
    assert all(a.equals(b) for (_, a), (_, b) in zip(one, three, strict=True))


def test_workers_stop_when_the_reader_does(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    found = opened(written_many(tmp_path), workers="3").episodes()
    next(found)
    assert set(threading.enumerate()) - before
    found.close()  # type: ignore[attr-defined]
    assert not set(threading.enumerate()) - before


def written_many(tmp_path: Path) -> Path:
    return written(tmp_path / "data", small_spec(), [random_episode(small_spec(), 3, n) for n in range(9)])


def test_splits(tmp_path: Path) -> None:
    spec = small_spec()
    episodes = [random_episode(spec, 3, n) for n in range(4)]
    held_out = replace(episodes[0], info=replace(episodes[0].info, split="eval"))
    dataset_dir = written(tmp_path / "data", spec, [held_out, *episodes[1:]])
    assert [key for key, _ in opened(dataset_dir, split="train").episodes()] == ["train/0", "train/1", "train/2"]
    ((key, back),) = opened(dataset_dir, split="test").episodes()
    assert (key, back.info.split) == ("test/0", "eval")
    assert opened(dataset_dir).num_episodes == 4
    with pytest.raises(FormatError, match="has no split 'val'; it has test, train"):
        opened(dataset_dir, split="val")


def test_shards_are_of_a_bounded_size(tmp_path: Path) -> None:
    spec = robot_spec(128)
    episodes = [random_episode(spec, 5, n) for n in range(4)]  # 0.6 MB each as PNG of noise
    dataset_dir = written(tmp_path / "data", spec, episodes, shard_mb="1")
    shards = sorted(path.name for path in dataset_dir.glob("*.tfrecord-*"))
    assert len(shards) == 4
    assert shards[0] == "data-train.tfrecord-00000-of-00004"
    assert len(list(written(tmp_path / "one", spec, episodes).glob("*.tfrecord-*"))) == 1
    assert all(a.equals(b) for (_, a), b in zip(opened(dataset_dir).episodes(), episodes, strict=True))


def test_images_as_png_bytes_or_jpeg(tmp_path: Path) -> None:
    ramp = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8)[..., None].repeat(3, 2)
    spec, episode = CANONICAL["images"]()
    episode.observation["wrist_1"][:] = 8 * ramp
    kinds = {}
    for images in ("png", "bytes", "jpeg"):
        dataset_dir = written(tmp_path / images, spec, [episode], images=images)
        content = parse(next(read_records(next(dataset_dir.glob("*.tfrecord-*")), "tfrecord", lambda _: True))[1])
        kinds[images] = bytes(content["steps/observation/wrist_1"][0][:3])
        ((_, back),) = opened(dataset_dir).episodes()
        if images == "jpeg":
            difference = np.abs(back.observation["wrist_1"].astype(int) - episode.observation["wrist_1"])
            assert 0 < difference.max() < 10
        else:
            assert back.equals(episode)
    assert kinds == {"png": b"\x89PN", "jpeg": b"\xff\xd8\xff", "bytes": bytes((8 * ramp).reshape(-1)[:3])}


@pytest.mark.parametrize(
    ("way", "options", "text"),
    [
        ("read", {"last": "both"}, "expected last=observation|step, got 'both'"),
        ("read", {"source": "me"}, "expected source=policy|human|script|random"),
        ("read", {"workers": "0"}, "expected workers= a number from 1, got '0'"),
        ("read", {"splits": "train"}, "has no option 'splits'; did you mean 'split'?"),
        ("write", {"images": "gif"}, "expected images=png|jpeg|bytes, got 'gif'"),
        ("write", {"file_format": "riegeli"}, "expected file_format=tfrecord|array_record"),
        ("write", {"shard_mb": "many"}, "expected shard_mb= a number from 1"),
    ],
)
def test_options_that_are_not(tmp_path: Path, way: str, options: dict[str, str], text: str) -> None:
    dataset_dir = written(tmp_path / "data", small_spec(), [random_episode(small_spec(), 2, 1)])
    format = find_format("rlds")
    call = (
        (lambda: format.read(dataset_dir, options))
        if way == "read"
        else (lambda: format.write(tmp_path / "new", small_spec(), options))
    )
    with pytest.raises(FormatError) as raised:
        call()
    assert text in str(raised.value)
    assert not (tmp_path / "new").exists()


# ---- where it lies


def test_a_directory_above_is_enough_if_it_leads_to_one(tmp_path: Path) -> None:
    written(tmp_path / "kitchen" / "2.0.0", small_spec(), [random_episode(small_spec(), 2, 1)])
    source = opened(tmp_path)
    assert source.name == "kitchen/2.0.0"  # type: ignore[attr-defined]
    written(tmp_path / "kitchen" / "2.1.0", small_spec(), [random_episode(small_spec(), 2, 1)])
    with pytest.raises(FormatError, match=r"has several datasets .kitchen/2.0.0, kitchen/2.1.0.; choose one"):
        opened(tmp_path)


def test_shards_that_are_not_as_they_are_said(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"has 1 records and dataset_info.json declares 2; fetch the file again"):
        list(opened(foreign(tmp_path / "fewer", [rows()], lengths=[2])).episodes())
    with pytest.raises(FormatError, match=r"has more than the 1 records that dataset_info.json declares"):
        list(opened(foreign(tmp_path / "more", [rows(), rows()], lengths=[1])).episodes())
    dataset_dir = foreign(tmp_path / "missing", [rows()])
    next(dataset_dir.glob("*.tfrecord-*")).unlink()
    with pytest.raises(FormatError, match=r"cannot be read .No such file"):
        list(opened(dataset_dir).episodes())


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    dataset_dir = foreign(tmp_path / "data", [rows()])
    info = json.loads((dataset_dir / "dataset_info.json").read_text())
    for change in ({"name": "../foreign"}, {"name": ""}, {"fileFormat": "riegeli"}):
        (dataset_dir / "dataset_info.json").write_text(json.dumps({**info, **change}))
        with pytest.raises(FormatError, match=r"dataset_info.json"):
            opened(dataset_dir)


# ---- files made to hurt


def test_every_flipped_bit_of_a_shard_is_seen(tmp_path: Path) -> None:
    dataset_dir = foreign(tmp_path / "data", [rows()])
    shard = next(dataset_dir.glob("*.tfrecord-*"))
    whole = shard.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(damaged)
        with pytest.raises(FormatError):
            list(opened(dataset_dir, last="step").episodes())


def test_records_that_are_whole_and_wrong(tmp_path: Path) -> None:
    """Bytes changed inside a record, with a checksum that fits: refused, or episodes that fit the spec."""
    outcomes = {"refused": 0, "read": 0}
    for name in ("images", "nested", "text"):
        spec, episode = CANONICAL[name]()
        dataset_dir = written(tmp_path / name, spec, [episode])
        shard = next(dataset_dir.glob("*.tfrecord-*"))
        data = next(read_records(shard, "tfrecord", lambda _: True))[1]
        for seed in range(150):
            rng = random.Random(seed)
            changed = bytearray(data)
            for _ in range(rng.choice([1, 1, 3])):
                at = rng.randrange(len(changed))
                kind = rng.randrange(4)
                if kind == 0:
                    changed[at] ^= 1 << rng.randrange(8)
                elif kind == 1:
                    del changed[at : at + rng.choice([1, 5, 100])]
                elif kind == 2:
                    changed[at : at + 9] = b"\xff" * 8 + b"\x01"
                else:
                    changed[at] = rng.randrange(256)
            shard.unlink()
            writer = write_records(shard, "tfrecord")
            writer.write(bytes(changed))
            writer.close()
            try:
                read_all(opened(dataset_dir))
                outcomes["read"] += 1
            except FormatError:
                outcomes["refused"] += 1
    assert outcomes["refused"] > 100
    assert outcomes["read"] > 10


def test_bombs_are_refused_before_they_go_off(tmp_path: Path) -> None:
    """A shard, a tensor and an image that would be gigabytes when unpacked."""
    zeros = zlib.compress(bytes(2**26), 9)
    packed = {"observation": Leaf(kind="tensor", shape=(2,), dtype="float32", encoding="zlib")}
    dataset_dir = foreign(tmp_path / "tensor", [rows(observation=[zeros] * 3, reward=np.zeros(3, np.float32))], packed)
    tracemalloc.start()
    with pytest.raises(FormatError, match="steps/observation: has more than 8 bytes when unpacked"):
        list(opened(dataset_dir).episodes())
    assert tracemalloc.get_traced_memory()[1] < 2**23  # and not 64 MiB
    tracemalloc.stop()

    header = io.BytesIO()
    Image.new("1", (30000, 30000)).save(header, "PNG")
    camera = {"observation": Leaf(kind="image", shape=(8, 8, 3), dtype="uint8", encoding="png")}
    dataset_dir = foreign(tmp_path / "image", [rows(observation=[header.getvalue()] * 3)], camera)
    with pytest.raises(FormatError, match="record 0"):
        list(opened(dataset_dir).episodes())
    absurd = {"observation": Leaf(kind="image", shape=(10**9, 10**9, 3), dtype="uint8", encoding="png")}
    small = encode_image(np.zeros((8, 8, 3), np.uint8), "png")
    with pytest.raises(FormatError, match="an image has 8x8 pixels and not 1000000000x1000000000"):
        list(opened(foreign(tmp_path / "absurd", [rows(observation=[small] * 3)], absurd)).episodes())

    dataset_dir = foreign(tmp_path / "shard", [rows()])
    shard = next(dataset_dir.glob("*.tfrecord-*"))
    length = (2**33).to_bytes(8, "little")
    crc = google_crc32c.value(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    shard.write_bytes(gzip.compress(length + masked.to_bytes(4, "little") + bytes(2**24)))
    with pytest.raises(FormatError, match="record 0 should have 8589934592 bytes"):
        list(opened(dataset_dir, last="step").episodes())


@pytest.mark.parametrize("cut", [1, 100])
def test_a_compressed_shard_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    dataset_dir = foreign(tmp_path / "data", [rows(300)])
    shard = next(dataset_dir.glob("*.tfrecord-*"))
    whole = gzip.compress(shard.read_bytes())
    shard.write_bytes(whole)
    assert len(list(opened(dataset_dir).episodes())) == 1
    shard.write_bytes(whole[:-cut])
    with pytest.raises(FormatError, match=r"cut off|checksum"):
        list(opened(dataset_dir).episodes())


def test_examples_that_are_none() -> None:
    for data in (b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b\x01", b"\x0a\x04\x0a\x02\x0a\xff"):
        with pytest.raises(Malformed):
            parse(data)


def test_numbers_of_an_example_come_back() -> None:
    rng = np.random.default_rng(0)
    ints = np.concatenate(
        [
            [0, 1, -1, 127, 128, 2**63 - 1, -(2**63), 300],
            rng.integers(-(2**63), 2**63 - 1, 200),
            rng.integers(-200, 200, 200),
        ]
    ).astype(np.int64)
    floats = rng.normal(size=50).astype(np.float32)
    fields = {"a": ints, "b": floats, "c": [b"", b"x" * 300], "é/猫": np.zeros(0, np.int64), "d": ints[:1]}
    back = parse(serialize(fields))
    assert back.keys() == fields.keys()
    np.testing.assert_array_equal(back["a"], ints)
    np.testing.assert_array_equal(back["b"], floats)
    assert [bytes(x) for x in back["c"]] == fields["c"]
    assert len(back["é/猫"]) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, workers: str) -> None:
    spec = robot_spec(64)
    peaks = []
    for count in (6, 24):
        episodes = [random_episode(spec, 10, n) for n in range(count)]
        dataset_dir = written(tmp_path / str(count), spec, episodes, images="bytes")
        del episodes
        tracemalloc.start()
        for _ in opened(dataset_dir, workers=workers).episodes():
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.4 * peaks[0]  # and not four times as much


def test_rows_can_be_gone_through_again(tmp_path: Path) -> None:
    data = read_rlds(foreign(tmp_path / "data", [rows(), rows(2)]))
    assert [len(episode["steps"]["is_first"]) for episode in data] == [3, 2]
    assert [len(episode["steps"]["is_first"]) for episode in data] == [3, 2]
    assert len(data) == 2
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(FormatError):
        list(data)
