"""`python -m tests.again`: what failed last, once more and alone; the answer is that of this second run.

Many tests time and kill real processes, and a busy machine can fail one. More than a few are no accident: they are not
tried again.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
MAX_ACCIDENTS = 3


def names(last_failed: Path) -> list[str]:
    """Of the tests that failed, without the group that pytest-xdist puts behind them (for which --last-failed would
    not find them)."""
    try:
        return [re.sub(r"@[\w.]+$", "", name) for name in json.loads(last_failed.read_text())]
    except FileNotFoundError:
        return []


def main() -> int:
    """Try them."""
    failed = names(LAST_FAILED)
    if not 0 < len(failed) <= MAX_ACCIDENTS:
        print(f"{len(failed)} tests failed; only up to {MAX_ACCIDENTS} are tried again")
        return 1
    print("once more, alone:", *failed, sep="\n  ", flush=True)
    return int(pytest.main(["-m", "not slow", *failed]))


if __name__ == "__main__":
    sys.exit(main())
