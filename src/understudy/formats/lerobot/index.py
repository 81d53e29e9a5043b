"""Index: the files and rows of each episode, and the tasks by index, for v2.1 and v3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.formats.format import FormatError
from understudy.formats.lerobot.info import MOST_STEPS, Info, expand, parse_json, read_text, shown
from understudy.formats.lerobot.tables import Array, dense, names_in, read_table, refusing, texts, whole_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An episode: rows of one table, and a part of one video file per video camera."""

    number: int
    length: int
    num_tasks: int
    data: str  # path of the table, relative to the root
    row: int  # its first row in the table
    videos: Mapping[str, tuple[str, float]]  # key: the file and the time of its first frame in seconds


def read_index(info: Info) -> list[Entry]:
    """All episodes, in order of their index."""
    entries = _read_v3(info) if info.version == "3" else _read_v2(info)
    if len(entries) != info.num_episodes:
        raise FormatError(
            f"{info.root}: meta/info.json says {info.num_episodes} episodes, and {len(entries)} are listed; "
            f"fetch the dataset again"
        )
    for number, entry in enumerate(entries):
        if entry.number != number:
            raise FormatError(f"{info.root}: episode {number} is not listed; fetch the dataset again")
        if not 1 <= entry.length <= MOST_STEPS:
            raise FormatError(f"{info.root}: episode {number} has {entry.length} frames; fetch the dataset again")
    return entries


def read_tasks(info: Info) -> dict[int, str]:
    meta = info.root / "meta"
    if info.version == "3":
        path = meta / "tasks.parquet"
        if not path.exists():
            return {}
        names = names_in(path)
        text = next((name for name in ("task", "__index_level_0__") if name in names), None)
        if text is None:
            raise FormatError(f"{path}: expected a column 'task', got {shown(names)}; fetch the dataset again")
        table = read_table(path, [text, "task_index"], MOST_STEPS)
        if table is None:
            return {}
        with refusing(path):
            numbers = whole_numbers(table["task_index"], f"{path}: task_index")
            return dict(zip(numbers.tolist(), texts(table[text], f"{path}: {text}"), strict=True))
    tasks = {}
    for number, line in _lines(meta / "tasks.jsonl", "task_index"):
        if not isinstance(line.get("task"), str):
            raise FormatError(f"{meta / 'tasks.jsonl'}: task {number} has no text; fetch the dataset again")
        tasks[number] = line["task"]
    return tasks


def _read_v2(info: Info) -> list[Entry]:
    path = info.root / "meta" / "episodes.jsonl"
    keys = [key for key, feature in info.features.items() if feature.dtype == "video"]
    entries = []
    for number, line in _lines(path, "episode_index"):
        length, tasks = line.get("length"), line.get("tasks")
        if type(length) is not int or not isinstance(tasks, list):
            raise FormatError(f"{path}: episode {number} has no length or no tasks; fetch the dataset again")
        values: dict[str, int | str] = {"episode_index": number, "episode_chunk": number // info.chunk_files}
        entries.append(
            Entry(
                number=number,
                length=length,
                num_tasks=len(tasks),
                data=str(expand(info.data_path, values, path)),
                row=0,
                videos={key: (str(expand(info.video_path, {**values, "video_key": key}, path)), 0.0) for key in keys},
            )
        )
    return entries


def _lines(path: Path, number: str) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for index, text in enumerate(read_text(path).splitlines()):
        if text.strip():
            line = parse_json(text, f"{path}, line {index + 1}")
            if not isinstance(line, dict) or type(line.get(number)) is not int or not 0 <= line[number] < 2**31:
                raise FormatError(f"{path}, line {index + 1}: has no {number}; fetch the dataset again")
            found.append((line[number], line))
    return found


def _read_v3(info: Info) -> list[Entry]:
    folder = info.root / "meta" / "episodes"
    paths = sorted(folder.glob("*/*.parquet"))
    if not paths and info.num_episodes:
        raise FormatError(f"{folder}: holds no tables; fetch the dataset again")
    entries: list[Entry] = []
    firsts: dict[str, int] = {}  # of each table: index of its first row in the dataset
    for path in paths:
        entries += _read_v3_table(info, path, firsts)
    return entries


def _read_v3_table(info: Info, path: Path, firsts: dict[str, int]) -> list[Entry]:
    keys = [key for key, feature in info.features.items() if feature.dtype == "video"]
    videos = [f"videos/{key}/{what}" for key in keys for what in ("chunk_index", "file_index", "from_timestamp")]
    names = ["episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index"]
    table = read_table(path, [*names, "tasks", *videos], info.num_episodes)
    if table is None:
        return []

    def column(name: str) -> Array:
        if name.endswith("from_timestamp"):
            return dense(table[name], (), "float64", f"{path}: {name}")
        return whole_numbers(table[name], f"{path}: {name}")

    with refusing(path):
        numbers, lengths, starts, chunks, files = (column(name).tolist() for name in names)
        times = {name: column(name) for name in videos}
        num_tasks = [len(tasks or ()) for tasks in table["tasks"].to_pylist()]
    for name, values in times.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise FormatError(f"{path}: {name}: expected times from 0 on; fetch the dataset again")
    entries = []
    for at, number in enumerate(numbers):
        data = str(expand(info.data_path, {"chunk_index": chunks[at], "file_index": files[at]}, path))
        entries.append(
            Entry(
                number=number,
                length=lengths[at],
                num_tasks=num_tasks[at],
                data=data,
                row=starts[at] - firsts.setdefault(data, starts[at]),
                videos={key: _video(info, path, key, times, at) for key in keys},
            )
        )
    return entries


def _video(info: Info, path: Path, key: str, times: Mapping[str, Array], at: int) -> tuple[str, float]:
    values: dict[str, int | str] = {"video_key": key}
    values |= {name: int(times[f"videos/{key}/{name}"][at]) for name in ("chunk_index", "file_index")}
    return str(expand(info.video_path, values, path)), float(times[f"videos/{key}/from_timestamp"][at])
