"""`understudy actor` in this process, at a real server, without a learner."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system.train_process import small_config

from understudy.cli import main
from understudy.replay import Reader, Store
from understudy.service import Server, ServerConfig
from understudy.training.runs.run import Run


def test_an_actor_that_never_got_a_policy_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "run", "rlpd", small_config(None, steps=20))
    with Store.open(run.store) as store, Server(store, ServerConfig(port=0)) as server:
        assert main(["actor", str(run.path), server.address]) == 0
    said = capsys.readouterr().out
    assert "policy none yet" in said
    assert "no policy arrived before the run had all its steps; start `understudy learner` first" in said
    with Reader(run.store) as reader:
        assert sum(record.num_steps for record in reader.episodes()) >= 20
