"""What surrounds the code: the package's metadata, the lock file, the templates and hooks agree with each other."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import understudy

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;~ ]", requirement, maxsplit=1)[0]).lower()


def test_every_text_names_the_same_pythons() -> None:
    listed = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert tuple(listed) == PYTHONS
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    for path in ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/quickstart.md", ".ci/run"):
        text = (ROOT / path).read_text()
        assert re.findall(r"(?:Python|from) 3\.11 to (3\.\d+)", text), path
        assert set(re.findall(r"3\.11 to (3\.\d+)", text)) == {PYTHONS[-1]}, path


def test_no_folder_of_the_package_is_a_long_list() -> None:
    folders = Counter(path.parent for path in (ROOT / "src").rglob("*.*") if path.name != "__init__.py")
    long = {str(folder): count for folder, count in folders.items() if count > 15 and "__pycache__" not in str(folder)}
    assert not long, f"more than 15 files; move those that belong together into a folder of their own: {long}"


def test_every_address_is_the_one_in_the_metadata() -> None:
    source = PROJECT["urls"]["Source"]
    assert PROJECT["urls"]["Issues"].startswith(source)
    assert PROJECT["urls"]["Changelog"].startswith(source)
    assert load("CITATION.cff")["repository-code"] == source
    assert load("CITATION.cff")["url"] == PROJECT["urls"]["Documentation"]
    for path in ("SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"):
        assert f"{source}/security/advisories/new" in (ROOT / path).read_text(), path


def test_the_citation_is_of_this_version() -> None:
    assert load("CITATION.cff")["version"] == understudy.__version__
    assert load("CITATION.cff")["license"] == PROJECT["license"]


def test_the_lock_file_has_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line): line for line in lines if line and not line.lstrip().startswith("#")}
    assert all("==" in line and "://" not in line for line in pinned.values())
    extras = PROJECT["optional-dependencies"].values()
    wanted = {name_of(one) for one in [*PROJECT["dependencies"], *(one for extra in extras for one in extra)]}
    missing = sorted(wanted - pinned.keys() - {PROJECT["name"]})
    assert missing == [], "run `make lock` and commit constraints.txt"


def test_hooks_before_a_commit_are_what_make_runs() -> None:
    (repo,) = load(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    assert [hook["id"] for hook in repo["hooks"]] == ["ruff", "ruff-format", "mypy"]
    for hook in repo["hooks"]:
        command, target = hook["entry"].split()
        assert command == "make"
        assert target in make_targets()


def test_the_coverage_floor_is_real() -> None:
    coverage = PYPROJECT["tool"]["coverage"]
    assert coverage["report"]["fail_under"] >= 85
    covered = re.search(r"^COVERED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert covered is not None
    assert [f"understudy.{one}" for one in covered[1].split()] == coverage["run"]["source_pkgs"]
    assert all((ROOT / "tests" / "unit" / one).is_dir() for one in covered[1].split())


@pytest.mark.parametrize("path", sorted(path.name for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
def test_forms_of_issues_are_valid(path: str) -> None:
    form = load(f".github/ISSUE_TEMPLATE/{path}")
    if path == "config.yml":
        assert all(link.keys() == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert form["name"]
    assert form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert part["attributes"]["label"]
        assert all(
            isinstance(option, str) for option in part["attributes"].get("options", [])
        )  # a bare No is a boolean


def test_what_the_pull_request_template_names_is_there() -> None:
    text = (ROOT / ".github" / "pull_request_template.md").read_text()
    for name in re.findall(r"[A-Z]+\.md", text):
        assert (ROOT / name).exists()
    assert set(re.findall(r"`make (\w+)`", text)) <= make_targets()


# ---- workflows

WORKFLOWS = sorted(path.name for path in (ROOT / ".github" / "workflows").iterdir())


def jobs(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(f".github/workflows/{name}")["jobs"]
    return found


def commands(name: str) -> list[str]:
    steps = [step for job in jobs(name).values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def test_there_is_a_workflow_for_each_need() -> None:
    assert WORKFLOWS == ["checks.yml", "docs.yml", "nightly.yml", "release.yml"]
    assert ".ci/run" in commands("checks.yml")
    assert "make docs" in commands("docs.yml")
    assert {"make nightly", "make coverage"} <= set(commands("nightly.yml"))
    assert any(line.startswith("make release TAG=") for line in commands("release.yml"))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_what_there_is(name: str) -> None:
    for line in commands(name):
        for target in re.findall(r"\bmake (\w+)", line):
            assert target in make_targets(), line
        for path in re.findall(r"(?<![\w/.])(?:\.ci|tests|src|docs)/[\w/.]+|constraints\.txt", line):
            assert (ROOT / path).exists(), line
        for variable in re.findall(r"\b([A-Z]+)=", line.partition("make ")[2]):
            assert f"$({variable})" in (ROOT / "Makefile").read_text(), line


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_to_a_commit_and_rights_are_few(name: str) -> None:
    text = (ROOT / ".github" / "workflows" / name).read_text()
    used = re.findall(r"uses: (.*)$", text, re.MULTILINE)
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    assert load(f".github/workflows/{name}")["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in jobs(name).values())
    writers = {job: given["permissions"] for job, given in jobs(name).items() if "permissions" in given}
    wanted: dict[str, Any] = {
        "docs.yml": {"deploy": {"pages": "write", "id-token": "write"}},
        "release.yml": {"publish": {"id-token": "write"}},
    }
    assert writers == wanted.get(name, {})


def test_only_what_was_tried_is_published() -> None:
    publish = jobs("release.yml")["publish"]
    assert publish["needs"] == "build"
    assert publish["environment"] == {"name": "pypi"}
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    for name in ("nightly.yml", "release.yml"):
        assert ["3.11", "3.12", "3.13", "3.14"] in [
            str(step["with"]["python-version"]).split()
            for job in jobs(name).values()
            for step in job["steps"]
            if "python-version" in step.get("with", {})
        ]
