"""The code of docs/rlpd.md and docs/cloning.md is run as it stands, and the pages know every option and metric."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from tests.docs.pages import DOCS, run_page
from tests.unit.algorithms.batches import GRIPPER, random_batch, small_actor, small_sac

from understudy.algorithms import ClassifierTrainingConfig, CloningConfig, SACConfig
from understudy.core import Source
from understudy.policies import ActorConfig


def test_the_code_of_rlpd_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / "rlpd.md")
    assert "'actor_gradient', 'actor_loss'" in capsys.readouterr().out
    assert (tmp_path / "policy.safetensors").exists()


def test_the_code_of_cloning_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / "cloning.md")
    assert re.fullmatch(r"mse 0\.0\d\d\naccuracy (1\.0|0\.9)\d, recall 1\.00\n", capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"cloned.safetensors", "success.safetensors"}


def test_the_page_explains_every_option_and_every_metric() -> None:
    page = (DOCS / "rlpd.md").read_text()
    options = [field.name for config in (SACConfig, ActorConfig) for field in fields(config) if field.name != "encoder"]
    sac = small_sac(actor=small_actor(gripper=GRIPPER), bc_weight=0.1)
    metrics = sac.update(random_batch(source=np.full(32, Source.HUMAN, np.uint8)))
    for name in (*options, *metrics):
        assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", page, re.MULTILINE), name
    page = (DOCS / "cloning.md").read_text()
    for name in (field.name for config in (CloningConfig, ClassifierTrainingConfig) for field in fields(config)):
        assert re.search(rf"^\| `{name}` \|", page, re.MULTILINE), name
