"""Recipes: each builds, can be copied and changed, and makes a run; the toy one is run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from understudy.cli import main
from understudy.envs.registry import WORLD_REGISTRY
from understudy.recipes import NAMES, load_recipe, source_of
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.sft import SFTConfig
from understudy.training.runs.run import Run

CONFIGS = {"rlpd": RLPDConfig, "sft": SFTConfig, "grpo": OnPolicyConfig}
SHORT = ("--steps", "40", "--batch-size", "8", "--evaluation.episodes", "1")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_makes_a_run_and_says_how_to_begin(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", name, str(tmp_path / "run"), "--seed", "7"]) == 0
    recipe, run = load_recipe(name), Run(tmp_path / "run")
    config = run.config(CONFIGS[run.kind])
    assert run.kind == recipe.kind
    assert (config.env, config.seed) == (recipe.config.env, 7)
    said = capsys.readouterr().out
    assert f"`understudy resume {tmp_path / 'run'}` starts it" in said
    if recipe.kind == "grpo":
        assert f"policy: {config.policy} is not there yet; it must be when the run starts" in said
    source = source_of(name).read_text()
    assert f"understudy init {name} runs/" in source
    assert len(source.splitlines()) <= 40
    if "understudy record" in source:
        assert recipe.config.env in source.partition("KIND")[0]  # demonstrations are of the same world


def test_a_run_that_has_no_policy_yet_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "sft", tmp_path / "grpo"
    assert main(["init", "toy-vla", str(first)]) == 0
    assert main(["init", "toy-vla-grpo", str(second), "--policy", str(first)]) == 0
    assert (
        f"policy: the run {first} has no policy yet; `understudy resume {first}` goes on training it; it must be there "
        "when this run starts"
    ) in capsys.readouterr().out
    Run(first).policy.touch()
    assert main(["init", "toy-vla-grpo", str(tmp_path / "third"), "--policy", str(first)]) == 0
    assert "policy:" not in capsys.readouterr().out


def test_they_are_listed_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line and line.split()[0] in NAMES] == list(NAMES)
    assert max(map(len, out.splitlines())) <= 60


def test_a_copy_can_be_changed_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "toy", "mine.py"]) == 0
    mine = Path("mine.py")
    mine.write_text(mine.read_text().replace("steps=3_000", "steps=2_000"))
    assert main(["record", "run/store", "--env", "toy:press_button?cameras=false&state=task", "--successes", "1"]) == 0
    assert main(["init", "mine.py", "run"]) == 0
    assert Run("run").config(RLPDConfig).steps == 2_000
    assert main(["init", "./mine.py", "short", "--demos", "run/store", *SHORT]) == 0
    assert main(["resume", "short"]) == 0
    assert Path("short/policy.safetensors").exists()
    assert main(["recipes", "copy", "toy", "mine.py"]) == 1
    assert "mine.py: exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["recipes", "copy", "toyy"], "recipe: there is no 'toyy'; did you mean 'toy'?"),
        (["recipes", "copy", "toy", "x.txt"], "out: expected a file that ends in .py, got x.txt"),
        (["recipes", "copy"], "name: expected the name of a recipe to copy; `understudy recipes` lists them"),
        (["recipes", "list", "toy"], "to copy it, say `recipes copy toy`"),
        (["init", "nope.py", "run"], "nope.py: there is no such file; `understudy recipes copy NAME` writes one"),
        (["init", "empty.py", "run"], "empty.py: expected KIND and CONFIG, has no KIND and no CONFIG"),
    ],
)
def test_mistakes_are_explained(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.py").write_text("")
    assert main(words) == 1
    assert text in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["metaworld-state", "metaworld-camera"])
def test_a_recipe_of_a_simulator_runs(name: str, tmp_path: Path) -> None:
    if not WORLD_REGISTRY["metaworld"].ready:
        pytest.skip("`understudy env setup metaworld` has not been run")
    run, env = tmp_path / "run", load_recipe(name).config.env
    assert main(["record", str(run / "store"), "--env", env, "--successes", "1"]) == 0
    assert main(["init", name, str(run), *SHORT, "--steps", "60"]) == 0
    assert main(["resume", str(run)]) == 0
    assert Run(run).policy.exists()
