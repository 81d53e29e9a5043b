"""The scripts and the notebooks of examples/ are run: with small numbers in every run, as they stand every night."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.pages import DOCS

from understudy.recipes import source_of

EXAMPLES = DOCS.parent / "examples"
SHORT: dict[str, dict[str, Any]] = {
    "store_and_sampler": {"episodes": 2, "steps": 5},
    "own_env": {"demos": 2, "updates": 5, "steps": 10, "episodes": 1},
    "own_policy": {"demos": 1, "updates": 5, "episodes": 1},
    "own_learner": {"demos": 1, "epochs": 1, "batches": 4, "workers": 1},
    "serve_actor_learner": {"episodes": 2, "updates": 2},
    "import_export": {"demos": 1},
    "vla_grpo": {"demos": 1, "updates": 2, "iterations": 1, "groups": 1, "group_size": 2, "episodes": 1},
}
NOTEBOOKS = ("store_and_sampler", "demonstrations_to_policy", "vla_and_grpo")
LENGTHS = [pytest.param(True, id="short"), pytest.param(False, id="whole", marks=pytest.mark.nightly)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])  # as for `python examples/NAME.py`
    torch.set_num_threads(1)
    yield
    for name in SHORT:
        sys.modules.pop(name, None)


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHORT)
    assert {path.stem for path in EXAMPLES.glob("notebooks/*.ipynb")} == set(NOTEBOOKS)
    text = (EXAMPLES / "README.md").read_text()
    assert [name for name in (*SHORT, *NOTEBOOKS) if name not in text] == []


# A notebook has the same lines as vla_grpo.py, and starting its simulators twice takes seconds.
SCRIPTS = [pytest.param(name, marks=pytest.mark.nightly if name == "vla_grpo" else ()) for name in SHORT]


@pytest.mark.nightly
def test_grpo_makes_the_vla_better_on_held_out_starts() -> None:
    importlib.import_module("vla_grpo").main()
    lines = map(json.loads, Path("vla/grpo/metrics.jsonl").read_text().splitlines())
    before, *_, after = (line for line in lines if line["kind"] == "evaluation")
    assert (before["starts"], before["split"], after["starts"], after["split"]) == (100, "eval", 100, "eval")
    assert after["low"] > before["high"]  # the 95 % intervals do not overlap


def test_the_recipe_the_script_and_the_notebook_ask_for_the_same_demonstrations() -> None:
    demos = inspect.signature(importlib.import_module("vla_grpo").main).parameters["demos"].default
    assert f"--successes {demos}\n" in source_of("toy-vla").read_text()
    assert f"DEMOS = {demos}\\n" in (EXAMPLES / "notebooks" / "vla_and_grpo.ipynb").read_text()


@pytest.mark.parametrize("short", LENGTHS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str, short: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "vla_grpo" and not short:
        pytest.skip("the test of what it learns runs it as it stands")
    importlib.import_module(name).main(**SHORT[name] if short else {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_valid_and_holds_no_output(name: str) -> None:
    notebook = json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert isinstance(cell["metadata"], dict)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            ast.parse("".join(cell["source"]))
            assert all(len(line.rstrip()) <= 120 for line in cell["source"])


@pytest.mark.parametrize("short", LENGTHS)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook(name: str, short: bool, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())
    first, *rest = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    names: dict[str, Any] = {}
    exec(compile(first, f"{name}, the numbers", "exec"), names)  # the first cell holds the sizes of the rest
    smaller = notebook["metadata"]["understudy"]["short"]
    assert smaller.keys() <= names.keys()
    names.update(smaller if short else {})
    for number, cell in enumerate(rest, 1):
        exec(compile(cell, f"{name}, cell {number}", "exec"), names)
    assert capsys.readouterr().out
