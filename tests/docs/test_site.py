"""The site of the docs builds strictly and without a network; its reference and its table of peers are true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from tests.docs import api_reference, cli_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ZENSICAL = Path(sysconfig.get_path("scripts")) / "zensical"
needs_zensical = pytest.mark.skipif(not ZENSICAL.exists(), reason="zensical is not installed")


def build(place: Path) -> subprocess.CompletedProcess[str]:
    command = [ZENSICAL, "build", "--strict"]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False)


@needs_zensical
def test_it_builds_strictly_and_asks_nobody_else(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and that of what is not found
    for page in pages:
        text = page.read_text()
        assert re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\" >]*)", text) == [], page
    (tmp_path / "docs" / "concepts.md").write_text("# Concepts\n\n[a page that is not there](nowhere.md)\n")
    assert build(tmp_path).returncode != 0  # strict means strict


def test_every_page_is_in_the_menu_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"(\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    there = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(listed) == there, "put it under nav in mkdocs.yml"


def test_no_page_links_to_what_the_site_does_not_have() -> None:
    for path in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).resolve().is_relative_to(DOCS), f"{path.name}: {target}"


def test_the_commands_are_those_that_there_are() -> None:
    wanted = cli_reference.page()
    assert cli_reference.PAGE.read_text() == wanted, "run `python -m tests.docs.cli_reference`"


def test_every_public_name_is_in_the_reference() -> None:
    """Also that of a package or a method that is new; and each of them says what it is."""
    packages = {
        ".".join(path.parent.relative_to(ROOT / "src").parts)
        for path in (ROOT / "src" / "understudy").glob("*/__init__.py")
        if "__all__" in path.read_text()
    }
    assert packages <= api_reference.PACKAGES.keys(), "add it to PACKAGES in tests/docs/api_reference.py"
    text = api_reference.PAGE.read_text()
    wanted = api_reference.headings(api_reference.page())
    assert len(wanted) > 500
    assert wanted == api_reference.headings(text), "run `python -m tests.docs.api_reference`"
    for package in api_reference.PACKAGES:
        for name in api_reference.names_of(package):
            assert f"{package}.{name}" in wanted, name
    bare = re.findall(r"### `(.+)`\n\n(?:`.+`\n)?\n*(?=###|##|- |\Z)", text)
    assert bare == [], "give it a docstring"


@pytest.mark.nightly
def test_the_reference_is_up_to_date() -> None:
    assert api_reference.PAGE.read_text() == api_reference.page(), "run `python -m tests.docs.api_reference`"


def test_what_the_table_of_peers_names_is_there() -> None:
    named = re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", (DOCS / "peers.md").read_text())
    assert len(named) >= 10
    assert [path for path in named if not (ROOT / path).exists()] == []
