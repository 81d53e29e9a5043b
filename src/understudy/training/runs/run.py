"""Run: one training run and its directory.

config.json         the format of the directory, the kind of run and its config with all defaults filled in
store/              the recorded episodes, unless they are written to a server
metrics.jsonl       the metrics
checkpoints/        the states from which the run can resume
policy.safetensors  the newest policy
policy/             the same of an OpenVLA, complete, at the end of an on-policy run
policies/           the policies of earlier iterations, if an on-policy run keeps them
videos/             the worst episodes of each evaluation
demos/              the demonstrations with the actions of the base policy, if an RLPD run has one
health/             what each process of the run is doing now
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from understudy import __version__
from understudy.core import UnderstudyError
from understudy.durable import files
from understudy.durable.checked_json import CHECK, from_checked_json, to_checked_json
from understudy.durable.lock import FileLock, LockHeldError
from understudy.replay.format.paths import CATALOG_FILE
from understudy.training.runs import config as configs
from understudy.training.runs.health import HEALTH

logger = logging.getLogger(__name__)

Config = TypeVar("Config")

CONFIG = "config.json"
POLICY_DIR, KEPT_DIR = "policy", "policies"
ON_POLICY = ("grpo", "rloo", "reinforce", "ppo")  # kinds of run that roll out groups of episodes
FORMAT = 2  # of a run's directory; raised whenever an older run can no longer be read

_kept_locks: list[FileLock] = []  # until the process ends


class RunError(UnderstudyError):
    """A directory that is not a run, already is one, is in use, or has another format."""


class Run:
    """The directory of a run. The one process that learns holds its `lock`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: FileLock | None = None

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def base_demos(self) -> Path:
        return self.path / "demos"

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
        """Create a new run. Its store may exist already, with demonstrations in it."""
        run = Run(path)
        if (run.path / CONFIG).exists():
            raise RunError(f"{path}: already is a run; `understudy resume {path}` continues it")
        run.path.mkdir(parents=True, exist_ok=True)
        metadata = {
            "format": FORMAT,
            "kind": kind,
            "understudy": __version__,
            "config": configs.to_json(config),
        }
        files.write_durably(run.path / CONFIG, to_checked_json(metadata))
        return run

    @staticmethod
    @contextmanager
    def create_or_remove(path: str | Path, kind: str, config: Any) -> Iterator[Run]:
        """Create a new run for this block, and remove it again if the block fails before the first checkpoint."""
        run = Run(path)
        new = [folder for folder in (run.store, run.path, *run.path.parents) if not folder.exists()]
        Run.create(path, kind, config)
        try:
            yield run
        except BaseException:
            if not any(run.checkpoints.glob("*")):
                run.metrics.unlink(missing_ok=True)
                (run.path / CONFIG).unlink()
                run._remove(new)
            raise

    def _remove(self, new: list[Path]) -> None:
        """Remove the `new` directories, the innermost first, unless something is in them that a start does not make."""
        if self.path in new:
            self.close()
            (self.path / "lock").unlink(missing_ok=True)
            shutil.rmtree(self.path / HEALTH, ignore_errors=True)
            shutil.rmtree(self.base_demos, ignore_errors=True)
        if self.store in new and not any((self.store / "segments").glob("*")):
            shutil.rmtree(self.store, ignore_errors=True)
        for folder in new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    @staticmethod
    def is_at(path: str | Path) -> bool:
        """Whether a directory is a run, of any format. Other programs write a config.json too."""
        try:
            metadata: dict[str, Any] = json.loads((Path(path) / CONFIG).read_text())
            return {"kind", "understudy"} <= metadata.keys()
        except (OSError, ValueError, AttributeError):
            return False

    @property
    def kind(self) -> str:
        """The algorithm, such as "rlpd" or "grpo"."""
        return str(self.metadata["kind"])

    def config(self, kind: type[Config]) -> Config:
        """The config that the run was created with."""
        content = self.metadata["config"]
        try:
            config = configs.from_json(kind, content)
        except UnderstudyError as error:  # a ConfigError, or what a part of the config says of its own values
            raise RunError(f"{self.path / CONFIG}: {error}") from None
        self._warn_if_changed()
        return config

    def _warn_if_changed(self) -> None:
        if from_checked_json((self.path / CONFIG).read_bytes())[1] is False:
            logger.warning(
                "%s: was changed since the run was created; if nobody edited it, it is damaged: stop, and restore it",
                self.path / CONFIG,
            )

    def extend(self, option: str, number: int) -> None:
        """Let the run train for longer: its `option`, such as "steps", is `number` from now on."""
        with self:
            metadata = self.metadata
            before = metadata["config"][option]
            if number < before:
                raise RunError(f"{option}: expected {before:,} or more, which the run was created with, got {number:,}")
            self._warn_if_changed()  # what is written now has a checksum that holds
            metadata["config"][option] = number
            files.write_durably(self.path / CONFIG, to_checked_json(metadata))

    @property
    def metadata(self) -> dict[str, Any]:
        """The content of its config.json; refuses a run of another format."""
        path = self.path / CONFIG
        try:
            metadata = json.loads(path.read_text())
        except OSError:
            raise self._no_run() from None
        except ValueError as error:
            raise RunError(f"{path}: is not JSON ({error}); restore it") from None
        if not isinstance(metadata, dict) or not {"kind", "config"} <= metadata.keys():
            raise RunError(f"{path}: expected a kind and a config; restore it")
        if metadata.get("format", 1) != FORMAT:
            raise RunError(
                f"{self.path}: is a run of format {metadata.get('format', 1)}, and this version of understudy reads "
                f"format {FORMAT}; start a new run, or resume this one with the version that wrote it"
            )
        return {name: value for name, value in metadata.items() if name != CHECK}

    def _no_run(self) -> RunError:
        if not self.path.is_dir():
            return RunError(f"{self.path}: is not a run, there is no such directory; check the path")
        if (self.path / CATALOG_FILE).is_file():
            return RunError(f"{self.path}: is a store, not a run; `understudy init` and `understudy train` make a run")
        return RunError(f"{self.path}: is not a run, it has no {CONFIG}; create one with `understudy train`")

    # ---- its lock

    def lock(self) -> Run:
        """Make this process the one that learns; `close` releases the lock."""
        try:
            self._lock = FileLock(self.path / "lock")
        except LockHeldError as error:
            raise RunError(
                f"{self.path}: another process is training it ({error.owner}); stop that process, or choose another run"
            ) from None
        return self

    def wait_unlocked(self, wait_s: float) -> None:
        """Wait until the process that holds the lock has ended; raises after `wait_s`."""
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
            self._lock.release()
            self._lock = None

    def keep_locked(self) -> None:
        """Leave the lock to this process until it ends: a thread of it still writes, and nobody waits for that."""
        if self._lock is not None:
            _kept_locks.append(self._lock)
            self._lock = None

    def __enter__(self) -> Run:
        return self.lock()

    def __exit__(self, *_: object) -> None:
        self.close()


def policy_path(given: str | Path, *, option: str = "policy") -> Path:
    """The path of a policy, given as that path, as the run that trained it, or as what a run kept of an iteration."""
    path = Path(given)
    run = run_of(path)
    if run is not None:
        path = path / POLICY_DIR if (path / POLICY_DIR).is_dir() else Run(path).policy
    if path.exists():
        return path
    if run is not None and run.path == Path(given):
        raise configs.ConfigError(
            f"{option}: the run {run.path} has no policy yet; `understudy resume {run.path}` goes on training it"
        )
    raise configs.ConfigError(f"{option}: expected a policy file or a run with one, got {given}, which does not exist")


def run_of(path: Path) -> Run | None:
    """The run at a path, or the run that kept the policy of an iteration there."""
    at = path.parent.parent if path.parent.name == KEPT_DIR else path
    return Run(at) if Run.is_at(at) else None
