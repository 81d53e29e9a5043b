"""The pages of docs, and how the code in them is run as it stands."""

from __future__ import annotations

from pathlib import Path

from tests.docs.quickstart import blocks

DOCS = Path(__file__).parents[2] / "docs"


def run_page(page: Path, *, server: str = "127.0.0.1:7447") -> int:
    """Run the blocks of a page, each with the names of those before it; returns how many there are.

    `server` is the address of the one that is there, in place of the one that pages name.
    """
    names: dict[str, object] = {}
    found = blocks(page.read_text().replace("127.0.0.1:7447", server))
    for number, block in enumerate(found):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)
    return len(found)
