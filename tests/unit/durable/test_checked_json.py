"""Checked JSON: what was written is read, damage is found, and older files without a checksum are read too."""

from __future__ import annotations

import json

import pytest

from understudy.durable.checked_json import from_checked_json, to_checked_json

CONTENT = {"b": [1, 2.5, None], "a": {"text": "é", "flag": True}}


def test_what_was_written_is_read() -> None:
    assert from_checked_json(to_checked_json(CONTENT)) == (CONTENT, True)
    again = json.dumps(json.loads(to_checked_json(CONTENT)), sort_keys=True)  # the order and the spaces do not count
    assert from_checked_json(again.encode()) == (CONTENT, True)


def test_a_change_is_found() -> None:
    assert from_checked_json(to_checked_json(CONTENT).replace(b"2.5", b"2.6"))[1] is False


def test_a_file_without_a_checksum_is_read() -> None:
    assert from_checked_json(json.dumps(CONTENT).encode()) == (CONTENT, None)


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff\xff", b""])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"object|Expecting|codec|decode"):
        from_checked_json(data)
