"""The learner as a process beside several shards: killed ones come back elsewhere, and somebody else may evaluator."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.system.stop_process import signal_at
from tests.system.train_process import ENV, small_config
from tests.unit.service.client.test_remote import Serving
from tests.waiting import wait_for

from understudy.core import UnderstudyError
from understudy.envs.registry import open_world
from understudy.policies import ActorPolicy
from understudy.processes.stop import Stopped, StopRequest, stop_on_signals
from understudy.replay import Reader, Store, verify
from understudy.service import Server, ServerConfig, connect
from understudy.service.client import sharded_sampler
from understudy.training.offpolicy.actor import run_actor
from understudy.training.offpolicy.learner_process import run_learner
from understudy.training.offpolicy.rlpd import RLPDConfig, evaluator_for
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

PATIENCE_S = 200.0


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_sampler, "ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(sharded_sampler, "RETRY_S", 0.2)


def episodes(*paths: Path) -> list[Any]:
    found = []
    for path in paths:
        assert verify(path).ok
        with Reader(path) as reader:
            found += [(record, reader.read(record.id)) for record in reader.episodes()]
    return found


class Actors:
    """Threads that act, each with connections of its own."""

    def __init__(self, run: Run, places: str, spool: Path, undo: ExitStack, num: int = 2):
        self.remotes = [undo.enter_context(connect(places)) for _ in range(num)]
        self.lived: list[tuple[str, int]] = []
        self.stop = StopRequest()
        self._failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._act, args=(run.config(RLPDConfig), f"actor-{number}", spool, remote))
            for number, remote in enumerate(self.remotes)
        ]
        for thread in self._threads:
            thread.start()

    def _act(self, config: RLPDConfig, name: str, spool: Path, remote: Any) -> None:
        try:
            run_actor(
                config,
                remote,
                name=name,
                spool=spool / name,
                num_actors=lambda: len(self._threads),
                stop=self.stop,
                watch=lambda number, rolled, version: self.lived.append((name, rolled.num_steps)),
            )
        except Stopped:
            return
        except BaseException as error:
            self._failed.append(error)
            raise

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert not self._failed


@pytest.mark.nightly  # a long fault run; test_remote.py and test_demo_online_shards.py lose shards in every run
def test_a_shard_is_killed_and_comes_back_elsewhere_while_all_go_on(tmp_path: Path, undo: ExitStack) -> None:
    shards = {f"shard-{number}": Serving(tmp_path / f"shard-{number}", undo) for number in range(2)}
    places = ",".join(f"{name}={shard.address}" for name, shard in shards.items())
    config = small_config(
        None, steps=600, start_steps=50, cloning_updates=0, eval_every=10_000, publish_every=20, max_pending_updates=200
    )
    run = Run.create(tmp_path / "run", "rlpd", config)
    actors = Actors(run, places, tmp_path / "spool", undo)
    remote = undo.enter_context(connect(places))
    killed: list[str] = []
    home = remote.shard_order("actor-1")[0]

    def watch(moment: RLPDProgress) -> None:
        if moment.step > 200 and not killed:
            killed.append(home)
            shards[home].kill()
            threading.Thread(target=back, daemon=True).start()

    def back() -> None:
        time.sleep(2.0)
        address = shards[home].start()
        for one in [remote, *actors.remotes]:
            one.update_address(home, address)

    here = {"shard-0": shards["shard-0"].path}
    run_learner(run, remote, here=here, watch=watch)
    actors.join()
    assert killed == [home]
    found = episodes(*(shard.path for shard in shards.values()))
    assert all(record.state == "ended" for record, _ in found)
    stored = sorted((str(record.info.actor), record.num_steps) for record, _ in found)
    assert stored == sorted(actors.lived)  # each episode once, whole
    evaluations = list(read_metrics(run.metrics, "evaluation"))
    assert evaluations[-1]["update"] == config.num_updates
    assert evaluations[-1]["step"] >= config.steps
    versions = {name: said["parameters_version"] for name, said in remote.status().items()}
    assert len(set(versions.values())) == 1
    assert versions["shard-0"] >= 2
    # Nobody ran ahead: both together ran what max_pending_updates allows, and each the episode in which a policy
    # came and the one after. A shard that is away changes nothing in that. (Without a bound it is some thousands.)
    lines = list(read_metrics(run.metrics, "train"))
    assert max(line["step"] * 2 - line["update"] for line in lines) <= 50 * 2 + 200 + 2 * (2 * 100) * 2
    # Whoever starts again goes on with the next number, whichever shard has the others.
    with ExitStack() as again:
        remote = again.enter_context(connect([f"{name}={shard.address}" for name, shard in shards.items()]))
        numbers: list[int] = []
        stop = StopRequest()

        def watch_one(number: int, rolled: Any, version: int | None) -> None:
            numbers.append(number)
            stop.request()

        with suppress(Stopped):
            run_actor(
                config,
                remote,
                name="actor-1",
                spool=tmp_path / "spool" / "actor-1",
                stop=stop,
                watch=watch_one,
            )
        assert numbers in ([], [sum(name == "actor-1" for name, _ in actors.lived)])


def test_another_process_evaluates_while_learning_continues(tmp_path: Path, undo: ExitStack) -> None:
    shard = Serving(tmp_path / "shard-0", undo)
    config = small_config(
        None, steps=300, start_steps=50, cloning_updates=0, eval_every=100, evaluation=EvaluationConfig(episodes=2)
    )
    run = Run.create(tmp_path / "run", "rlpd", config)
    actors = Actors(run, f"a={shard.address}", tmp_path / "spool", undo, num=1)
    world = undo.enter_context(open_world(ENV))
    play = evaluator_for(world)
    updates: list[int] = []
    learned: list[int] = []
    threads: set[int] = set()

    def evaluator(policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        threads.add(threading.get_ident())
        wait_for(lambda: updates and (learned[-1:] != updates[-1:] or len(updates) >= 3))  # it learned more meanwhile
        learned.append(updates[-1])
        return play(policy, config, videos)

    remote = undo.enter_context(connect(f"a={shard.address}"))
    run_learner(
        run,
        remote,
        here={"a": shard.path},
        evaluator=evaluator,
        watch=lambda progress: updates.append(progress.update),
    )
    actors.join()
    lines = list(read_metrics(run.metrics, "evaluation"))
    assert len(lines) >= 2
    assert [line["update"] for line in lines] == sorted({line["update"] for line in lines})  # of the policy, in order
    assert lines[-1]["update"] == config.num_updates
    assert threads - {threading.get_ident()}
    assert all(line["fingerprint"]["versions"] for line in lines)


def test_what_goes_wrong_with_the_evaluator_ends_the_run(tmp_path: Path, undo: ExitStack) -> None:
    shard = Serving(tmp_path / "shard-0", undo)
    run = Run.create(
        tmp_path / "run", "rlpd", small_config(None, steps=100, start_steps=20, cloning_updates=0, eval_every=50)
    )
    actors = Actors(run, f"a={shard.address}", tmp_path / "spool", undo, num=1)

    def evaluator(policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        raise UnderstudyError("no evaluator in sight")

    remote = undo.enter_context(connect(f"a={shard.address}"))
    with pytest.raises(UnderstudyError, match="no evaluator in sight"):
        run_learner(run, remote, here={"a": shard.path}, evaluator=evaluator)
    actors.stop.request()
    actors.join()


def test_a_shard_that_is_not_there_yet_is_waited_for_if_somebody_looks_after_it(
    tmp_path: Path, undo: ExitStack
) -> None:
    shard = Serving(tmp_path / "shard-0", undo)
    remote = undo.enter_context(connect("a=127.0.0.1:1"))
    said: list[str] = []

    def waiting(text: str) -> None:
        said.append(text)
        remote.update_address("a", shard.address)

    remote.wait_until_reachable(waiting)
    assert set(said) == {"waiting for a"}


def test_a_learner_of_several_shards_needs_no_directory_of_theirs(
    tmp_path: Path, undo: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    from understudy.cli import main

    shards = {name: Serving(tmp_path / name, undo) for name in "ab"}
    places = ",".join(f"{name}={shard.address}" for name, shard in shards.items())
    config = small_config(None, steps=120, start_steps=50, cloning_updates=0, eval_every=10_000)
    run = Run.create(tmp_path / "run", "rlpd", config)
    actors = Actors(run, places, tmp_path / "spool", undo, num=2)
    assert main(["learner", str(run.path), places]) == 0
    actors.join()
    told = capsys.readouterr()
    assert "of held-out episodes succeed" in told.out
    assert main(["learner", str(run.path), places, "--local-shards", "a"]) == 1
    assert "local-shards: expected NAME=DIRECTORY" in capsys.readouterr().err
    # It goes on from there with one of them in its directory, and without the other only if that is said to be lost.
    assert main(["learner", str(run.path), f"a={shards['a'].address}", "--local-shards", f"a={tmp_path / 'a'}"]) == 1
    assert "b: the checkpoint counts on this shard" in capsys.readouterr().err.replace("\n", " ")
    options = ["--local-shards", f"a={tmp_path / 'a'}", "--lost-shards", "b"]
    assert main(["learner", str(run.path), f"a={shards['a'].address}", *options]) == 0


# ---- a learner that catches up


def catch_up(path: Path, recorded: Path, config: RLPDConfig, *moments: int) -> tuple[list[dict[str, Any]], int]:
    """Learn from a store that has all its steps, stopped at these moments in turn; metrics and number of moments."""
    run = Run.create(path, "rlpd", config)
    shutil.copytree(recorded, run.store)
    with Store.open(run.store) as store, Server(store, ServerConfig(port=0)) as server:
        for moment in (*moments, 0):
            stops = pytest.raises(Stopped, match=r"no update is lost; start it again to continue$")
            with stop_on_signals() as stop, signal_at(moment) as seen, stops if moment else nullcontext():
                run_learner(run, server.address, stop=stop)
    return [{k: v for k, v in line.items() if k != "updates_per_s"} for line in read_metrics(run.metrics)], seen.count


def test_a_learner_that_catches_up_saves_by_time_and_where_it_is_stopped(tmp_path: Path) -> None:
    config = small_config(
        None, steps=60, start_steps=20, cloning_updates=0, eval_every=30, publish_every=20, max_pending_updates=None
    )
    with Store.open(tmp_path / "recorded") as store, Server(store, ServerConfig(port=0)) as server:
        run_actor(config, server.address)  # at random, since nobody learns
    wanted, count = catch_up(tmp_path / "undisturbed", tmp_path / "recorded", config)
    assert wanted[-1]["update"] == config.num_updates
    stopped, _ = catch_up(tmp_path / "stopped", tmp_path / "recorded", config, count // 3, count // 3)
    assert stopped == wanted
    policies = [(tmp_path / name / "policy.safetensors").read_bytes() for name in ("undisturbed", "stopped")]
    assert policies[0] == policies[1]
    often = replace(config, checkpoint_every_s=1e-9, keep_checkpoints=99)
    catch_up(tmp_path / "often", tmp_path / "recorded", often)
    numbers = [len(list((tmp_path / name / "checkpoints").iterdir())) for name in ("undisturbed", "often")]
    assert numbers[0] <= 2
    assert numbers[1] >= config.num_updates // config.publish_every
