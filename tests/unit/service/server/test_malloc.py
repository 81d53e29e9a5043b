"""Malloc: glibc takes the options; another C library has none."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from understudy.service.server import malloc

ASK = "from understudy.service.server.malloc import keep_large_blocks as keep; print(keep())"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_glibc_takes_the_options() -> None:
    # In a process of its own: the options stay until its end.
    assert subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout == "True\n"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert malloc.keep_large_blocks() is False
