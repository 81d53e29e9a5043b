"""Seal: the checksum of the catalog that a cleanly closed store leaves, so that later damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from understudy.core import DamageError
from understudy.durable import files
from understudy.durable.errors import store_error, store_errors
from understudy.replay.format.paths import CATALOG_FILE, SEAL_FILE


def catalog_digest(directory: Path) -> str:
    """The checksum of the catalog's file."""
    path = directory / CATALOG_FILE
    state = xxhash.xxh3_128()
    with store_errors(path, "read"), path.open("rb") as file:
        while block := file.read(1 << 24):
            state.update(block)
    return state.hexdigest()


def write_seal(directory: Path) -> None:
    """Write the checksum of the catalog; only when no connection is left that could change it."""
    content = _content(catalog_digest(directory))
    with store_errors(directory / SEAL_FILE, "write"):
        files.write_durably(directory / SEAL_FILE, content)


def check_seal(directory: Path) -> bool:
    """True if there is a seal and the catalog agrees, False if there is none; a DamageError if they differ."""
    seal = _read_seal(directory)
    if seal is not None and not (directory / CATALOG_FILE).exists():
        raise DamageError(f"{directory / CATALOG_FILE}: the catalog is gone; run `understudy repair`")
    while seal is not None:
        if seal == _content(catalog_digest(directory)):
            return True
        again = _read_seal(directory)
        if again == seal:  # a writer that opened the store meanwhile would have taken the seal away first
            raise DamageError(
                f"{directory / CATALOG_FILE}: it changed after the store was closed; run `understudy verify`, then "
                f"`understudy repair`"
            )
        seal = again
    return False


def _content(digest: str) -> bytes:
    return json.dumps({"catalog_xxh3_128": digest}).encode()


def _read_seal(directory: Path) -> bytes | None:
    path = directory / SEAL_FILE
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error(error, path, "read") from error
