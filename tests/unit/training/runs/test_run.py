"""A run's directory: its config reloads equal, one process learns at a time, and what is wrong is said."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from understudy.training.runs.config import ConfigError
from understudy.training.runs.run import KEPT_DIR, POLICY_DIR, Run, RunError, policy_path


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 3
    sizes: tuple[int, ...] = (1, 2)


def test_the_config_reloads_equal_and_is_not_overwritten(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rlpd", Config(steps=7))
    assert run.config(Config) == Config(steps=7)
    assert run.kind == "rlpd"
    with pytest.raises(RunError, match="`understudy resume"):
        Run.create(tmp_path / "run", "rlpd", Config())


def test_a_store_with_demonstrations_may_be_there_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "store").mkdir(parents=True)
    Run.create(tmp_path / "run", "rlpd", Config())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "is not a run, it has no config.json"),
        ("{", "is not JSON"),
        ("[]", "expected a kind and a config"),
        ('{"format": 2, "kind": "rlpd", "config": {"step": 3}}', "step: no such option; did you mean 'steps'?"),
    ],
)
def test_what_is_no_run_is_refused(content: str | None, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunError, match=text):
        Run(tmp_path).config(Config)


def test_one_process_works_on_a_run(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rlpd", Config())
    code = f"from understudy.training.runs.run import Run; Run({str(run.path)!r}).lock()"
    with run:
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert other.returncode != 0
        assert "is training it" in other.stderr
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_stands_for_its_newest_policy_and_says_if_it_has_none(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "sft", Config())
    missing = f"init_from: the run {run.path} has no policy yet; `understudy resume {run.path}` goes on training it"
    with pytest.raises(ConfigError) as caught:
        policy_path(run.path, option="init_from")
    assert str(caught.value) == missing
    run.policy.touch()
    assert policy_path(run.path) == policy_path(run.policy) == run.policy
    (run.path / POLICY_DIR).mkdir()
    assert policy_path(run.path) == run.path / POLICY_DIR
    kept = run.path / KEPT_DIR / "iteration-000004"
    with pytest.raises(ConfigError, match=rf"got {kept}, which does not exist"):  # though the run has a policy
        policy_path(kept)
    kept.mkdir(parents=True)
    (kept / "policy.safetensors").touch()
    assert policy_path(kept) == kept / "policy.safetensors"
    with pytest.raises(ConfigError, match=r"expected a policy file or a run with one, got .*/none, which does not"):
        policy_path(tmp_path / "none")
