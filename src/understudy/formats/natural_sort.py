"""Natural sort order of names with numbers."""

from __future__ import annotations

import re


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which demo_2 comes before demo_10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
