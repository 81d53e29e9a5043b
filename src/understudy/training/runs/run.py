"""Run: one execution and its directory.

config.json         what it was asked to do, all defaults filled in; reloads equal
store/              what it lived, unless its steps go to a server
metrics.jsonl       how it went
checkpoints/        from where it can go on
policy.safetensors  the newest policy
videos/             the worst episodes of each evaluation
health/             what each of its processes does now
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from understudy import __version__
from understudy.core import UnderstudyError
from understudy.training.runs import config as configs

Config = TypeVar("Config")

CONFIG = "config.json"


class RunError(UnderstudyError):
    """A directory that is no run, or is one already, or is in use."""


class Run:
    """The directory of a run. `lock` is held by the one process that learns."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: int | None = None

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policy(self) -> Path:
        return self.path / "policy.safetensors"

    @property
    def videos(self) -> Path:
        return self.path / "videos"

    # ---- its config

    @staticmethod
    def create(path: str | Path, kind: str, config: Any) -> Run:
        """A new run; its store may be there already, with demonstrations in it."""
        run = Run(path)
        if (run.path / CONFIG).exists():
            raise RunError(f"{path}: there is a run already; `understudy resume {path}` goes on with it")
        run.path.mkdir(parents=True, exist_ok=True)
        said = {"kind": kind, "understudy": __version__, "config": configs.to_json(config)}
        new = run.path / f".{CONFIG}.new"
        with new.open("w") as file:
            json.dump(said, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.rename(run.path / CONFIG)
        return run

    @staticmethod
    @contextmanager
    def beginning(path: str | Path, kind: str, config: Any) -> Iterator[Run]:
        """A new run, at work in this block. If that fails before there is anything to go on from, there is no run."""
        run = Run.create(path, kind, config)
        try:
            yield run
        except BaseException:
            if not any(run.checkpoints.glob("*")):
                run.metrics.unlink(missing_ok=True)
                (run.path / CONFIG).unlink()
            raise

    @staticmethod
    def is_at(path: str | Path) -> bool:
        """Whether a directory is that of a run; others have files of that name too."""
        try:
            said: dict[str, Any] = json.loads((Path(path) / CONFIG).read_text())
            return {"kind", "understudy"} <= said.keys()
        except (OSError, ValueError, AttributeError):
            return False

    @property
    def kind(self) -> str:
        """Which algorithm it runs."""
        return str(self.said["kind"])

    def config(self, kind: type[Config]) -> Config:
        """What it was asked to do."""
        try:
            return configs.from_json(kind, self.said["config"])
        except configs.ConfigError as error:
            raise RunError(f"{self.path / CONFIG}: {error}") from None

    @property
    def said(self) -> dict[str, Any]:
        """All that its config file says."""
        path = self.path / CONFIG
        try:
            said = json.loads(path.read_text())
        except OSError:
            raise RunError(f"{self.path}: is not a run, it has no {CONFIG}; `understudy train` makes one") from None
        except ValueError as error:
            raise RunError(f"{path}: is not JSON ({error}); restore it") from None
        if not isinstance(said, dict) or not {"kind", "config"} <= said.keys():
            raise RunError(f"{path}: expected a kind and a config; restore it")
        return said

    # ---- who works on it

    def lock(self) -> Run:
        """Make this process the one that learns; let go with `close`."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            raise RunError(
                f"{self.path}: process {owner or '?'} is at work on it; stop that one, or choose another run"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor
        return self

    def wait_unlocked(self, wait_s: float) -> None:
        """Give a process that was at work on it some time to die."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self.lock().close()
                return
            except RunError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Run:
        return self.lock()

    def __exit__(self, *_: object) -> None:
        self.close()
