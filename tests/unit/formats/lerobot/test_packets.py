"""H.264 frames between a store and LeRobot's videos: the same packets in both, or a sentence that says why not."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import xxhash
from tests.moving_camera import moving_frames, psnr
from tests.unit.formats.lerobot.made import read

from understudy.cli import main
from understudy.codecs.nal import join_units, split_sample, split_units
from understudy.core import H264, ArraySpec, Episode, Jpeg, Spec, Step, StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.step import decoded_checksum_of
from understudy.formats import FormatError, parse_dataset_path
from understudy.formats.lerobot.video import Codec, VideoWriter, encode
from understudy.replay import Reader, Store, trim, verify
from understudy.training.data.dataset_io import (
    ImportCodec,
    ImportReport,
    StoreImportTarget,
    export_episodes,
    import_episodes,
)

NAMES = json.dumps({"action": ["pan", "lift"], "observation/state": ["x", "y"]})
FACTS = {"fps": "30", "robot_type": "so101_follower", "names": NAMES}
LENGTHS = (23, 1, 12)
SUCCESS = (True, None, False)


def spec_of(**cameras: Any) -> StepSpec:
    leaves = {name: ArraySpec(shape=(48, 64, 3), dtype="uint8", codec=codec) for name, codec in cameras.items()}
    return StepSpec(
        observation=Spec({**leaves, "state": ArraySpec(shape=(2,), dtype="float32")}),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )


SPEC = spec_of(front=H264(), wrist=H264(crf=24, gop_size=4), side=Jpeg(), raw=None)


def make_store(path: Path, spec: StepSpec = SPEC, lengths: tuple[int, ...] = LENGTHS) -> Path:
    with Store.open(path, segment_bytes=2**20) as store:
        writer = store.writer("w", spec, commit_steps=20)
        for seed, length in enumerate(lengths):
            frames = moving_frames(length + 1, seed=seed)
            cameras = [name for name in spec.observation.flat if name != "state"]
            seen = [{**dict.fromkeys(cameras, frames[i]), "state": np.float32([seed, i])} for i in range(length + 1)]
            writer.begin(task="push", labels=FACTS, kind="demonstration")
            for i in range(length):
                last = i == length - 1
                writer.append(Step(observation=seen[i], action=np.float32([i, 0]), reward=float(last), truncated=last))
            writer.end(seen[-1], success=SUCCESS[seed])
    return path


def exported(store: Path, dataset: Path, options: str = "") -> Any:
    return export_episodes(store, parse_dataset_path(f"lerobot:{dataset}{options}"))


def imported(dataset: Path, store: Path, codec: ImportCodec, options: str = "") -> tuple[ImportReport, tuple[str, ...]]:
    source = parse_dataset_path(f"lerobot:{dataset}{options}")
    with closing(source.format.read(source.path, source.options)) as opened, Store.open(store) as target:
        report = import_episodes(opened, StoreImportTarget(target), source, codec=codec)
        return report, opened.notes  # type: ignore[attr-defined]


def stored(store: Path) -> list[tuple[StepSpec, Any, dict[str, Any]]]:
    with Reader(store) as reader:
        found = [reader.stored_rows(record.id) for record in reader.episodes()]
        return [(reader.spec(record.spec), record.info, columns) for record, columns in found]


def file_packets(dataset: Path, camera: str) -> Iterator[list[bytes]]:
    """The units of each frame in the videos of a camera, as they are in the files."""
    for path in sorted(dataset.glob(f"videos/observation.images.{camera}/*/*.mp4")):
        with av.open(str(path)) as container:
            for packet in container.demux(container.streams.video[0]):
                if packet.pts is not None:
                    yield split_sample(bytes(packet), 4)


@pytest.mark.parametrize("video", ["keep", "png"])
def test_one_episode_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, video: str) -> None:
    seen: list[weakref.ref[Episode]] = []
    from_columns = Episode.from_columns

    def note(columns: Any, info: Any) -> Episode:
        assert [one() for one in seen] == [None] * len(seen)
        episode = from_columns(columns, info)
        seen.append(weakref.ref(episode))
        return episode

    monkeypatch.setattr(Episode, "from_columns", note)
    exported(make_store(tmp_path / "store"), tmp_path / "d", f"?video={video}")
    assert len(seen) == 3


def test_a_round_trip_keeps_every_packet_and_every_fact(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    report = exported(store, tmp_path / "d")
    assert report.kept == ("observation/front", "observation/wrist")
    lossy, unknown = report.notes
    assert lossy.startswith("observation/raw, observation/side: written as av1 video, which is lossy")
    assert unknown == "next.success: false in 1 episodes of which it is not known"
    before = stored(store)
    for camera in ("front", "wrist"):
        files = [join_units(units) for units in file_packets(tmp_path / "d", camera)]
        steps = [rows[f"observation/{camera}"][:-1] for _, _, rows in before]
        assert files == [bytes(packet) for packets in steps for packet in packets]
    info = json.loads((tmp_path / "d" / "meta" / "info.json").read_text())
    assert (info["fps"], info["robot_type"]) == (30, "so101_follower")
    assert info["features"]["action"]["names"] == ["pan", "lift"]
    codecs = {name: f["info"]["video.codec"] for name, f in info["features"].items() if f["dtype"] == "video"}
    cameras = [f"observation.images.{name}" for name in ("front", "wrist", "side", "raw")]
    assert codecs == dict(zip(cameras, ["h264", "h264", "av1", "av1"], strict=True))

    back, notes = imported(tmp_path / "d", tmp_path / "back", "keep")
    assert (back.num_imported, back.kept, notes) == (3, report.kept, ())
    for (old_spec, old, rows), (spec, new, copies) in zip(before, stored(tmp_path / "back"), strict=True):
        assert spec.encoded == {path: old_spec.encoded[path] for path in report.kept}
        assert {name: new.labels[name] for name in FACTS} == FACTS
        assert (new.success, new.task, new.kind) == (old.success, old.task, old.kind)
        for path in spec.stored_columns:
            if "side" not in path and "raw" not in path:
                assert trees.equal_leaf(copies[path], rows[path]), path
    assert verify(tmp_path / "back").ok


def test_the_pixels_are_the_stores_also_without_its_packets(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", lengths=(12,))
    exported(store, tmp_path / "d", "?version=2.1")
    with Reader(store) as reader:
        whole = reader.read(1)
    (episode,) = read(tmp_path / "d")
    for name in ("front", "wrist", "state"):
        assert np.array_equal(episode.observation[name], whole.observation[name]), name
    again = exported(store, tmp_path / "av1", "?video=av1")
    assert again.kept == ()
    (episode,) = read(tmp_path / "av1")
    assert not np.array_equal(episode.observation["front"], whole.observation["front"])


def test_a_cut_gop_is_encoded_again_and_the_others_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", lengths=(23,))
    with Store.open(store) as opened:
        trim(opened, 1, 3, 23, delete_source=True)
    report = exported(store, tmp_path / "d")
    assert report.notes[0].startswith("observation/raw, observation/side: written as av1 video")
    assert report.notes[1:] == (
        "observation/front: 7 frames were encoded again: their GOPs were cut when an episode was trimmed or split",
        "observation/wrist: 1 frames were encoded again: their GOPs were cut when an episode was trimmed or split",
    )
    ((_, _, rows),) = stored(store)
    files = [join_units(units) for units in file_packets(tmp_path / "d", "front")]
    packets = [bytes(packet) for packet in rows["observation/front"]]
    assert files[7:] == packets[7:-1]
    assert files[0] != packets[0]
    with Reader(store) as reader:
        whole = reader.read(2)
    (episode,) = read(tmp_path / "d")
    assert np.array_equal(episode.observation["front"][7:], whole.observation["front"][7:])
    assert min(map(psnr, episode.observation["front"][:7], whole.observation["front"][:7])) > 30


def test_stores_with_other_codecs_agree_on_what_can_be_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", lengths=(12,))
    make_store(store, spec_of(front=H264(crf=30, gop_size=5), wrist=Jpeg(), side=Jpeg(), raw=None), lengths=(12,))
    assert exported(store, tmp_path / "d").kept == ("observation/front",)
    imported(tmp_path / "d", tmp_path / "back", "keep")
    copies = stored(tmp_path / "back")
    assert {spec.encoded["observation/front"] for spec, _, _ in copies} == {H264(crf=None, gop_size=10)}
    for (_, _, old), (_, _, new) in zip(stored(store), copies, strict=True):
        assert trees.equal_leaf(new["observation/front"], old["observation/front"])


# ---- videos of others


def foreign(
    path: Path, *, settings: dict[str, str], size: tuple[int, int] = (48, 64), encoder: str = "libx264"
) -> Path:
    """A data set whose cameras are encoded by somebody else; the sidecar is gone."""
    spec = spec_of(front=None)
    exported(make_store(path.parent / "source", spec, lengths=(12, 9)), path)
    (video,) = path.glob("videos/*/*/*.mp4")
    pieces = [moving_frames(length, *size, seed=seed) for seed, length in enumerate((12, 9))]
    writer = VideoWriter(video, 30)
    for frames in pieces:
        codec = Codec(encoder=encoder, pixels="yuv420p", settings=settings)
        writer.add(encode(frames, codec, 30), len(frames))
    writer.close()
    info = json.loads((path / "meta" / "info.json").read_text())
    info["features"]["observation.images.front"]["shape"] = [*size, 3]
    (path / "meta" / "info.json").write_text(json.dumps(info))
    return path


@pytest.mark.parametrize("last", ["observation", "step"])
def test_short_gops_of_others_are_kept(tmp_path: Path, last: str) -> None:
    dataset = foreign(tmp_path / "d", settings={"g": "5", "bf": "0", "crf": "23"})
    report, _ = imported(dataset, tmp_path / "kept", "keep", f"?rest=ignore&last={last}")
    assert report.kept == ("observation/front",)
    slices = [[unit for unit in units if unit[0] & 31 in (1, 5)] for units in file_packets(dataset, "front")]
    found = stored(tmp_path / "kept")
    spec = found[0][0]
    assert spec.encoded == {"observation/front": H264(crf=None, gop_size=5)}
    rows = [rows["observation/front"] for _, _, rows in found]
    kept = [bytes(packet) for packets in rows for packet in (packets[:-1] if last == "step" else packets)]
    assert [[unit for unit in split_units(packet) if unit[0] & 31 in (1, 5)] for packet in kept] == slices
    with av.open(str(next(dataset.glob("videos/*/*/*.mp4")))) as container:
        planes = [xxhash.xxh3_64_intdigest(frame.to_ndarray().tobytes()) for frame in container.decode(video=0)]
    sums = [rows[decoded_checksum_of("observation/front")].tolist() for _, _, rows in found]
    assert [one for each in sums for one in (each[:-1] if last == "step" else each)] == planes
    imported(dataset, tmp_path / "raw", "raw", f"?rest=ignore&last={last}")
    with Reader(tmp_path / "kept") as one, Reader(tmp_path / "raw") as other:
        for number in (1, 2):
            pictures, decoded = one.read(number).observation["front"], other.read(number).observation["front"]
            assert min(map(psnr, pictures, decoded)) > 30  # the planes are the same, the conversion to RGB differs
            assert np.array_equal(pictures[-1], pictures[-2]) == (last == "step")
            assert one.record(number).info.labels["origin"] == other.record(number).info.labels["origin"]
    assert verify(tmp_path / "kept").ok
    again = exported(tmp_path / "kept", tmp_path / "again")
    assert again.kept == ("observation/front",)
    with Store.open(tmp_path / "kept") as store:  # frames may be added to such a field
        trim(store, 1, 1, 7)


@pytest.mark.parametrize(
    ("settings", "encoder", "why"),
    [
        ({"g": "5"}, "libx264", "its video has B frames"),
        ({"g": "2", "crf": "30", "preset": "12"}, "libsvtav1", "its video is av1"),
        ({"g": "5", "bf": "0", "color_range": "pc"}, "libx264", "its colours are yuv"),
    ],
)
def test_what_cannot_be_kept_is_stored_raw_and_said(
    tmp_path: Path, settings: dict[str, str], encoder: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = foreign(tmp_path / "d", settings=settings, encoder=encoder)
    assert main(["import", f"lerobot:{dataset}?rest=ignore", str(tmp_path / "store"), "--codec", "keep"]) == 0
    said = capsys.readouterr().out
    assert f"observation/front: {why}" in said
    assert "so its frames cannot be kept as they are" in said
    assert stored(tmp_path / "store")[0][0].encoded == {}


def test_auto_keeps_short_gops_of_large_frames_and_encodes_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, gop, wanted in (((144, 160), "5", None), ((144, 160), "12", 19), ((48, 64), "5", -1)):
        folder = tmp_path / f"{size[0]}-{gop}"
        folder.mkdir()
        dataset = foreign(folder / "d", settings={"g": gop, "bf": "0"}, size=size)
        assert main(["import", f"lerobot:{dataset}?rest=ignore", str(folder / "store"), "--codec", "auto"]) == 0
        assert ("as the dataset has them: observation/front" in capsys.readouterr().out) == (wanted is None)
        codec = stored(folder / "store")[0][0].encoded.get("observation/front", H264(crf=0))
        assert isinstance(codec, H264)
        assert codec.crf == (0 if wanted == -1 else wanted)


def test_a_video_that_was_changed_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", spec_of(front=H264(gop_size=5)), lengths=(12,))
    exported(store, tmp_path / "d")
    (video,) = (tmp_path / "d").glob("videos/*/*/*.mp4")
    for settings, why in (({"g": "5", "bf": "0"}, "decodes to other pixels"), ({"g": "3", "bf": "0"}, "was changed")):
        writer = VideoWriter(video, 30)
        codec = Codec(encoder="libx264", pixels="yuv420p", settings=settings)
        writer.add(encode(moving_frames(12, seed=0), codec, 30), 12)
        writer.close()
        with pytest.raises(FormatError, match=rf"episode 0: observation/front: .*{why}.*\?rest=ignore"):
            read(tmp_path / "d")
    assert len(read(tmp_path / "d", rest="ignore")) == 1


def test_a_server_is_not_asked_to_keep_packets(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", lengths=(1,))
    exported(store, tmp_path / "d")
    source = parse_dataset_path(f"lerobot:{tmp_path / 'd'}")
    with closing(source.format.read(source.path, {})) as opened, Store.open(tmp_path / "other") as other:
        target = StoreImportTarget(other)
        target.takes_encoded = False  # as that of a server
        with pytest.raises(StoreError, match="encodes frames itself, got 'keep'; import into a directory"):
            import_episodes(opened, target, source, codec="keep")
        assert import_episodes(opened, target, source, codec="auto").kept == ()


def test_the_rate_is_known_or_given_and_never_measured(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", spec_of(), lengths=(3,))
    with Store.open(store) as opened:
        opened.label([1], {"fps": None})
        assert exported(store, tmp_path / "a").notes == (
            "no episode says its rate, so 10 frames per second are written; give the true one with ?fps=",
        )
        assert exported(store, tmp_path / "b", "?fps=25").notes == ()
        opened.label([1], {"measured_fps": "29.98"})
    with pytest.raises(
        FormatError, match=r"was only measured \(29.98 rows per second\); give the frame rate with \?fps=30"
    ):
        exported(store, tmp_path / "c")
    exported(store, tmp_path / "c", "?fps=30")
    assert json.loads((tmp_path / "c" / "meta" / "info.json").read_text())["fps"] == 30
