"""A local run: every option of it changes something, and what cannot be gone on with is refused in one sentence."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from understudy.algorithms import SACConfig
from understudy.cli import main
from understudy.core import Source
from understudy.policies import ActorConfig
from understudy.processes.stop import QuitAtOnce, Stopped, StopRequest, stop_on_signals
from understudy.replay import Reader
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.checkpoint import newest_checkpoint
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.health import Health
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ENV = "toy:touch_purple?cameras=false"
SAC = SACConfig(actor=ActorConfig(hidden=(8, 8)), critic_hidden=(8, 8))
BASE = RLPDConfig(
    env=ENV,
    steps=110,
    updates_per_step=1,
    batch_size=16,
    n_step=1,
    eval_every=1000,
    evaluation=EvaluationConfig(episodes=1),
    checkpoint_every=1000,
    sac=SAC,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("demos") / "store")
    assert main(["record", path, "--env", ENV, "--successes", "3"]) == 0
    return path


class Lived:
    """What a run left behind."""

    def __init__(self, path: Path, config: RLPDConfig):
        self.moments: list[RLPDProgress] = []
        self.run = Run.create(path, "rlpd", config)
        with LocalRun(self.run, self.moments.append) as local:
            local.run()
        self.lines = {kind: list(read_metrics(self.run.metrics, kind)) for kind in ("episode", "train", "evaluation")}

    @property
    def num_updates(self) -> int:
        return int(self.lines["evaluation"][-1]["update"])

    @property
    def last(self) -> dict[str, Any]:
        return {name: value for name, value in self.lines["train"][-1].items() if name != "updates_per_s"}

    @property
    def num_checkpoints(self) -> int:
        return len(list(self.run.checkpoints.iterdir()))

    def sources(self) -> set[int]:
        with Reader(self.run.store) as reader:
            return {int(s) for r in reader.episodes() for s in reader.read(r.id).source}


@pytest.fixture(scope="module")
def base(demos: str, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    return Lived(tmp_path_factory.mktemp("base") / "run", replace(BASE, demos=demos))


def test_a_run_does_what_its_config_says(base: Lived) -> None:
    steps = sum(line["length"] for line in base.lines["episode"])
    assert steps >= 110
    assert base.lines["episode"][-1]["step"] == steps == base.num_updates
    assert base.sources() == {Source.POLICY}
    assert [line["episodes"] for line in base.lines["evaluation"]] == [1]
    assert base.num_checkpoints == 2  # at the beginning and at the end
    assert base.last["demo_steps"] > 0
    assert base.moments[-1].evaluation is not None
    assert base.run.policy.exists()


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Lived, Lived], bool]]] = {
    "env": (
        {"env": ENV.replace("touch_purple", "press_button"), "demos": None, "start_steps": 20},
        lambda new, old: new.lines["evaluation"][0]["episode_results"][0]["task"] == "press_button",
    ),
    "demos": ({"demos": None, "start_steps": 20}, lambda new, old: new.last["demo_steps"] == 0),
    "steps": ({"steps": 250}, lambda new, old: new.num_updates >= 250),
    "start_steps": (
        {"start_steps": 20, "steps": 150},
        lambda new, old: new.sources() == {Source.RANDOM, Source.POLICY},
    ),
    "updates_per_step": ({"updates_per_step": 2}, lambda new, old: new.num_updates == 2 * new.last["online_steps"]),
    "batch_size": ({"batch_size": 32}, lambda new, old: new.last["batch_digest"] != old.last["batch_digest"]),
    "n_step": ({"n_step": 3}, lambda new, old: new.last["q_target"] != old.last["q_target"]),
    "demo_weight": ({"demo_weight": 3}, lambda new, old: new.last["batch_digest"] != old.last["batch_digest"]),
    "online_weight": ({"online_weight": 3}, lambda new, old: new.last["batch_digest"] != old.last["batch_digest"]),
    "cloning_updates": ({"cloning_updates": 200}, lambda new, old: new.last["actor_q"] != old.last["actor_q"]),
    "intervention.by": (
        {"intervention": InterventionConfig(source="script", patience_steps=5)},
        lambda new, old: Source.HUMAN in new.sources(),
    ),
    "intervention.patience_steps": (
        {"intervention": InterventionConfig(source="script", patience_steps=200)},
        lambda new, old: Source.HUMAN not in new.sources(),
    ),
    "intervention.burst_steps": (
        {"intervention": InterventionConfig(source="script", patience_steps=5, burst_steps=2)},
        lambda new, old: max(line["takeovers"] for line in new.lines["episode"]) > 1,
    ),
    "seed": ({"seed": 1}, lambda new, old: new.lines["episode"][0]["start"] != old.lines["episode"][0]["start"]),
    "eval_every": ({"eval_every": 50, "steps": 250}, lambda new, old: len(new.lines["evaluation"]) >= 3),
    "sinks": (
        {"sinks": ("tensorboard",)},
        lambda new, old: len(list((new.run.path / "tensorboard").glob("events*"))) == 1,
    ),
    "evaluation.episodes": (
        {"evaluation": EvaluationConfig(episodes=2)},
        lambda new, old: new.lines["evaluation"][0]["episodes"] == 2,
    ),
    "evaluation.split": (
        {"evaluation": EvaluationConfig(episodes=1, split="train")},
        lambda new, old: new.lines["evaluation"][0]["episode_results"][0]["start"] == 0,
    ),
    "checkpoint_every": (
        {"checkpoint_every": 20, "steps": 250, "keep_checkpoints": 9},
        lambda new, old: new.num_checkpoints > 2,
    ),
    "checkpoint_every_s": (
        {"checkpoint_every_s": 1e-9, "keep_checkpoints": 9},
        lambda new, old: new.num_checkpoints == 2 + len(new.lines["episode"]),
    ),
    "keep_checkpoints": ({"keep_checkpoints": 1}, lambda new, old: new.num_checkpoints == 1),
    "sac": ({"sac": replace(SAC, actor_lr=1e-2)}, lambda new, old: new.last["actor_q"] != old.last["actor_q"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_something(name: str, base: Lived, demos: str, tmp_path: Path) -> None:
    changes, changed = CHANGES[name]
    new = Lived(tmp_path / "run", replace(BASE, **{"demos": demos, **changes}))
    assert changed(new, base)


def test_films_of_an_evaluation_are_in_the_run(tmp_path: Path) -> None:
    env = "toy:touch_purple?size=16&state=task"
    inputs = replace(SAC, actor=replace(SAC.actor, encoder=replace(SAC.actor.encoder, inputs=("state",))))
    config = replace(
        BASE, env=env, steps=30, start_steps=10, sac=inputs, evaluation=EvaluationConfig(episodes=2, videos=1)
    )
    lived = Lived(tmp_path / "run", config)
    (film,) = lived.lines["evaluation"][-1]["videos"]
    assert list(lived.run.videos.rglob(film))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 0}, "steps: expected a number from 1, got 0"),
        ({"online_weight": 0}, "online_weight: expected a number from 1"),
        ({"max_pending_updates": 3}, r"max_pending_updates: expected at least publish_every \(50\), got 3"),
        ({"sac": replace(SAC, critic_steps=3)}, "batch_size: expected a multiple of sac.critic_steps"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replace(BASE, **changes)


def test_steps_that_are_all_by_chance_are_refused(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rlpd", replace(BASE, steps=10, start_steps=10_000))
    with LocalRun(run) as local, pytest.raises(ConfigError, match="nothing was learned"):
        local.run()


# ---- going on


def test_an_episode_that_does_not_end_in_time_is_run_again_to_the_same_bits(
    base: Lived, demos: str, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", "rlpd", replace(BASE, demos=demos))
    stop = StopRequest(grace_s=0)
    with LocalRun(run, lambda progress: None, stop=stop) as local, health_at(30, stop.request):
        with pytest.raises(Stopped) as stopped:
            local.run()
        assert local._backend.in_progress == (28, 0)
    assert "and saved at step 0 and update 0: the 28 steps of an unfinished episode will be run" in str(stopped.value)
    with LocalRun(run) as local:
        assert "rolled back 1 episodes (28 steps)" in local.restored[-1]
        local.run()
    assert run.policy.read_bytes() == base.run.policy.read_bytes()


def test_who_quits_at_once_hears_what_is_run_again(demos: str, tmp_path: Path) -> None:
    config = replace(BASE, demos=demos, intervention=InterventionConfig(source="script", patience_steps=5))
    run = Run.create(tmp_path / "run", "rlpd", config)
    with stop_on_signals() as stop, LocalRun(run, stop=stop) as local:
        signals = [health_at(moment, lambda: os.kill(os.getpid(), signal.SIGINT)) for moment in (20, 25)]
        with signals[0], signals[1], pytest.raises(QuitAtOnce) as found:
            local.run()
    assert str(found.value) == (
        f"quit at once; 23 steps (17 by a human) and 0 updates since the last checkpoint will be run again; "
        f"`understudy resume {run.path}` continues"
    )


@contextmanager
def health_at(moment: int, call: Callable[[], object]) -> Iterator[None]:
    """Call something at the n-th sign of progress."""
    original, count = Health.progress, 0

    def progress(health: Health, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        original(health, *args, **kwargs)
        count += 1
        if count == moment:
            call()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Health, "progress", progress)
        yield


def test_a_run_that_is_done_has_nothing_left_to_do(base: Lived, capsys: pytest.CaptureFixture[str]) -> None:
    before = base.run.metrics.read_bytes()
    assert main(["resume", str(base.run.path)]) == 0
    out = capsys.readouterr().out
    assert "restored checkpoint" in out
    assert "networks, targets, optimizers, temperature and random numbers" in out.replace("\n", " ")
    assert "the run is finished: " in out
    assert f"`understudy resume {base.run.path} --steps N` trains it for longer" in out.replace("\n", " ")
    assert base.run.metrics.read_bytes() == before


def test_a_finished_run_is_trained_for_longer_to_the_bits_of_a_longer_run(
    demos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Lived(tmp_path / "short", replace(BASE, demos=demos, steps=60))
    long = Lived(tmp_path / "long", replace(BASE, demos=demos))
    assert main(["resume", str(short.run.path), "--steps", "110"]) == 0
    assert short.run.policy.read_bytes() == long.run.policy.read_bytes()
    assert short.run.config(RLPDConfig) == long.run.config(RLPDConfig)
    assert "was changed since" not in capsys.readouterr().err
    assert main(["resume", str(short.run.path), "--steps", "100"]) == 1
    assert "steps: expected 110 or more, which the run was created with, got 100" in capsys.readouterr().err
    assert main(["resume", str(short.run.path), "--iterations", "100"]) == 1
    assert "a run of rlpd is not lengthened by --iterations; use --steps" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")  # as torchrun does, for each process
    assert main(["resume", str(short.run.path), "--steps", "200"]) == 1
    assert "steps: is set by one process; use `understudy resume --ranks`" in capsys.readouterr().err
    assert short.run.config(RLPDConfig).steps == 110


def test_a_config_that_was_changed_is_not_sealed_in_silence(
    demos: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.create(tmp_path / "run", "rlpd", replace(BASE, demos=demos))
    path = run.path / "config.json"
    path.write_text(path.read_text().replace('"n_step": 1', '"n_step": 2'))
    run.extend("steps", 120)
    assert "was changed since the run was created" in caplog.text
    assert (run.config(RLPDConfig).steps, run.config(RLPDConfig).n_step) == (120, 2)


@pytest.mark.parametrize("what", ["another config", "damage", "no metrics", "another store", "no run"])
def test_what_cannot_be_resumed_is_refused(
    what: str, demos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lived = Lived(tmp_path / "run", replace(BASE, demos=demos))
    path = lived.run.path
    newest = newest_checkpoint(lived.run.checkpoints)
    assert newest is not None
    if what == "another config":
        said = json.loads((path / "config.json").read_text())
        said["config"]["sac"]["critic_hidden"] = [9, 9]
        (path / "config.json").write_text(json.dumps(said))
        text = "config/critic_hidden: the state was saved with"
    elif what == "damage":
        content = bytearray((newest / "arrays.safetensors").read_bytes())
        content[-5] ^= 1
        (newest / "arrays.safetensors").write_bytes(content)
        text = "arrays.safetensors does not match its checksum"
    elif what == "no metrics":
        lived.run.metrics.unlink()
        text = "is missing, and the checkpoint needs it"
    elif what == "another store":
        lived.run.store.rename(tmp_path / "elsewhere")
        text = "the checkpoint was taken at commit"
    else:
        path = tmp_path / "nothing"
        text = "is not a run"
    assert main(["resume", str(path)]) == 1
    assert text in capsys.readouterr().err.replace("\n", " ")
