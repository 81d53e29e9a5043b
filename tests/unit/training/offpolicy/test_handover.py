"""A run that was begun in one process goes on as actor and learner; the other way round is refused in one sentence."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.system.train_process import small_config

from understudy.replay import Store
from understudy.service import Server, ServerConfig
from understudy.training.offpolicy.actor import run_actor
from understudy.training.offpolicy.learner_process import run_learner
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run, RunError


def test_a_local_run_goes_on_as_actor_and_learner(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = small_config(None, steps=250, start_steps=20, cloning_updates=0, eval_every=1000, checkpoint_every=60)
    run = Run.create(tmp_path / "run", "rlpd", config)

    def stop(moment: RLPDProgress) -> None:
        if moment.step > 120:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LocalRun(run, stop) as local:
        local.run()
    with Store.open(run.store) as store, Server(store, ServerConfig(port=0)) as server:
        actor = threading.Thread(target=run_actor, args=(run.config(RLPDConfig), server.address))
        actor.start()
        run_learner(run, server.address)
        actor.join(60)
        assert not actor.is_alive()
    last = list(read_metrics(run.metrics))[-1]
    assert last["step"] >= config.steps
    assert last["update"] == config.num_updates  # no more and no less, whoever made them
    with pytest.raises(RunError, match="has a separate learner; resume it with `understudy serve"):
        LocalRun(run)
