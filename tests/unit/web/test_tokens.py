from pathlib import Path

import pytest

from understudy.web.errors import AccessError
from understudy.web.tokens import (
    bearer_matches,
    check_token,
    new_token,
    read_token,
    token_matches,
    write_new_token,
)

TOKEN = "0123456789abcdef"


def test_a_new_token_is_long_enough_random_and_safe_in_a_url() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    for token in tokens:
        check_token(token, in_url=True)


def test_a_short_token_is_refused_with_a_way_to_make_one() -> None:
    check_token(TOKEN)
    with pytest.raises(AccessError, match=r"token: expected at least 16 characters, got 15; make one with `python -c"):
        check_token(TOKEN[:-1])


@pytest.mark.parametrize("token", ["short", "#" * 20, "a b" * 10, "ä" * 20, "a-b_" * 5])
def test_in_a_url_it_is_letters_and_digits(token: str) -> None:
    with pytest.raises(AccessError, match=rf"at least 16 letters and digits, .* got {len(token)} characters; make one"):
        check_token(token, in_url=True)


def test_only_the_token_matches() -> None:
    assert token_matches(TOKEN, TOKEN)
    assert token_matches(TOKEN.encode(), TOKEN)
    assert bearer_matches(f"Bearer {TOKEN}", TOKEN)
    for wrong in ("", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "ä" * 16):
        assert not token_matches(wrong, TOKEN)
        assert not bearer_matches(f"Bearer {wrong}", TOKEN)
    for header in (TOKEN, f"bearer {TOKEN}", f"Bearer  {TOKEN}", b"\xff"):
        assert not bearer_matches(header, TOKEN)


def test_a_token_file_is_private_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_new_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    check_token(read_token(path), in_url=True)
    with pytest.raises(FileExistsError):
        write_new_token(path)
    path.write_text(f"\n {TOKEN} \n")
    assert read_token(path) == TOKEN


@pytest.mark.parametrize("content", [b"", b"two\nlines", "ä".encode() * 20, b"\xff\xfe", None])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AccessError, match=f"^{path}: (cannot be read .*; pass a file that|expected a token of plain)"):
        read_token(path)
