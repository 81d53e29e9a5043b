"""`understudy doctor`: what it finds is so, and what it says to do is right."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import main
from understudy.cli.tools.doctor import EXTRAS
from understudy.durable.file_system import file_system_type
from understudy.envs.registry import WORLD_REGISTRY

CODE = "import sys; from understudy.cli import main; sys.exit(main())"


def examine(*more: str, env: dict[str, str] | None = None, **options: Any) -> tuple[int, dict[tuple[str, str], Any]]:
    """The exit code, and the findings by part and name, of a doctor in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, "doctor", "--json", *more],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
    assert done.stderr == ""
    return done.returncode, {(found["part"], found["name"]): found for found in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[tuple[str, str], Any]]:
    place = tmp_path_factory.mktemp("doctor")
    code, found = examine(cwd=place, env={"UNDERSTUDY_HOME": str(place / "home")})
    assert f"free in {place} ({file_system_type(place)})" in found["this machine", "disk"]["found"]
    return code, found


def test_what_is_installed_is_named_with_its_version(healthy: tuple[int, dict[tuple[str, str], Any]]) -> None:
    code, found = healthy
    assert code == 0
    assert metadata.version("numpy") in found["python", "needs"]["found"]
    assert sys.executable in found["python", "python"]["found"]
    assert metadata.version("grpcio") in found["extras", "remote"]["found"]
    assert {name for part, name in found if part == "extras"} == set(EXTRAS)
    assert {name for part, name in found if part == "worlds"} == set(WORLD_REGISTRY)


def test_torch_is_really_imported(healthy: tuple[int, dict[tuple[str, str], Any]]) -> None:
    pytest.importorskip("torch")
    said = healthy[1]["python", "torch"]
    assert said["state"] == "good"
    assert metadata.version("torch") in said["found"]


def test_a_world_that_is_not_there_has_the_command_that_brings_it(
    healthy: tuple[int, dict[tuple[str, str], Any]],
) -> None:
    said = healthy[1]["worlds", "metaworld"]
    assert said["state"] == "missing"
    assert said["remedy"].startswith(("understudy env setup metaworld", "apt-get install"))


def test_few_open_files_are_careful(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))

    _, found = examine(cwd=tmp_path, preexec_fn=limit, env={"PYTHONPATH": str(broken_torch(tmp_path))})
    said = found["this machine", "open files"]
    assert (said["state"], said["found"], said["remedy"]) == ("careful", "at most 256", "ulimit -n 1024")


def broken_torch(place: Path) -> Path:
    """A package that is found and fails, as one does that was built for another machine."""
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object')\n")
    return place


def test_a_torch_that_cannot_be_imported_is_broken(tmp_path: Path) -> None:
    code, found = examine(cwd=tmp_path, env={"PYTHONPATH": str(broken_torch(tmp_path))})
    said = found["python", "torch"]
    assert (code, said["state"]) == (1, "broken")
    assert "libcudart.so.12: cannot open shared object" in said["found"]
    assert said["remedy"].endswith("-m pip install --force-reinstall torch")


def test_a_missing_extra_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a person reads it; in this process, which then believes that websockets is not installed."""
    version = metadata.version

    def lacking(name: str) -> str:
        if name == "websockets":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", lacking)
    monkeypatch.setattr("understudy.cli.tools.doctor.TORCH", "print('[\"2\", 1, []]')")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "without websockets" in out
    assert "pip install 'understudy-robotics[web]'" in out
    assert "everything that is installed works" in out


def test_gpus_are_tested_if_asked(tmp_path: Path) -> None:
    """On a machine without one, a row says so and what to install; that is no fault."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, found = examine("--gpu", cwd=tmp_path)
    assert code == 0
    assert metadata.version("torch") in found["GPUs", "versions"]["found"]
    said = found["GPUs", "devices"]
    assert said["state"] == "missing"
    assert "torch sees no GPU" in said["found"]
    assert said["remedy"]


def test_gpus_are_not_tested_unless_asked(healthy: tuple[int, dict[tuple[str, str], Any]]) -> None:
    assert [part for part, _ in healthy[1] if part == "GPUs"] == []


def test_a_fault_on_a_gpu_leaves_what_was_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that finds one thing, says something and is killed by a signal, as a driver does it."""
    (tmp_path / "faulty_check.py").write_text(
        "import json, os, sys\n"
        "row = dict(part='cuda:0', name='memory', state='good', found='79 of 80 GiB free')\n"
        "open(sys.argv[1], 'w').write(json.dumps(row) + chr(10))\n"
        "print('an illegal memory access', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr("understudy.cli.tools.doctor.GPU_CHECK", "faulty_check")
    monkeypatch.setattr("understudy.cli.tools.doctor.TORCH", "print('[\"2\", 1, []]')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--gpu", "--json"]) == 1
    found = {(one["part"], one["name"]): one for one in json.loads(capsys.readouterr().out)}
    assert found["cuda:0", "memory"]["found"] == "79 of 80 GiB free"
    assert found["GPUs", "check"]["state"] == "broken"
    assert "ended with -9 after the last row above: an illegal memory access" in found["GPUs", "check"]["found"]


def test_every_extra_that_it_names_is_one() -> None:
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    there = text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")]
    assert [name for name in EXTRAS if f"\n{name} = [" not in there] == []
    assert "vla" in EXTRAS
