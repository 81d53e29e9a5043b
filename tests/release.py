"""`make release`: builds what goes to PyPI, checks it, and installs it on every Python that is here.

Nothing is uploaded. In order: the tree is clean, the version is the changelog's, an sdist and a wheel are built, they
hold what they should, and each Python installs the wheel (not the checkout) in a bare environment and runs
the README there.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = "remote,plot,web"  # what the README installs; and train, with torch
STEPS = "200"  # of the README's training, which has 3,000
HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)


class Refused(Exception):
    """A release that cannot be made, with what to do about it."""


# ---- before anything is built


def check_tree(root: Path) -> None:
    changed = _git(root, "status", "--porcelain").splitlines()
    if changed:
        raise Refused(
            f"expected a clean tree, got {len(changed)} changed or new files ({changed[0]}); commit them first"
        )


def check_version(
    version: str, changelog: str, tags: Iterable[str], *, rehearsal: bool = False, tag: str | None = None
) -> None:
    """The newest heading of the changelog is this version and its date; a rehearsal may have [Unreleased].

    `tag` is the one that is released, if it was made already; otherwise there must be none of this version.
    """
    found = HEADING.search(changelog)
    if found is None:
        raise Refused(f"CHANGELOG.md: expected a heading such as `## [{version}] - 2026-01-31`, got none; add it")
    if rehearsal and found[1] == "Unreleased":
        return
    if found[1] != version or found[2] is None:
        raise Refused(
            f"CHANGELOG.md: expected its first heading to be `## [{version}] - YYYY-MM-DD`, got `{found[0]}`; "
            "rename the heading, or change __version__ in src/understudy/__init__.py and version in CITATION.cff"
        )
    if tag is not None:
        if tag != f"v{version}":
            raise Refused(f"expected the tag v{version}, got {tag}; tag the commit that has this version")
    elif f"v{version}" in tags:
        raise Refused(f"v{version} is tagged already; raise __version__ and add its heading to CHANGELOG.md")


# ---- the files


def check_wheel(names: Sequence[str], metadata: str, *, tracked: Sequence[str], project: dict[str, object]) -> None:
    """The wheel holds every file of src/understudy, and nothing but these and its metadata."""
    wanted = {name.removeprefix("src/") for name in tracked if name.startswith("src/understudy/")}
    there = {name for name in names if ".dist-info/" not in name}
    if wanted != there:
        missing, more = sorted(wanted - there), sorted(there - wanted)
        raise Refused(f"wheel: expected the files of src/understudy; missing: {missing[:5]}, not wanted: {more[:5]}")
    for needed in ("understudy/py.typed", "understudy/dashboard/page/index.html"):
        if needed not in there:
            raise Refused(f"wheel: expected {needed}, got none; look at [tool.hatch.build] in pyproject.toml")
    fields = email.message_from_string(metadata)
    for field, value in (("Name", project["name"]), ("Requires-Python", project["requires-python"])):
        if sorted(str(fields[field]).split(",")) != sorted(str(value).split(",")):
            raise Refused(f"wheel: {field}: expected {value}, got {fields[field]}")
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", str(fields.get_payload()))
    if relative:
        raise Refused(f"wheel: the README has links that lead nowhere on PyPI: {relative[:3]}; see fancy-pypi-readme")


def check_sdist(names: Sequence[str]) -> None:
    inside = {name.partition("/")[2] for name in names}
    for needed in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "tests/conftest.py"):
        if needed not in inside:
            raise Refused(f"sdist: expected {needed}, got none; look at [tool.hatch.build] in pyproject.toml")
    unwanted = sorted(name for name in inside if name.startswith((".", "site/")) and name != ".gitignore")
    if unwanted:
        raise Refused(f"sdist: {unwanted[:3]} should not be in it; look at [tool.hatch.build] in pyproject.toml")


def build(root: Path, tools: Path, out: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, in an empty directory."""
    shutil.rmtree(out, ignore_errors=True)
    run_clean([sys.executable, "-m", "venv", tools])
    run_clean([tools / "bin" / "python", "-m", "pip", "install", "-q", "build", "twine"])
    run_clean([tools / "bin" / "python", "-m", "build", "--outdir", out, root])
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    run_clean([tools / "bin" / "twine", "check", "--strict", sdist, wheel])
    return sdist, wheel


# ---- installing it


def find_pythons(names: Sequence[str]) -> dict[str, str]:
    """Those versions that are on the PATH, or below pyenv, and can make a virtual environment."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for name in names:
        for command in (f"python{name}", *sorted(map(str, pyenv.glob(f"{name}.*/bin/python")))):
            probe = "import ensurepip, sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
            try:
                answer = subprocess.run([command, "-c", probe], capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                continue
            if answer.strip() == name:
                found[name] = command
                break
    return found


def install_wheel(python: str, wheel: Path, directory: Path, *, torch: str, extras: str) -> Path:
    """A new environment with the wheel and, unless it is "none", with torch as pip is told; returns its Python."""
    run_clean([python, "-m", "venv", directory])
    inside = directory / "bin" / "python"
    if torch != "none":
        run_clean([inside, "-m", "pip", "install", "-q", *shlex.split(torch)])
    run_clean([inside, "-m", "pip", "install", "-q", "--no-compile", f"{wheel}[{extras}]"])
    run_clean([inside, "-m", "pip", "check"])
    where = run_clean([inside, "-c", "import understudy; print(understudy.__file__)"], cwd=directory).strip()
    if not Path(where).is_relative_to(directory):
        raise Refused(f"expected the installed understudy, got {where}; unset PYTHONPATH")
    return inside


def try_wheel(python: str, wheel: Path, scratch: Path, *, torch: str) -> str:
    """Install the wheel in a new environment and run the README there; returns what was installed."""
    scratch.mkdir()
    shutil.copy(ROOT / "tests" / "docs" / "quickstart.py", scratch)  # alone: the checkout cannot be imported from there
    extras = EXTRAS if torch == "none" else f"{EXTRAS},train"
    inside = install_wheel(python, wheel, scratch / "venv", torch=torch, extras=extras)
    arguments = [ROOT / "README.md", STEPS, *(["without-torch"] if torch == "none" else [])]
    said = run_clean([inside, "quickstart.py", *arguments], cwd=scratch)
    return said.strip().splitlines()[-1]


# ---- running it


def release(*, pythons: Sequence[str], torch: str, rehearsal: bool, tag: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = _version()
    check_tree(ROOT)
    tags = _git(ROOT, "tag").split()
    check_version(version, (ROOT / "CHANGELOG.md").read_text(), tags, rehearsal=rehearsal, tag=tag)
    found = find_pythons(pythons)
    if not found:
        raise Refused(f"expected one of Python {', '.join(pythons)} with venv on the PATH, got none; install one")
    print(f"{project['name']} {version}, with Python {', '.join(found)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="understudy-release-") as directory:
        scratch = Path(directory)
        sdist, wheel = build(ROOT, scratch / "tools", ROOT / "dist")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        check_wheel(names, metadata, tracked=_git(ROOT, "ls-files").splitlines(), project=project)
        with tarfile.open(sdist) as tar:
            check_sdist([member.name for member in tar.getmembers() if member.isfile()])
        for path in (sdist, wheel):
            print(f"dist/{path.name}: {path.stat().st_size / 1e6:.1f} MB, holds what it should", flush=True)
        for name, python in found.items():
            said = try_wheel(python, wheel, scratch / name, torch=torch)
            print(f"Python {name}: the wheel is installed in a bare environment; {said}", flush=True)
            shutil.rmtree(scratch / name)
    missing = [name for name in pythons if name not in found]
    if missing:
        print(f"not tried, because not on this machine: Python {', '.join(missing)}")
    if rehearsal or tag is not None:
        print("all is well; nothing was uploaded")
        return
    print(
        f"\nAll is well, and nothing was uploaded. Next:\n"
        f"  git tag -a v{version} -m 'Understudy {version}'\n"
        f"  git push {project['urls']['Source']} main v{version}\n"
        f"The tag starts .github/workflows/release.yml, which repeats this and publishes dist/ on PyPI.\n"
        f"Then raise __version__, and begin a heading `## [Unreleased]` in CHANGELOG.md."
    )


def _version() -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "src/understudy/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", root, *args], capture_output=True, text=True, check=True).stdout


def clean_environment() -> dict[str, str]:
    """The variables of this process, but for those that lead a Python to another environment."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def run_clean(command: Sequence[str | Path], *, cwd: Path | None = None) -> str:
    """What a command prints; nothing of this environment leaks into it."""
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=cwd, env=clean_environment(), stdout=pipe, stderr=merged, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise Refused(f"`{shlex.join(map(str, command))}` answered {done.returncode}:\n{tail}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="X.Y", help="Versions of Python to try.")
    parser.add_argument(
        "--torch", default="torch", help="What pip installs as torch, with its options; `none` leaves out training."
    )
    parser.add_argument("--rehearsal", action="store_true", help="Accept a changelog that begins with [Unreleased].")
    parser.add_argument("--tag", help="Tag that is released, if it was made already: v and the version.")
    options = parser.parse_args()
    try:
        release(pythons=options.pythons, torch=options.torch, rehearsal=options.rehearsal, tag=options.tag)
    except Refused as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
