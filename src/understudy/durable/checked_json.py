"""Checked JSON: an object that carries a checksum of its content, so that a flipped bit is found when it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECK = "check"  # the key of the checksum


def to_checked_json(content: Mapping[str, Any]) -> bytes:
    """The object as text for people and programs, with its checksum."""
    return json.dumps({**content, CHECK: _digest(content)}, indent=1).encode()


def from_checked_json(data: bytes) -> tuple[dict[str, Any], bool | None]:
    """The object without its checksum, and whether that is right; None if it has none, as older files. ValueError if
    this is no JSON object.
    """
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    if CHECK not in found:
        return found, None
    check = found.pop(CHECK)
    return found, check == _digest(found)


def _digest(content: Mapping[str, Any]) -> str:
    """Of the values, not of the text: spaces and the order of keys do not count."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
