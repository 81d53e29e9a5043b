"""Scores: a success rate with its interval, and the fingerprint of what it was measured on."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import understudy
from understudy.core import Tree
from understudy.core import tree as trees
from understudy.core.spec import canonical_json

Z_95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Score:
    """Successes of so many episodes."""

    num_successes: int
    num_episodes: int

    @property
    def rate(self) -> float:
        return self.num_successes / self.num_episodes if self.num_episodes else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, 95 %."""
        return wilson(self.num_successes, self.num_episodes)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.rate:.0f} % of {self.num_episodes} (95 %: {100 * low:.0f} to {100 * high:.0f})"


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of a success rate that is right also near 0 and 1, and for few trials."""
    if not 0 <= successes <= trials:
        raise ValueError(f"successes: expected 0 to {trials}, got {successes}")
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    whole = 1 + z * z / trials
    return max((centre - spread) / whole, 0.0), min((centre + spread) / whole, 1.0)


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a score is of: change any of it, and the score may change."""

    understudy: str  # its version
    code: str  # of its files
    commit: str | None  # of its repository, if it is in one; "+" if files were changed since
    config: str
    parameters: str
    env: str
    versions: Mapping[str, str]  # of what the world stands on

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(*, config: Mapping[str, Any], parameters: Tree, env: str, versions: Mapping[str, str]) -> Fingerprint:
    """Of the code as it is now."""
    return Fingerprint(
        understudy=understudy.__version__,
        code=_code(),
        commit=_commit(),
        config=_digest(canonical_json(dict(config)).encode()),
        parameters=digest_of_arrays(parameters),
        env=env,
        versions={"python": platform.python_version(), **versions},
    )


def digest_of_arrays(tree: Tree) -> str:
    """The same for the same names, shapes, types and bits."""
    hasher = hashlib.sha256()
    for path, leaf in sorted(trees.leaves(tree)):
        array = np.ascontiguousarray(leaf)
        hasher.update(json.dumps([path, list(array.shape), array.dtype.str]).encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()[:16]


@cache
def _code() -> str:
    hasher = hashlib.sha256()
    root = Path(understudy.__file__).parent
    for path in sorted(root.rglob("*.py")):
        hasher.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


@cache
def _commit() -> str | None:
    try:
        number = _git("rev-parse", "--short=12", "HEAD")
        return f"{number}{'+' if _git('status', '--porcelain', '--', '.') else ''}"
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    root = Path(understudy.__file__).parent
    found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=5)
    return found.stdout.strip()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
