"""Makes the data sets beside this file, with the real TensorFlow Datasets; and says what it reads from others.

    python tests/golden/formats/rlds/make.py make DIR         # needs tensorflow-datasets 4.9, tensorflow, array_record
    python tests/golden/formats/rlds/make.py read DIR OUT     # what TensorFlow Datasets reads from DIR, as OUT.npz
    python tests/golden/formats/rlds/make.py size DIR N       # N episodes with two JPEG cameras, for benchmarks/rlds.py

Everything comes from a seed. `truth.npz` holds what TensorFlow Datasets reads from them, by
<data set>/<split>/<episode>/<path>. What `make` made is kept as `rlds.tar.xz`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

F = tfds.features
FLAGS = {
    "is_first": F.Scalar(dtype=np.bool_),
    "is_last": F.Scalar(dtype=np.bool_),
    "is_terminal": F.Scalar(dtype=np.bool_),
}

NESTED = F.FeaturesDict(
    {
        "episode_metadata": F.FeaturesDict(
            {
                "file_path": F.Text(),
                "number": F.Scalar(dtype=np.int64),
                "success": F.Scalar(dtype=np.bool_),
                "weight": F.Scalar(dtype=np.float32),
                "start": F.Tensor(shape=(3,), dtype=np.float32),
            }
        ),
        "steps": F.Dataset(
            {
                "observation": F.FeaturesDict(
                    {
                        "arm": {"pose": F.Tensor(shape=(2, 3), dtype=np.float32), "touch": F.Scalar(dtype=np.bool_)},
                        "double": F.Tensor(shape=(4,), dtype=np.float64, encoding="bytes"),
                        "packed": F.Tensor(shape=(5, 5), dtype=np.float32, encoding="zlib"),
                        "half": F.Tensor(shape=(2,), dtype=np.float16),
                        "large": F.Scalar(dtype=np.uint64),
                        "negative": F.Tensor(shape=(3,), dtype=np.int32),
                        "depth": F.Image(shape=(6, 5, 1), dtype=np.uint16, encoding_format="png"),
                        "metres": F.Image(shape=(6, 5, 1), dtype=np.float32),
                        "grey": F.Image(shape=(8, 7, 1), encoding_format="jpeg"),
                        "image": F.Image(encoding_format="png"),
                        "points": F.Sequence(F.Tensor(shape=(2,), dtype=np.float32)),
                        "boxes": F.Sequence({"corner": F.Tensor(shape=(2,), dtype=np.int64), "name": F.Text()}),
                        "frames": F.Sequence(F.Image(shape=(4, 4, 3), encoding_format="png")),
                        "words": F.Sequence(F.Text()),
                        "colour": F.ClassLabel(names=["red", "green"]),
                        "variable": F.Tensor(shape=(None, 2), dtype=np.float32, encoding="bytes"),
                        "grid": F.Tensor(shape=(None, None), dtype=np.float32, encoding="zlib"),
                    }
                ),
                "action": F.FeaturesDict(
                    {"arm": F.Tensor(shape=(2,), dtype=np.float32), "grip": F.Scalar(dtype=np.int64)}
                ),
                "reward": F.Scalar(dtype=np.float32),
                "discount": F.Scalar(dtype=np.float32),
                "language_instruction": F.Text(),
                **FLAGS,
            }
        ),
    }
)

PLAIN = F.FeaturesDict(
    {
        "steps": F.Dataset(
            {
                "observation": F.Tensor(shape=(3,), dtype=np.float32),
                "action": F.Tensor(shape=(1,), dtype=np.float64),
                "reward": F.Scalar(dtype=np.float64),
                "discount": F.Scalar(dtype=np.float64),
                **FLAGS,
            }
        ),
    }
)


CLASSES: dict[str, type] = {}  # TensorFlow Datasets takes each name once


def flags(rows: int, terminal: bool) -> dict[str, np.ndarray]:
    at = np.arange(rows)
    last = at == rows - 1
    return {"is_first": at == 0, "is_last": last, "is_terminal": last & terminal}


def nested_episode(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows = 2 + seed % 4

    def step(number: int) -> dict[str, Any]:
        some = [int(n) for n in rng.integers(0, 4, 5)]
        return {
            "observation": {
                "arm": {"pose": rng.normal(size=(2, 3)).astype(np.float32), "touch": bool(rng.integers(2))},
                "double": rng.normal(size=4),
                "packed": rng.normal(size=(5, 5)).astype(np.float32),
                "half": rng.normal(size=2).astype(np.float16),
                "large": np.uint64(rng.integers(0, 2**63)) * np.uint64(2) + np.uint64(1),
                "negative": rng.integers(-(2**31), 2**31, 3).astype(np.int32),
                "depth": rng.integers(0, 2**16, (6, 5, 1)).astype(np.uint16),
                "metres": rng.normal(size=(6, 5, 1)).astype(np.float32),
                "grey": np.full((8, 7, 1), rng.integers(256), np.uint8),
                "image": rng.integers(0, 256, (9, 7, 3)).astype(np.uint8),
                "points": rng.normal(size=(some[0], 2)).astype(np.float32),
                "boxes": [{"corner": rng.integers(0, 9, 2), "name": f"kästchen {n}"} for n in range(some[1])],
                "frames": rng.integers(0, 256, (some[2], 4, 4, 3)).astype(np.uint8),
                "words": ["a", "ß"][: some[3]],
                "colour": int(rng.integers(2)),
                "variable": rng.normal(size=(some[4], 2)).astype(np.float32),
                "grid": rng.normal(size=(some[0], some[1])).astype(np.float32),
            },
            "action": {"arm": rng.normal(size=2).astype(np.float32), "grip": int(rng.integers(-9, 9))},
            "reward": np.float32(rng.normal()),
            "discount": np.float32(0.99),
            "language_instruction": "stelle die Tasse ab ☕",
            **{name: flag[number] for name, flag in flags(rows, seed % 2 == 0).items()},
        }

    return {
        "episode_metadata": {
            "file_path": f"/data/épisode_{seed}",
            "number": seed,
            "success": seed % 2 == 0,
            "weight": np.float32(0.5),
            "start": rng.normal(size=3).astype(np.float32),
        },
        "steps": [step(number) for number in range(rows)],
    }


def plain_episode(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(1000 + seed)
    rows = 1 + seed % 5
    said = flags(rows, seed % 3 == 0)
    return {
        "steps": [
            {
                "observation": rng.normal(size=3).astype(np.float32),
                "action": rng.normal(size=1),
                "reward": rng.normal(),
                "discount": 1.0,
                **{name: flag[number] for name, flag in said.items()},
            }
            for number in range(rows)
        ]
    }


def camera_episode(seed: int, rows: int = 50) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.arange(128), np.arange(128))[..., None]
    said = flags(rows, True)

    def picture(number: int) -> np.ndarray:
        return (ramp + 3 * number + rng.integers(0, 20, (128, 128, 3))).astype(np.uint8)

    return {
        "steps": [
            {
                "observation": {
                    "wrist_1": picture(n),
                    "wrist_2": picture(2 * n),
                    "state": rng.normal(size=20).astype(np.float32),
                },
                "action": rng.normal(size=7).astype(np.float32),
                "reward": 0.0,
                "discount": 1.0,
                **{name: flag[n] for name, flag in said.items()},
            }
            for n in range(rows)
        ]
    }


def builder(
    name: str, features: F.FeaturesDict, splits: dict[str, int], episode: Any, place: Path, **config: Any
) -> Any:
    """A data set of its own class, as its author would have written it."""
    methods = {
        "VERSION": tfds.core.Version("1.0.0"),
        "_info": lambda self: tfds.core.DatasetInfo(builder=self, features=features),
        "_split_generators": lambda self, _: {
            split: ((f"{n:06d}", episode(first + n)) for n in range(count))
            for first, (split, count) in zip((0, 100, 200), splits.items(), strict=False)
        },
        "_generate_examples": lambda self: iter(()),
        "__module__": "__main__",
    }
    if name not in CLASSES:
        CLASSES[name] = type(name.title(), (tfds.core.GeneratorBasedBuilder,), methods)
    done = CLASSES[name](data_dir=place, file_format=config.pop("file_format", "tfrecord"))
    done.download_and_prepare(download_config=tfds.download.DownloadConfig(**config, compute_stats="skip"))
    return done


def flat(value: Any, path: str, into: dict[str, np.ndarray]) -> None:
    if isinstance(value, dict):
        for name, child in value.items():
            flat(child, f"{path}/{name}", into)
    elif isinstance(value, tf.RaggedTensor | tf.data.Dataset):
        for number, child in enumerate(value):
            flat(child, f"{path}/#{number}", into)
    else:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            array = np.array([x.decode() if isinstance(x, bytes) else str(x) for x in array.reshape(-1)]).reshape(
                array.shape
            )
        elif array.dtype.kind == "S":
            array = np.char.decode(array, "utf-8")
        into[path] = array


def read(place: Path) -> dict[str, np.ndarray]:
    """Everything TensorFlow Datasets reads, as numpy: steps one by one."""
    found: dict[str, np.ndarray] = {}
    builder = tfds.builder_from_directory(place)
    for split in builder.info.splits:
        if builder.info.file_format.value == "array_record":
            episodes = iter(builder.as_data_source(split=split))
        else:
            episodes = iter(builder.as_dataset(split=split, shuffle_files=False))
        for number, episode in enumerate(episodes):
            for name, value in episode.items():
                if name == "steps":
                    for row, step in enumerate(value):
                        flat(step, f"{split}/{number}/steps/#{row}", found)
                else:
                    flat(value, f"{split}/{number}/{name}", found)
    return found


def make(place: Path) -> None:
    truth: dict[str, np.ndarray] = {}
    for name, features, splits, episode in (
        ("nested", NESTED, {"train": 6, "val": 3}, nested_episode),
        ("plain", PLAIN, {"train": 7}, plain_episode),
    ):
        for kind in ("tfrecord", "array_record"):
            made = builder(name, features, splits, episode, place / kind, file_format=kind, num_shards=3)
            order = made.info.splits
            print(name, kind, {split: found.shard_lengths for split, found in order.items()})
        for path, value in read(place / "tfrecord" / name / "1.0.0").items():
            truth[f"{name}/{path}"] = value
    np.savez_compressed(place / "truth.npz", **truth)
    for kind in ("GZIP", "ZLIB"):  # TensorFlow writes such shards; TensorFlow Datasets does not
        source = place / "tfrecord" / "plain" / "1.0.0"
        target = place / kind.lower() / "plain" / "1.0.0"
        target.mkdir(parents=True)
        for file in source.iterdir():
            if ".tfrecord-" in file.name:
                with tf.io.TFRecordWriter(str(target / file.name), kind) as writer:
                    for record in tf.data.TFRecordDataset(str(file)):
                        writer.write(record.numpy())
            else:
                (target / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    elif sys.argv[1] == "read":
        np.savez(sys.argv[3], **read(Path(sys.argv[2])))
    else:
        camera = F.Image(shape=(128, 128, 3), encoding_format="jpeg")
        observation = {"wrist_1": camera, "wrist_2": camera, "state": F.Tensor(shape=(20,), dtype=np.float32)}
        features = F.FeaturesDict(
            {
                "steps": F.Dataset(
                    {
                        "observation": observation,
                        "action": F.Tensor(shape=(7,), dtype=np.float32),
                        "reward": F.Scalar(dtype=np.float32),
                        "discount": F.Scalar(dtype=np.float32),
                        **FLAGS,
                    }
                )
            }
        )
        builder("cameras", features, {"train": int(sys.argv[3])}, camera_episode, Path(sys.argv[2]), num_shards=4)
