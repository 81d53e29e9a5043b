"""A real Chromium, for tests of pages; `browser` and `page` are fixtures, in conftest.py."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
LIMIT_S = 90.0  # for whatever is waited for; the machine may be busy
# A message with its "Undo" disappears after ten seconds, which a test on a busy machine may need to get there.
KEEP_TOASTS = """
const plain = window.setTimeout;
window.setTimeout = (call, ms, ...rest) => plain(call, ms === 10000 ? 1e8 : ms, ...rest);
"""


@contextlib.contextmanager
def open_page(browser: Any, *, phone: bool = False, dark: bool = False) -> Iterator[Any]:
    """A page that complains about any error of its own."""
    size = {"width": 390, "height": 844} if phone else {"width": 1360, "height": 850}
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
    made = context.new_page()
    made.set_default_timeout(LIMIT_S * 1e3)
    made.add_init_script(KEEP_TOASTS)
    errors: list[str] = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("console", lambda said: errors.append(said.text) if "Content Security" in said.text else None)
    yield made
    context.close()
    assert errors == []
