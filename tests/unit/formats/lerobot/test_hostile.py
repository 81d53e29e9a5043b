"""Files that are damaged, or made by people who mean no good: refused in a sentence, whatever they claim."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.formats.lerobot.made import copy_of_golden, edit_json, read, smooth_episode, write
from tests.unit.formats.mutation import damage, read_all

from understudy.formats import FormatError, find_format

CAMERA = "observation.images.top"


def feature(key: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda info: info["features"][key].update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda info: info.update(data_path="../../x"), "is not a path below the dataset"),
        (lambda info: info.update(data_path="/etc/passwd"), "is not a path below the dataset"),
        (lambda info: info.update(video_path="videos/../../x.mp4"), "is not a path below the dataset"),
        (lambda info: info.update(data_path="{chunk_index.__class__}"), "is not a path below the dataset"),
        (lambda info: info.update(data_path="{chunk_index:09999999999d}"), "is not a path below the dataset"),
        (lambda info: info.update(data_path="{secret}"), "uses 'secret'"),
        (lambda info: info.update(data_path="data/\0"), "is not a path below the dataset"),
        (lambda info: info.update(data_path=7), "data_path: expected a path, got 7"),
        (lambda info: info.update(codebase_version="v1.6"), r"expected v2\.1 or v3\.0, got 'v1\.6'"),
        (lambda info: info.update(codebase_version=None), "got None"),
        (lambda info: info.update(fps=0), "fps: expected a positive number, got 0"),
        (lambda info: info.update(fps=True), "fps: expected a positive number, got True"),
        (lambda info: info.update(fps=float("nan")), "fps: expected a positive number"),
        (lambda info: info.update(fps=1), "frames are not at 1 fps"),
        (lambda info: info.update(total_episodes=-1), "total_episodes: expected a count, got -1"),
        (lambda info: info.update(total_episodes=2), "expected up to 2 rows, got 3|says 2 episodes, and 3 are listed"),
        (lambda info: info.update(total_episodes=4), "says 4 episodes, and 3 are listed"),
        (lambda info: info.update(features=[]), "features: expected a dict"),
        (lambda info: info["features"].update({"a/b": {"dtype": "bool", "shape": [1]}}), "a name without '/'"),
        (lambda info: info["features"].update({"observation.\ud800": info["features"]["action"]}), "half of one"),
        (lambda info: info["features"].pop("action"), "has no feature action"),
        (lambda info: [info["features"].pop(k) for k in list(info["features"]) if k[:3] == "obs"], "no feature observ"),
        (feature("action", dtype="object"), "dtype 'object' is unknown"),
        (feature("action", dtype=["float32"]), r"dtype \['float32'\] is unknown"),
        (feature("action", shape=[4]), "which is not their shape"),
        (feature("action", shape=[3, 1]), "correct its shape|is damaged"),
        (feature("action", shape=[-3]), "shape: expected a list of sizes"),
        (feature("action", shape=[3.0]), "shape: expected a list of sizes"),
        (feature("action", shape=[10**9, 10**9]), "is implausibly large"),
        (feature("action", shape=[2**31 - 1]), "is implausibly large"),
        (feature("action", shape=[1] * 6), "is implausibly large"),
        (feature(CAMERA, shape=[64, 96]), "expected height, width and channels"),
        (feature(CAMERA, shape=[64, 96, 7]), "does not have 3 channels"),
        (feature(CAMERA, shape=[65, 96, 3]), "expected frames of 65 x 96, got 64 x 96"),
        (feature("observation.images.wrist", shape=[17, 24, 3]), "expected images of 17 x 24 in RGB, got 16 x 24"),
        (feature("observation.images.wrist", dtype="float32"), "which is not their shape|expected lists of 16"),
        (feature("observation.state", dtype="image", shape=[4, 4, 3]), "expected images|which is not their shape"),
        (feature("force", dtype="string"), "expected text"),
    ],
)
@pytest.mark.parametrize("name", ["v3", "v21"])
def test_what_info_claims(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object], said: str) -> None:
    dataset_dir = copy_of_golden(name, tmp_path, change)
    with pytest.raises(FormatError, match=said) as caught:
        read(dataset_dir)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"a": ' * 50_000, "\xff", "nul", '"x"'])
@pytest.mark.parametrize("file", ["meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl"])
def test_json_that_is_none(tmp_path: Path, file: str, text: str) -> None:
    if text == "" and file == "meta/tasks.jsonl":
        pytest.skip("no tasks are no damage")
    dataset_dir = copy_of_golden("v21", tmp_path)
    (dataset_dir / file).write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=str(dataset_dir)):
        read(dataset_dir)


@pytest.mark.parametrize("name", ["v3", "v21"])
def test_each_file_may_be_missing(tmp_path: Path, name: str) -> None:
    files = [path.relative_to(tmp_path / name) for path in copy_of_golden(name, tmp_path).rglob("*") if path.is_file()]
    needed = 0
    for file in files:
        shutil.rmtree(tmp_path / name)
        dataset_dir = copy_of_golden(name, tmp_path)
        (dataset_dir / file).unlink()
        if "stats" not in file.name and file.name != "tasks.parquet":
            needed += 1
            with pytest.raises(FormatError, match=r"is missing|has no meta/info|cannot be read|holds no tables"):
                read(dataset_dir)
    assert needed >= 4


def change_table(path: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    pq.write_table(change(pq.read_table(path)), path, **options)


def with_column(table: pa.Table, name: str, column: Any) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(column))


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("episode_index", lambda old: [0] * 17, "rows of episode 1 are not in the listed rows"),
        ("frame_index", lambda old: [5, *old[1:]], "rows of episode 0 are not in the listed rows"),
        ("timestamp", lambda old: [float("nan"), *old[1:]], "timestamp: expected times"),
        ("timestamp", lambda old: [0.0] * 17, "frames are not at 10 fps"),
        ("timestamp", lambda old: [99.0 + time for time in old], r"has no frame at 99\.000 s"),
        ("action", lambda old: [old[0][:2], *old[1:]], "is not their shape"),
        ("action", lambda old: [old[0] + [0.0], old[1][:2], *old[2:]], "expected lists of 3, got one of 4"),
        ("action", lambda old: [[None] * 3, *old[1:]], "got 3 nulls"),
        ("next.reward", lambda old: [float("inf")] * 17, "reward: expected finite numbers"),
        ("next.reward", lambda old: ["x"] * 17, "is damaged"),
        ("observation.images.wrist", lambda old: [{"bytes": b"x", "path": ""}] * 17, "an image is damaged"),
        ("observation.images.wrist", lambda old: [{"bytes": None, "path": "/etc/passwd"}] * 17, "got file names"),
    ],
)
def test_what_the_table_holds(tmp_path: Path, name: str, column: Callable[[list[Any]], Any], said: str) -> None:
    dataset_dir = copy_of_golden("v3", tmp_path)
    path = dataset_dir / "data" / "chunk-000" / "file-000.parquet"
    change_table(path, lambda table: with_column(table, name, column(table[name].to_pylist())))
    with pytest.raises(FormatError, match=said):
        read(dataset_dir)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("length", 0, "episode 1 has 0 frames"),
        ("length", 10**12, f"episode 1 has {10**12} frames"),
        ("length", 900_000, r"expected rows 6 to 900006, got 17 rows"),
        ("dataset_from_index", -(10**15), "expected rows"),
        ("episode_index", 7, "episode 1 is not listed"),
        ("data/chunk_index", -1, "is missing"),
        ("data/file_index", 2**62, "is missing|cannot be read|is damaged"),
        (f"videos/{CAMERA}/from_timestamp", float("nan"), "expected times from 0 on"),
        (f"videos/{CAMERA}/from_timestamp", 1e300, "are not at 10 fps"),
        (f"videos/{CAMERA}/from_timestamp", 0.05, "has no frame at"),
    ],
)
def test_what_the_index_claims(tmp_path: Path, name: str, value: float, said: str) -> None:
    dataset_dir = copy_of_golden("v3", tmp_path)
    path = dataset_dir / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    change_table(
        path,
        lambda table: with_column(
            table, name, [value if at == 1 else old for at, old in enumerate(table[name].to_pylist())]
        ),
    )
    with pytest.raises(FormatError, match=said):
        read(dataset_dir)


def test_a_small_file_does_not_unpack_to_a_large_list(tmp_path: Path) -> None:
    dataset_dir = copy_of_golden("v3", tmp_path)
    path = dataset_dir / "data" / "chunk-000" / "file-000.parquet"
    change_table(path, lambda table: with_column(table, "action", [np.zeros(10**6, np.float32)] * 17))
    assert path.stat().st_size < 100_000
    with pytest.raises(FormatError, match=r"17 rows of 'action' would unpack to 17000000 values"):
        read(dataset_dir)


def test_a_picture_that_is_repeated_does_not_fill_the_memory(tmp_path: Path) -> None:
    """A dictionary of one large value, which each row names: 2 GB in a file of some kilobytes."""
    dataset_dir = copy_of_golden("v3", tmp_path)
    path = dataset_dir / "data" / "chunk-000" / "file-000.parquet"
    large = {"bytes": bytes(120 * 2**20), "path": ""}
    kind = pa.struct([("bytes", pa.dictionary(pa.int32(), pa.binary())), ("path", pa.string())])
    column = pa.StructArray.from_arrays(
        [
            pa.DictionaryArray.from_arrays(pa.array([0] * 17, pa.int32()), pa.array([large["bytes"]], pa.binary())),
            pa.array([""] * 17),
        ],
        fields=list(kind),
    )
    table = with_column(pq.read_table(path), "observation.images.wrist", column)
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 200_000
    with pytest.raises(FormatError, match=r"unpacks to more than \d+ bytes"):
        read(dataset_dir)


def test_a_film_may_not_be_something_else(tmp_path: Path) -> None:
    """A playlist would make the decoder open other files, or addresses."""
    dataset_dir = copy_of_golden("v3", tmp_path)
    (video,) = dataset_dir.rglob("*.mp4")
    video.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n")
    with pytest.raises(FormatError, match=f"{video}: is damaged"):
        read(dataset_dir)


def test_a_film_that_ends_early_is_noticed(tmp_path: Path) -> None:
    dataset_dir = copy_of_golden("v3", tmp_path)
    (video,) = dataset_dir.rglob("*.mp4")
    video.write_bytes(video.read_bytes()[:-400])
    with pytest.raises(FormatError, match=str(video)):
        read(dataset_dir)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda said: said.update(understudy=3), "has another version"),
        (lambda said: said.update(codecs={"nothing": {"name": "h264"}}), "does not fit"),
        (lambda said: said.update(codecs={"observation/front": {"name": "h265"}}), "does not fit"),
        (lambda said: said.update(codecs=["observation/front"]), "does not fit"),
        (lambda said: said["columns"].update({"action": "observation.state"}), "does not fit"),
        (lambda said: said["columns"].update({"action": "nothing"}), "does not fit"),
        (lambda said: said["columns"].update({"nothing": "action"}), "does not fit"),
        (lambda said: said["spec"].pop("action"), "does not fit"),
        (lambda said: said["spec"]["action"]["$array"].update(shape=[10**9]), "does not fit"),
        (lambda said: said["spec"]["action"]["$array"].update(high=-0.9), "action: a value is outside of its bounds"),
        (lambda said: said.update(columns=[]), "does not fit"),
    ],
)
def test_what_stands_beside_it(tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    dataset_dir = write(tmp_path / "d", [smooth_episode(5)], video="png")
    edit_json(dataset_dir / "meta" / "understudy" / "spec.json", change)
    with pytest.raises(FormatError, match=said):
        read(dataset_dir)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("length", 4, "has another length than in the dataset"),
        ("info", "{}x", "is not JSON"),
        ("info", "[]", "expected attributes"),
        ("info", json.dumps({"seed": "x"}), "info: .*seed: expected int"),
        ("0", b"", "expected 1 values of"),
        ("0", None, "expected 1 values of"),
    ],
)
def test_what_the_rest_holds(tmp_path: Path, column: str, value: Any, said: str) -> None:
    dataset_dir = write(tmp_path / "d", [smooth_episode(5)], video="png")
    path = dataset_dir / "meta" / "understudy" / "rest.parquet"

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(column)
        return table.set_column(index, column, pa.array([value], table.schema.field(index).type))

    change_table(path, change)
    with pytest.raises(FormatError, match=said):
        read(dataset_dir)


def test_a_flipped_bit_in_a_table_of_ours_is_always_noticed(tmp_path: Path) -> None:
    """Pages carry checksums; what is not in a page says where they are."""
    dataset_dir = write(tmp_path / "d", [smooth_episode(5)], video="png")
    (path,) = (dataset_dir / "data").rglob("*.parquet")
    whole, wanted = path.read_bytes(), read(dataset_dir)[0]
    end = pq.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size
    for at in range(4, 4 + end, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with suppress(FormatError):
            assert wanted.equals(read(dataset_dir)[0])  # a bit that nobody reads


@pytest.mark.parametrize("name", ["v3", "v21"])
def test_golden_data_sets_survive_damage(tmp_path: Path, name: str) -> None:
    """Those of lerobot have no checksums, so all that reading rests on is checked as it comes."""
    outcomes = set()
    for seed in range(120):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        dataset_dir = copy_of_golden(name, tmp_path)
        damage(dataset_dir, random.Random(seed))
        try:
            source = find_format("lerobot").read(dataset_dir, {})
            try:
                read_all(source)
            finally:
                source.close()
            outcomes.add("read")
        except FormatError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
