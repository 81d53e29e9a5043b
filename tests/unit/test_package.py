"""`import understudy as us`: the main names, loaded when they are used."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import understudy as us

HEAVY = ("torch", "ray", "grpc", "transformers", "fastapi", "matplotlib")
HEAVY_NAMES = {"BatchDataset": "torch", "Server": "grpc", "connect": "grpc"}  # each loads this package, when it is used
CPU_S = 0.3  # for `import understudy as us; us.Store; us.Sampler`
TRIES = 8


def python(code: str, **env: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True).stdout


def heavy_after(code: str) -> list[str]:
    return python(f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])").split()


@pytest.mark.parametrize("name", us.__all__)
def test_every_name_resolves(name: str) -> None:
    if name in HEAVY_NAMES:
        pytest.importorskip(HEAVY_NAMES[name])
    assert getattr(us, name) is getattr(us, name)
    assert name in dir(us)


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'understudy' has no attribute 'Stroe'"):
        us.Stroe  # type: ignore[attr-defined]  # noqa: B018


def test_names_are_the_classes_of_their_packages() -> None:
    from understudy.core import StepSpec
    from understudy.replay import ONLINE, Sampler

    assert (us.StepSpec, us.Sampler, us.ONLINE) == (StepSpec, Sampler, ONLINE)


def test_few_names_load_a_heavy_package() -> None:
    names = [name for name in us.__all__ if name not in HEAVY_NAMES]
    assert heavy_after("import understudy as us\n" + "\n".join(f"us.{name}" for name in names)) == []


def test_the_import_itself_loads_nothing_of_ours() -> None:
    loaded = "import sys, understudy; print(*[name for name in sys.modules if name.startswith('understudy.')])"
    assert python(loaded).split() == []
    assert heavy_after("import understudy") == []


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    command = [sys.executable, "-c", "import understudy as us; us.Smapler"]
    assert "Did you mean: 'Sampler'?" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_docs_list_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    table = page.partition("## Names in Python")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`us\.(\w+)`", table)) == sorted(us.__all__)


def test_no_text_tells_to_install_the_other_project_of_this_name() -> None:
    """On PyPI, understudy-robotics is ours and understudy is somebody else's."""
    told = re.compile(r"""pip install [^#\n]*?(?<![\w/.-])understudy(?![\w/-])""")
    root = Path(__file__).parents[2]
    texts = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/**/*.md"), *root.glob("src/**/*.py")]
    assert [str(path) for path in texts if told.search(path.read_text())] == []
    assert told.search("pip install 'understudy[web]'")
    assert told.search("pip install -U understudy")
    assert not told.search("pip install 'understudy-robotics[web]'")


@pytest.mark.serial
@pytest.mark.nightly
def test_the_store_and_the_sampler_are_there_in_no_time(tmp_path: Path) -> None:
    code = "import time, understudy as us; us.Store; us.Sampler; print(time.process_time())"
    cached = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    python(code, **cached)  # compiles
    took = []
    for _ in range(TRIES):
        took.append(float(python(code, **cached)))
        if took[-1] < CPU_S:
            return
    raise AssertionError(f"expected less than {CPU_S} s of CPU time, got {min(took):.3f} at best of {TRIES}")
