"""Fingerprint: the code, config, parameters and world versions that a score was measured with."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import understudy
from understudy.core import Tree
from understudy.core import tree as trees
from understudy.core.spec import canonical_json


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """All that a score depends on: if any of it changes, the score may change."""

    understudy: str  # its version
    code: str  # a digest of its source files
    commit: str | None  # of its git repository, if it is in one; "+" if files have uncommitted changes
    config: str
    parameters: str
    env: str
    versions: Mapping[str, str]  # of python, the simulator and its libraries

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(*, config: Mapping[str, Any], parameters: Tree, env: str, versions: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of a policy measured in a world with the code of this process."""
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
    """A digest of the names, shapes, dtypes and bits of all arrays of a tree."""
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


def digest_of_policy(path: Path) -> str:
    """A digest of a policy. The weight files of a directory are large, so only their names and sizes count."""
    digest = xxhash.xxh3_128()
    for file in sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        if not path.is_dir() or file.suffix == ".json":
            digest.update(file.read_bytes())
    return digest.hexdigest()
