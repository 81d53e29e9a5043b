"""Metrics: metrics.jsonl, one JSON object a line, and optional sinks such as TensorBoard.

A line has a `kind` ("train", "episode", "collection", "evaluation"), the environment steps and updates so far, and
numbers. A resumed run removes the lines written after its checkpoint, so that the file has no duplicates.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from understudy.core import UnderstudyError
from understudy.durable import files

SinkName: TypeAlias = Literal["tensorboard", "wandb"]


class Sink(Protocol):
    """A destination for numbers besides the file."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Appends lines to metrics.jsonl. One process writes; any number may read."""

    def __init__(self, path: Path, sinks: tuple[Sink, ...] = ()):
        self._path = path
        self._file = path.open("ab")
        self._sinks = sinks

    @property
    def position(self) -> int:
        """The size of the file in bytes, synced to disk, so that a checkpoint may rely on it."""
        self._file.flush()
        files.sync_data(self._file.fileno())
        return self._file.tell()

    def write(self, kind: str, *, step: int, update: int, **values: Any) -> None:
        """Append one line. Values may be any JSON; sinks receive the finite numbers only."""
        line = {"kind": kind, "step": step, "update": update, **values}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for sink in self._sinks:
            sink.write(kind, step, numbers)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def rewind(path: Path, position: int) -> int:
    """Remove all lines after a position in bytes; returns how many were removed."""
    if not path.exists():
        if position:
            raise UnderstudyError(f"{path}: is missing, and the checkpoint needs it; restore it, or start a new run")
        return 0
    content = path.read_bytes()
    if len(content) < position:
        raise UnderstudyError(
            f"{path}: has {len(content)} bytes, and the checkpoint needs {position}; restore it, or start a new run"
        )
    with path.open("r+b") as file:
        file.truncate(position)
        files.sync_data(file.fileno())
    return content.count(b"\n", position)


def read_metrics(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The lines so far, of one kind or all. A line that is still being written is skipped."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                found = json.loads(line)
                if kind is None or found["kind"] == kind:
                    yield found


def open_sink(name: SinkName, directory: Path, config: Mapping[str, Any]) -> Sink:
    """TensorBoard files in the run directory, or Weights & Biases (offline unless WANDB_MODE is set).

    WANDB_PROJECT and WANDB_NAME name its project and its run; by default understudy and the name of the directory.
    """
    try:
        return _TensorBoard(directory) if name == "tensorboard" else _Wandb(directory, config)
    except ModuleNotFoundError as error:
        raise UnderstudyError(f"{name}: {error.name} is not installed; run `pip install {name}`") from None


class _TensorBoard:
    def __init__(self, directory: Path):
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(str(directory / "tensorboard"))

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, directory: Path, config: Mapping[str, Any]):
        module = importlib.import_module("wandb")
        self._run: Any = module.init(
            project=os.environ.get("WANDB_PROJECT", "understudy"),
            name=os.environ.get("WANDB_NAME", directory.resolve().name),
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(directory),
            config=dict(config),
        )

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
