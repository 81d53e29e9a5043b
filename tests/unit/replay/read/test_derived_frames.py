"""Resized frames: the same batch whether it was decoded or came from the cache, and a cache that nothing can poison."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.moving_camera import moving_frames

from understudy.core import (
    H264,
    ArraySpec,
    Codec,
    DamageError,
    Jpeg,
    Png,
    Resize,
    Spec,
    Step,
    StepSpec,
    TransitionBatch,
)
from understudy.core import tree as trees
from understudy.core.resize import resize_frame
from understudy.replay import (
    EVERYTHING,
    Fifo,
    FrameCache,
    Mixture,
    Reader,
    Sampler,
    Sequences,
    Store,
    Transitions,
    backup,
    compact,
    verify,
)
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import Segment, read_layout
from understudy.replay.read import derived_frames

NUM_STEPS = 25
SIZES = {"camera": Resize((6, 8)), "depth": Resize((3, 2)), "thumb": Resize((4, 4), crop=(0, 2, 8, 8))}
NO_CACHE = FrameCache(max_bytes=0)
ON_DEMAND = FrameCache(num_threads=0)


def spec_of(codec: Codec | None) -> StepSpec:
    return StepSpec(
        observation=Spec(
            {
                "camera": ArraySpec(shape=(24, 32, 3), dtype="uint8", codec=codec),
                "depth": ArraySpec(shape=(6, 8), dtype="uint16", codec=Png()),
                "thumb": ArraySpec(shape=(10, 10, 3), dtype="uint8"),  # small: in memory
                "state": ArraySpec(shape=(2,), dtype="float32"),
            }
        ),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )


def make_store(path: Path, codec: Codec | None = H264(gop_size=5), num_episodes: int = 2) -> Path:  # noqa: B008
    with Store.open(path) as store:
        writer = store.writer("w", spec_of(codec), commit_steps=12, background=False)
        for seed in range(num_episodes):
            frames = moving_frames(NUM_STEPS + 1, 24, 32, seed=seed)
            seen = [
                {
                    "camera": frame,
                    "depth": np.full((6, 8), seed * 1000 + i, np.uint16),
                    "thumb": frame[:10, :10],
                    "state": np.float32([seed, i]),
                }
                for i, frame in enumerate(frames)
            ]
            writer.begin(task="t")
            for i in range(NUM_STEPS):
                last = i == NUM_STEPS - 1
                writer.append(Step(observation=seen[i], action=np.zeros(2, np.float32), reward=0.0, truncated=last))
            writer.end(seen[-1])
    return path


def batches(path: Path, cache: FrameCache | None = None, *, count: int = 2, **options: Any) -> list[Any]:
    given = {"batch_size": 32, "seed": 3, "resize": SIZES, **options}
    with Sampler(path, EVERYTHING, frame_cache=cache, **given) as sampler:
        sampler.follow()
        if cache is None:
            assert sampler.wait_for_frames(60)
        return [sampler.sample() for _ in range(count)]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(
        trees.equal(getattr(a, name), getattr(b, name))
        for a, b in zip(found, wanted, strict=True)
        for name in ("observation", "next_observation")
    )


def derived_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((path / "derived").glob("*.frames"))}


def erase_frames(path: Path) -> None:
    """Overwrite the encoded frames of a store, so that none can be decoded any more."""
    (file,) = segment_files(path)
    layout = read_layout(file)
    with file.open("r+b") as stream:
        stream.seek(layout.heap_offset)
        stream.write(b"\xff" * 200_000)


@pytest.mark.parametrize("codec", [H264(gop_size=5), Jpeg(), None], ids=str)
def test_a_batch_is_the_same_from_the_cache_and_without_it(tmp_path: Path, codec: Codec | None) -> None:
    path = make_store(tmp_path / "store", codec)
    with Reader(path) as reader:
        known = {record.id: reader.read(record.id) for record in reader.episodes()}
    decoded = batches(path, NO_CACHE)
    assert not (path / "derived").exists()
    for batch in decoded:
        assert batch.observation["camera"].shape == (32, 6, 8, 3)
        for b in range(32):
            episode, index = known[int(batch.episode[b])], int(batch.index[b])
            for name, size in SIZES.items():
                here, there = episode.observation[name][index : index + 2]
                assert np.array_equal(batch.observation[name][b], resize_frame(here, size))
                assert np.array_equal(batch.next_observation[name][b], resize_frame(there, size))
    assert same(batches(path, ON_DEMAND), decoded)  # made for these batches, and kept
    assert same(batches(path, ON_DEMAND), decoded)
    assert same(batches(path), decoded)  # made in the background
    if codec is not None:
        erase_frames(path)  # from here on, the cache alone has them
        assert same(batches(path, ON_DEMAND), decoded)
        with pytest.raises(DamageError):
            batches(path, NO_CACHE)


@pytest.mark.parametrize("shape", [Transitions(num_steps=3, stack=2), Sequences(length=4)], ids=str)
def test_shapes_with_many_frames(tmp_path: Path, shape: Any) -> None:
    path = make_store(tmp_path / "store")
    wanted, found = batches(path, NO_CACHE, shape=shape), batches(path, shape=shape)
    for a, b in zip(found, wanted, strict=True):
        assert trees.equal(a.observation, b.observation)
        assert a.observation["camera"].shape[2:] == (6, 8, 3)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def forget_pixels(file: Path) -> None:
    """As after a power cut: the headers are there, and the frames are not."""
    data = np.frombuffer(file.read_bytes(), np.uint8).copy()
    row_bytes = 16 + (144 if len(data) > 52 * 100 else 12)
    for row in range(len(data) // row_bytes):
        data[row * row_bytes + 16 : (row + 1) * row_bytes] = 0
    file.write_bytes(data.tobytes())


def of_other_frames(file: Path) -> None:
    """As after a backup was restored: the frames are whole, and of rows that are others now."""
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [flip_a_bit, cut, forget_pixels, of_other_frames])
def test_a_damaged_file_is_never_served_and_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = make_store(tmp_path / "store")
    wanted = batches(path, count=6)  # of which every frame is drawn
    whole = derived_files(path)
    with Sampler(path, EVERYTHING, batch_size=32, seed=3, resize=SIZES, frame_cache=ON_DEMAND) as sampler:
        sampler.follow()
        assert same([sampler.sample()], wanted[:1])
        for file in (path / "derived").glob("*.frames"):
            damage(file)
        assert derived_files(path) != whole
        assert same([sampler.sample() for _ in range(5)], wanted[1:])  # also by one that knew the frames
    assert same(batches(path, count=6), wanted)
    assert derived_files(path) == whole


def test_deleting_the_files_is_always_safe(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    wanted = batches(path, NO_CACHE, count=4)
    with Sampler(path, EVERYTHING, batch_size=32, seed=3, resize=SIZES, frame_cache=ON_DEMAND) as sampler:
        sampler.follow()
        found = [sampler.sample(), sampler.sample()]
        for file in (path / "derived").iterdir():
            file.unlink()
        found.append(sampler.sample())
        shutil.rmtree(path / "derived")
        found.append(sampler.sample())
    assert same(found, wanted)
    assert derived_files(path)


def test_what_is_damaged_in_the_store_is_an_error_and_costs_no_frame_before_it(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", num_episodes=1)
    (file,) = segment_files(path)
    layout = read_layout(file)
    segment = Segment.open(layout, file)
    offset = int(segment.read_column("observation/camera", 3, 1)[0][0])
    segment.close()
    with file.open("r+b") as stream:  # the fourth frame of the first GOP
        stream.seek(layout.heap_offset + offset + 12)
        stream.write(b"\xff\xff\xff\xff")
    with Sampler(path, EVERYTHING, batch_size=1, selector=Fifo(), resize=SIZES) as sampler:
        sampler.follow()
        assert sampler.wait_for_frames(60)  # what is damaged is left out
        assert [int(sampler.sample().index[0]) for _ in range(2)] == [0, 1]
        with pytest.raises(DamageError, match="is not what was written"):
            sampler.sample()


# ---- the bound


def test_files_that_nobody_uses_make_room(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", Jpeg())
    decoded = batches(path, NO_CACHE)
    batches(path, FrameCache(num_threads=0), resize=(5, 5))
    (path / "derived" / "notes.txt").write_text("not ours")
    used = sum(file.stat().st_blocks * 512 for file in (path / "derived").glob("*.frames"))
    before = set(derived_files(path))
    full = FrameCache(max_bytes=used, num_threads=0)
    assert same(batches(path, full), decoded)  # nothing is kept: all files are in use
    assert set(derived_files(path)) == before
    an_hour_ago = time.time() - 3600
    for file in (path / "derived").iterdir():
        os.utime(file, (an_hour_ago, an_hour_ago))
    assert same(batches(path, full), decoded)
    assert set(derived_files(path)) != before
    assert (path / "derived" / "notes.txt").exists()
    assert sum(file.stat().st_blocks * 512 for file in (path / "derived").glob("*.frames")) <= used


@pytest.mark.parametrize(
    ("free", "kept"), [(10 * 2**20, False), (200 * 2**20, True), (400 * 2**30, True)], ids=["full", "little", "much"]
)
def test_a_disk_that_is_nearly_full_is_left_to_recording(
    tmp_path: Path, free: int, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    total = 1000 * 2**30
    monkeypatch.setattr(derived_frames, "disk_usage", lambda path: shutil._ntuple_diskusage(total, total - free, free))
    path = make_store(tmp_path / "store", Jpeg())
    assert same(batches(path, ON_DEMAND), batches(path, NO_CACHE))
    assert bool(derived_files(path)) is kept
    assert ("GiB of the disk are free" in caplog.text) is not kept


def test_a_directory_of_its_own_and_one_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_store(tmp_path / "store")
    decoded = batches(path, NO_CACHE)
    assert same(batches(path, FrameCache(directory=tmp_path / "cache", num_threads=0)), decoded)
    assert list((tmp_path / "cache").iterdir())
    assert not (path / "derived").exists()
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert same(batches(path, FrameCache(directory=tmp_path / "file", num_threads=1)), decoded)
    assert "made again for each batch" in caplog.text


# ---- beside other things


def test_verify_backup_and_compaction_know_nothing_of_it(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", num_episodes=3)
    sampler = Sampler(path, EVERYTHING, batch_size=32, seed=3, resize=SIZES)
    sampler.follow()
    sampler.sample()
    assert verify(path).ok
    with Store.open(path) as store:
        backup(store, tmp_path / "copy")
        store.delete([1])
        compact(store, min_dead=0.0)
    assert not (tmp_path / "copy" / "derived").exists()
    sampler.follow()
    found = sampler.sample()
    sampler.close()
    with Sampler(path, EVERYTHING, batch_size=32, seed=3, resize=SIZES, frame_cache=NO_CACHE) as again:
        again.follow()
        again.skip()
        assert same([found], [again.sample()])


def test_new_steps_are_made_in_the_background(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", num_episodes=1)
    with Sampler(path, EVERYTHING, batch_size=32, seed=3, resize=SIZES) as sampler:
        sampler.follow()
        assert sampler.wait_for_frames(60)
        before = derived_files(path)
        make_store(path, num_episodes=1)
        sampler.follow()
        assert sampler.wait_for_frames(60)
    after = derived_files(path)
    assert [len(after[name]) for name in before] == [2 * len(data) for data in before.values()]


def test_stores_of_other_sizes_are_mixed(tmp_path: Path) -> None:
    """A raw store in the wanted size, and one of larger encoded frames."""
    large = make_store(tmp_path / "large")
    with Sampler(large, EVERYTHING, batch_size=1, resize=SIZES) as sampler:
        spec = sampler.spec
    with Store.open(tmp_path / "small") as store:
        writer = store.writer("w", spec)
        writer.begin()
        zero = spec.observation.zero()
        writer.append(Step(observation=zero, action=np.ones(2, np.float32), reward=0.0, truncated=True))
        writer.end(zero)
    samplers = {
        "large": Sampler(large, EVERYTHING, batch_size=8, seed=1, resize=SIZES),
        "small": Sampler(tmp_path / "small", EVERYTHING, batch_size=8, seed=1),
    }
    with Mixture(samplers, {"large": 1, "small": 1}, batch_size=8) as mixture:
        mixture.follow()
        batch: TransitionBatch = mixture.sample()
        assert batch.observation["camera"].shape == (8, 6, 8, 3)
        assert batch.action[:, 0].tolist() == [0] * 4 + [1] * 4
        assert (batch.observation["camera"].reshape(8, -1).max(axis=1) > 0).tolist() == [True] * 4 + [False] * 4


FILL = """
import sys
from pathlib import Path
from understudy.core import Resize
from understudy.replay import EVERYTHING, FrameCache, Sampler
sizes = {"camera": Resize((6, 8)), "depth": Resize((3, 2)), "thumb": Resize((4, 4), crop=(0, 2, 8, 8))}
store, cache = Path(sys.argv[1]), FrameCache(num_threads=2)
print("ready", flush=True)
while True:
    with Sampler(store, EVERYTHING, batch_size=32, resize=sizes, frame_cache=cache) as sampler:
        sampler.follow()
        sampler.sample()
        sampler.wait_for_frames(1)
    for file in list((store / "derived").glob("*.frames")):
        file.unlink(missing_ok=True)
"""


@pytest.mark.parametrize(("fillers", "kills"), [(1, 1), pytest.param(3, 20, marks=pytest.mark.nightly)])
def test_processes_that_fill_at_once_and_are_killed(tmp_path: Path, fillers: int, kills: int) -> None:
    path = make_store(tmp_path / "store")
    decoded = batches(path, NO_CACHE, count=8)
    for number in range(kills):
        command = [sys.executable, "-c", FILL, str(path)]
        others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(fillers)]
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        for _ in range(3):
            assert same(batches(path, ON_DEMAND, count=8), decoded)
        time.sleep(0.01 * number)
        for other in others:
            other.send_signal(signal.SIGKILL)
            other.communicate()
        assert same(batches(path, count=8), decoded)  # the lock of the one that filled is free
