"""Seal: a catalog that changed after the store was closed is found."""

from pathlib import Path

import pytest

from understudy.core import DamageError
from understudy.replay.format.paths import CATALOG_FILE, SEAL_FILE
from understudy.replay.format.seal import check_seal, write_seal


def test_a_seal_holds_until_the_catalog_changes(tmp_path: Path) -> None:
    (tmp_path / CATALOG_FILE).write_bytes(b"content")
    assert check_seal(tmp_path) is False  # no seal
    write_seal(tmp_path)
    assert check_seal(tmp_path) is True
    (tmp_path / CATALOG_FILE).write_bytes(b"contenT")
    with pytest.raises(DamageError, match="it changed after the store was closed; run `understudy verify`"):
        check_seal(tmp_path)
    (tmp_path / CATALOG_FILE).unlink()
    with pytest.raises(DamageError, match="the catalog is gone; run `understudy repair`"):
        check_seal(tmp_path)
    (tmp_path / SEAL_FILE).unlink()
    assert check_seal(tmp_path) is False
