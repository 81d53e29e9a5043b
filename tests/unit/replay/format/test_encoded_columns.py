"""Stores with encoded cameras: what is read and sampled, damage, repair, compaction, backup and delivery."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.moving_camera import moving_frames, psnr

from understudy.codecs import FrameError
from understudy.core import H264, ArraySpec, Codec, DamageError, Episode, Jpeg, Png, Spec, SpecError, Step, StepSpec
from understudy.core.step import frame_number_of
from understudy.dashboard.api.episode_rows import read_rows
from understudy.replay import (
    EVERYTHING,
    Reader,
    Sampler,
    Sequences,
    Store,
    Transitions,
    backup,
    compact,
    repair,
    verify,
)
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.format.encoded_columns import encode_columns
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import Segment, read_layout
from understudy.service import Server, ServerConfig, connect

NUM_STEPS = 25  # with commits of 12 rows and groups of 5: groups of 5, 5, 2, 5, 5, 2, 2


def spec_of(codec: Codec | None) -> StepSpec:
    return StepSpec(
        observation=Spec(
            {
                "camera": ArraySpec(shape=(48, 64, 3), dtype="uint8", codec=codec),
                "depth": ArraySpec(shape=(6, 8), dtype="uint16", codec=Png()),
                "state": ArraySpec(shape=(2,), dtype="float32"),
            }
        ),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )


H264_SPEC = spec_of(H264(gop_size=5))


def observations(seed: int) -> list[dict[str, Any]]:
    frames = moving_frames(NUM_STEPS + 1, seed=seed)
    return [
        {"camera": frame, "depth": np.full((6, 8), seed * 100 + i, np.uint16), "state": np.float32([seed, i])}
        for i, frame in enumerate(frames)
    ]


def write(writer: Any, seed: int) -> None:
    seen = observations(seed)
    writer.begin(task="t", seed=seed)
    for i in range(NUM_STEPS):
        writer.append(
            Step(observation=seen[i], action=np.float32([i, seed]), reward=float(i), terminated=i == NUM_STEPS - 1)
        )
    writer.end(seen[-1], success=True)


def make_store(path: Path, spec: StepSpec = H264_SPEC, num_episodes: int = 3) -> Path:
    with Store.open(path) as store:
        writer = store.writer("w", spec, commit_steps=12)
        for seed in range(num_episodes):
            write(writer, seed)
    return path


def episodes(path: Path) -> dict[int, Episode]:
    with Reader(path) as reader:
        return {record.id: reader.read(record.id) for record in reader.episodes()}


@pytest.mark.parametrize("codec", [Jpeg(), H264(), H264(gop_size=1), Png(), None])
def test_what_is_read_is_what_was_seen_or_near_it(tmp_path: Path, codec: Codec | None) -> None:
    path = make_store(tmp_path / "store", spec_of(codec))
    for number, episode in episodes(path).items():
        seen = observations(number - 1)
        for i, there in enumerate(seen):
            assert np.array_equal(episode.observation["depth"][i], there["depth"])
            assert np.array_equal(episode.observation["state"][i], there["state"])
            near = psnr(episode.observation["camera"][i], there["camera"])
            assert near > 28 if codec is not None and codec.lossy else near == float("inf")
    assert verify(path).ok


@pytest.mark.parametrize("shape", [Transitions(), Transitions(num_steps=3, stack=2), Sequences(length=4)])
def test_a_batch_has_the_frames_that_an_episode_has(tmp_path: Path, shape: Any) -> None:
    path = make_store(tmp_path / "store")
    known = episodes(path)
    with Sampler(path, EVERYTHING, batch_size=32, seed=3, shape=shape) as sampler:
        sampler.follow()
        batch = sampler.sample()
    for b in range(32):
        episode, index = known[int(batch.episode[b])], int(batch.index[b])
        for name in ("camera", "depth", "state"):
            of_episode, of_batch = episode.observation[name], batch.observation[name][b]
            if isinstance(shape, Sequences):
                numbers = [i for i in range(index, index + 5) if i <= NUM_STEPS]
                assert np.array_equal(of_batch[: len(numbers)], of_episode[numbers])
            elif shape.stack == 2:
                assert np.array_equal(of_batch, of_episode[[max(index - 1, 0), index]])
            else:
                assert np.array_equal(of_batch, of_episode[index])
                assert np.array_equal(batch.next_observation[name][b], of_episode[index + 1])


def test_only_a_store_with_encoded_fields_is_of_the_newer_format(tmp_path: Path) -> None:
    raw = StepSpec(observation=Spec({"state": ArraySpec(shape=(2,), dtype="float32")}), action=H264_SPEC.action)
    formats = []
    for number, spec in enumerate((raw, H264_SPEC)):
        with Store.open(tmp_path / "store") as store:
            writer = store.writer("w", spec)
            if number:
                write(writer, 0)
            formats.append(store.catalog.select("select value from meta where key = 'format'")[0][0])
    assert formats == ["1", "2"]
    rebuilt = tmp_path / "store" / "catalog.sqlite"
    rebuilt.unlink()
    assert repair(tmp_path / "store").after.ok
    with Reader(tmp_path / "store") as reader:
        assert reader.catalog.select("select value from meta where key = 'format'") == [("2",)]
        assert len(reader.read(1)) == NUM_STEPS


def test_a_page_sees_the_frames_of_a_part_of_an_episode(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    known = episodes(path)
    with Reader(path) as reader:
        for first, count in ((0, 1), (3, 9), (12, 14), (25, 5)):
            found = read_rows(reader, 2, ["observation/camera", "observation/depth", "source"], first, count)
            for name in ("camera", "depth"):
                wanted = known[2].observation[name][first : first + count]
                assert np.array_equal(found[f"observation/{name}"], wanted)
    damage_packet(path, 26 + 12)
    with Reader(path) as reader, pytest.raises(DamageError):
        read_rows(reader, 2, ["observation/camera"], 13, 1)


def test_a_group_does_not_cross_a_commit_or_an_episode(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", num_episodes=1)
    (file,) = segment_files(path)
    segment = Segment.open(read_layout(file), file)
    found = segment.read_column(frame_number_of("observation/camera"), 0, NUM_STEPS + 1).tolist()
    segment.close()
    assert found == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


def damage_packet(path: Path, row: int) -> None:
    """Flip a bit of the encoded frame of a row."""
    (file,) = segment_files(path)
    layout = read_layout(file)
    segment = Segment.open(layout, file)
    offset, size = segment.read_column("observation/camera", row, 1)[0].tolist()
    segment.close()
    with file.open("r+b") as stream:
        stream.seek(layout.heap_offset + offset + 8 + size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 4]))


def test_damage_costs_the_rest_of_its_group_and_is_named(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    known = episodes(path)
    damage_packet(path, 26 + 12)  # episode 2, index 12: the third frame of a group of five
    problems = verify(path).problems
    assert len(problems) == 3  # rows 12, 13 and 14
    assert "episode 2: index 12 (row 38) is not what was written" in problems[0]
    with Reader(path) as reader:
        assert reader.read(1).equals(known[1])
        with pytest.raises(DamageError, match=r"row 38 \(episode 2, index 12\) is not what was written"):
            reader.read(2)
    with Sampler(path, EVERYTHING, batch_size=64, seed=0) as sampler:
        sampler.follow()
        with pytest.raises(DamageError, match="a value of the heap is not what was written; run `understudy verify`"):
            sampler.sample()
    report = repair(path)
    assert report.after.ok
    assert (report.rows_dropped, report.episodes_trimmed, report.episodes_salvaged) == (3, 1, 1)
    after = episodes(path)
    assert after[1].equals(known[1])
    assert np.array_equal(after[2].observation["camera"], known[2].observation["camera"][:12])
    assert np.array_equal(after[4].observation["camera"], known[2].observation["camera"][15:])


def test_a_frame_that_decodes_to_other_pixels_is_named(tmp_path: Path) -> None:
    columns: dict[str, Any] = {path: [] for path in H264_SPEC.columns}
    for seen in observations(0)[:3]:
        row = H264_SPEC.row(Step(observation=seen, action=np.zeros(2, np.float32), reward=0.0))
        for name, value in row.items():
            columns[name].append(value)
    columns = {name: np.array(values, H264_SPEC.columns[name].dtype) for name, values in columns.items()}
    part = Part(episode=0, first_index=0, num_rows=3, state="cut", info=episodes(make_store(tmp_path / "a"))[1].info)
    stored: dict[str, Any] = encode_columns(H264_SPEC, columns, [part])
    stored["decoded_checksum/observation/camera"][1] ^= 1
    with Store.open(tmp_path / "b") as store:
        store.begin_writer("w", "only")
        store.commit(Chunk(writer="w", incarnation="only", seq=0, spec=H264_SPEC, columns=stored, parts=(part,)))
        stored[frame_number_of("observation/camera")] = np.uint8([0, 2, 3])
        with pytest.raises(SpecError, match="observation/camera: its GOPs cross episodes or miss frames"):
            store.commit(Chunk(writer="w", incarnation="only", seq=1, spec=H264_SPEC, columns=stored, parts=(part,)))
    with (
        Reader(tmp_path / "b") as reader,
        pytest.raises(FrameError, match="frame 1 of a GOP decodes to other pixels"),
    ):
        reader.rows(1)


def test_compaction_moves_encoded_frames_as_they_are(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", num_episodes=4)
    known = episodes(path)
    with Store.open(path) as store:
        store.delete([1, 3])
        assert compact(store, min_dead=0.0).rows_moved == 2 * (NUM_STEPS + 1)
    assert verify(path).ok
    after = episodes(path)
    assert sorted(after) == [2, 4]
    assert all(after[number].equals(known[number]) for number in after)


def test_a_backup_has_the_same_frames(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    with Store.open(path) as store:
        backup(store, tmp_path / "copy")
    known, copied = episodes(path), episodes(tmp_path / "copy")
    assert all(copied[number].equals(known[number]) for number in known)


def test_over_the_network_a_store_gets_the_same_frames(tmp_path: Path) -> None:
    local = make_store(tmp_path / "local")
    with ExitStack() as undo:
        store = undo.enter_context(Store.open(tmp_path / "remote"))
        server = Server(store, ServerConfig(port=0)).start()
        undo.callback(server.stop, 0.0)
        remote = undo.enter_context(connect(server.address))
        writer = undo.enter_context(remote.writer("w", H264_SPEC, commit_steps=12, spool=tmp_path / "spool"))
        for seed in range(3):
            write(writer, seed)
        writer.wait_delivered()
    assert verify(tmp_path / "remote").ok
    ours, theirs = episodes(local), episodes(tmp_path / "remote")
    for number, episode in theirs.items():
        assert np.array_equal(episode.observation["depth"], ours[number].observation["depth"])
        assert min(map(psnr, episode.observation["camera"], ours[number].observation["camera"])) > 40


def test_a_store_of_encoded_frames_is_small(tmp_path: Path) -> None:
    sizes: list[int] = []
    for codec in (None, Jpeg(), H264()):
        path = make_store(tmp_path / str(codec), spec_of(codec))
        with Reader(path) as reader:
            sizes.append(sum(record.num_bytes for record in reader.episodes()))
    assert sizes[0] > 4 * sizes[1] > 8 * sizes[2]


def test_rows_in_a_chunk_are_whole_groups_and_not_too_many_bytes() -> None:
    from understudy.replay.write.writer import rows_per_chunk

    camera = ArraySpec(shape=(480, 640, 3), dtype="uint8", codec=H264())
    three = StepSpec(
        observation=Spec({"a": camera, "b": camera, "c": camera}), action=Spec(ArraySpec(shape=(14,), dtype="float32"))
    )
    assert rows_per_chunk(three, 50) == 20  # 55 MB
    assert rows_per_chunk(H264_SPEC, 12) == 10
    assert rows_per_chunk(H264_SPEC, 3) == 3
    assert rows_per_chunk(spec_of(None), 50) == 50
