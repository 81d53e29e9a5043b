"""`make release` refuses what must not go out; the whole of it is rehearsed by the nightly workflow."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import release
from tests.release import ROOT, Refused

CHANGELOG = "# Changelog\n\n## [0.2.0] - 2026-11-16\n\n- New.\n\n## [0.1.0] - 2026-01-01\n"
METADATA = "Name: understudy-robotics\nRequires-Python: <3.15,>=3.11\n\n[a](https://example.org/a) [b](#b)\n"
PROJECT: dict[str, object] = {"name": "understudy-robotics", "requires-python": ">=3.11,<3.15"}
FILES = ["src/understudy/__init__.py", "src/understudy/py.typed", "src/understudy/dashboard/page/index.html"]
WHEEL = [*(name.removeprefix("src/") for name in FILES), "understudy_robotics-0.2.0.dist-info/METADATA"]
SDIST = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "tests/conftest.py", "PKG-INFO"]


def test_the_newest_heading_is_the_version() -> None:
    release.check_version("0.2.0", CHANGELOG, ["v0.1.0"])
    with pytest.raises(Refused, match=r"heading to be `## \[0\.3\.0\] - .*got `## \[0\.2\.0\] - 2026-11-16`; rename"):
        release.check_version("0.3.0", CHANGELOG, [])
    with pytest.raises(Refused, match=r"v0\.2\.0 is tagged already; raise __version__"):
        release.check_version("0.2.0", CHANGELOG, ["v0.2.0"])
    release.check_version("0.2.0", CHANGELOG, ["v0.2.0"], tag="v0.2.0")
    with pytest.raises(Refused, match=r"expected the tag v0\.2\.0, got v0\.1\.0; tag the commit"):
        release.check_version("0.2.0", CHANGELOG, ["v0.1.0"], tag="v0.1.0")
    with pytest.raises(Refused, match="got none; add it"):
        release.check_version("0.2.0", "# Changelog\n", [])


def test_only_a_rehearsal_may_be_unreleased() -> None:
    text = CHANGELOG.replace("[0.2.0] - 2026-11-16", "[Unreleased]")
    release.check_version("0.2.0", text, [], rehearsal=True)
    with pytest.raises(Refused, match=r"got `## \[Unreleased\]`"):
        release.check_version("0.2.0", text, [])


def test_this_changelog_is_one_that_can_be_released() -> None:
    release.check_version(release._version(), (ROOT / "CHANGELOG.md").read_text(), [], rehearsal=True)


def test_a_changed_tree_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    release.check_tree(tmp_path)
    (tmp_path / "new.py").write_text("")
    with pytest.raises(Refused, match=r"a clean tree, got 1 changed or new files \(\?\? new\.py\); commit them"):
        release.check_tree(tmp_path)


def test_the_wheel_is_the_package_and_nothing_else() -> None:
    release.check_wheel(WHEEL, METADATA, tracked=[*FILES, "tests/conftest.py"], project=PROJECT)
    with pytest.raises(Refused, match=r"missing: \[\], not wanted: \['tests/conftest\.py'\]"):
        release.check_wheel([*WHEEL, "tests/conftest.py"], METADATA, tracked=FILES, project=PROJECT)
    with pytest.raises(Refused, match=r"missing: \['understudy/dashboard/page/index\.html'\]"):
        release.check_wheel([*WHEEL[:2], WHEEL[3]], METADATA, tracked=FILES, project=PROJECT)
    with pytest.raises(Refused, match=r"expected understudy/py\.typed, got none"):
        release.check_wheel([WHEEL[0], *WHEEL[2:]], METADATA, tracked=[FILES[0], FILES[2]], project=PROJECT)
    with pytest.raises(Refused, match="Name: expected understudy-robotics, got understudy"):
        release.check_wheel(WHEEL, METADATA.replace("-robotics", ""), tracked=FILES, project=PROJECT)
    with pytest.raises(Refused, match=r"lead nowhere on PyPI: \['docs/demo\.md'\]"):
        release.check_wheel(WHEEL, METADATA + "[demo](docs/demo.md)\n", tracked=FILES, project=PROJECT)


def test_the_sdist_can_be_worked_with_and_holds_no_settings_of_ours() -> None:
    inside = [f"understudy_robotics-0.2.0/{name}" for name in SDIST]
    release.check_sdist(inside)
    with pytest.raises(Refused, match="expected LICENSE, got none"):
        release.check_sdist([name for name in inside if "LICENSE" not in name])
    with pytest.raises(Refused, match=r"\['\.github/workflows/checks\.yml'\] should not be in it"):
        release.check_sdist([*inside, "understudy_robotics-0.2.0/.github/workflows/checks.yml"])


def test_pythons_are_found_that_answer_with_their_version() -> None:
    found = release.find_pythons(release.PYTHONS)
    assert found.keys() <= set(release.PYTHONS)
    for name, command in found.items():
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
        assert answer.stdout.startswith(f"Python {name}.")
    assert release.find_pythons(["3.99"]) == {}
