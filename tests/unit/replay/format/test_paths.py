"""The names of a store's files, which never change."""

from pathlib import Path

from understudy.replay.format.paths import segment_files, segment_path


def test_segments_are_named_by_number_and_listed_in_order(tmp_path: Path) -> None:
    assert segment_path(Path("store"), 12) == Path("store/segments/00000012.safetensors")
    (tmp_path / "segments").mkdir()
    for name in ("00000010.safetensors", "00000002.safetensors", "notes.safetensors", "00000003.part"):
        (tmp_path / "segments" / name).touch()
    assert segment_files(tmp_path) == [segment_path(tmp_path, 2), segment_path(tmp_path, 10)]
