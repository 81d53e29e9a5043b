"""The code and the commands of the README and the docs are run as they stand."""

import re
from pathlib import Path

import pytest
from tests.docs import quickstart
from tests.docs.pages import DOCS

from understudy.cli import main

ROOT = DOCS.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("steps", ["200", pytest.param("3000", marks=pytest.mark.nightly)])
def test_the_quick_start_runs(steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block and every command; only the number of training steps is smaller in every run."""
    monkeypatch.chdir(tmp_path)
    quickstart.run_code(README)

    def run(args: list[str]) -> int:
        if args == ["--help"]:
            with pytest.raises(SystemExit, match="0"):
                main(args)
            return 0
        return main(args)

    assert quickstart.run_commands(README, run, steps=steps) >= 5


PAGES = [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
