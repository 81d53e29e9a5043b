"""Parsing of format options, which are given as text."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.formats.format import FormatError


def one_of(format: str, option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise FormatError(f"{format}: expected {option}={'|'.join(allowed)}, got {value!r}")
    return value


def number(format: str, option: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value) < 2**31:
        raise FormatError(f"{format}: expected {option}= a number from 1, got {value!r}")
    return int(value)
