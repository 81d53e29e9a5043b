"""File identity: a name that stands for another file, or for none, is noticed."""

from pathlib import Path

import pytest

from understudy.core import StoreFailedError
from understudy.durable.file_identity import FileIdentity


def test_a_file_is_in_place_until_its_name_stands_for_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    with path.open() as opened:
        identities = [FileIdentity(path), FileIdentity(path, opened.fileno())]
        path.write_bytes(b"content does not matter")
        assert [identity.is_in_place() for identity in identities] == [True, True]
        path.rename(tmp_path / "moved")
        assert [identity.is_in_place() for identity in identities] == [False, False]
        path.write_bytes(b"another")
        assert [identity.is_in_place() for identity in identities] == [False, False]
        (tmp_path / "moved").replace(path)
        identities[0].check()


def test_the_error_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    identity = FileIdentity(path)
    path.unlink()
    with pytest.raises(StoreFailedError, match=r"nothing more is acknowledged.*understudy verify"):
        identity.check()
