"""Checkpoints that are written while the run goes on: they are what the run was when it saved, and nothing is said to
be saved before it is."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.unit.training.onpolicy.making import digest_of_weights, make_config, save_policy, train
from tests.waiting import wait_for

from understudy.core import UnderstudyError
from understudy.policies.vla import VLAPolicy
from understudy.processes.stop import QuitAtOnce, Stopped, StopRequest
from understudy.training.distributed import shard_file
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.ranks import single_rank
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.runs import background_write
from understudy.training.runs.background_write import BackgroundWrite
from understudy.training.runs.checkpoint import CheckpointError, read_checkpoint
from understudy.training.runs.fingerprint import digest_of_arrays
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

WAIT_S = 60.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "policy.safetensors")


class Disk:
    """Holds the writes of shards up, or fails them, by their number from 1."""

    def __init__(self, plain: Callable[..., str]):
        self.num_begun = 0
        self.held: dict[int, threading.Event] = {}
        self.failing: set[int] = set()
        self._plain = plain

    def write_shard(self, path: Path, pieces: Any) -> str:
        self.num_begun += 1
        number = self.num_begun
        if number in self.held:
            assert self.held[number].wait(WAIT_S)
        if number in self.failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return self._plain(path, pieces)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(shard_file.write_shard)
    monkeypatch.setattr(shard_file, "write_shard", found.write_shard)
    yield found
    for held in found.held.values():
        held.set()


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path: Path, policy: Path, disk: Disk) -> None:
    """A whole iteration, with its updates, before the write of the iteration before has ended."""
    disk.held[2] = threading.Event()
    seen: list[tuple[int, list[str]]] = []
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, iterations=3, checkpoint_every=1))

    def watch(news: OnPolicyProgress) -> None:
        if news.metrics and news.iteration == 2:
            seen.append((disk.num_begun, names(run)))
            disk.held[2].set()

    with OnPolicyRun(run, watch) as training:
        training.run()
    assert seen == [(2, [".new-000000000001", "000000000000-0"])]
    assert names(run) == ["000000000001-0", "000000000002-0", "000000000003-0"]
    undisturbed = train(tmp_path / "undisturbed", make_config(policy, iterations=3, checkpoint_every=1))
    assert digest_of_weights(training) == digest_of_weights(undisturbed)


def test_a_checkpoint_is_what_the_run_was_when_it_saved(tmp_path: Path, policy: Path, disk: Disk) -> None:
    """Weights, moments, facts and the policy's file: though all of them are written after further updates."""
    disk.held[2] = threading.Event()
    run = Run.create(
        tmp_path / "run", "grpo", make_config(policy, iterations=3, checkpoint_every=1, save_policy_every=1)
    )
    moment: dict[str, Any] = {}

    def watch(news: OnPolicyProgress) -> None:
        if news.metrics and news.iteration == 1:
            tensors = training._learner.engine.tensors()
            moment.update({name: value.detach().numpy().copy() for name, value in tensors.items()})
            moment["policy"] = digest_of_arrays(training.policy.parameters())

    with OnPolicyRun(run, watch) as training:
        training.iterate()
        training._save(keep_policy=True)
        training.iterate()
        now = training._learner.engine.tensors()
        assert any(not np.array_equal(moment[name], value.detach().numpy()) for name, value in now.items())
        disk.held[2].set()
        training._wait_saved()
        (shard,) = run.checkpoints.glob("000000000001-0/shards/*/*.safetensors")
        written = load_file(shard)
        assert written.keys() == (moment.keys() - {"policy"}) | {"rank/0/random/cpu"}
        assert all(np.array_equal(written[name], moment[name]) for name in now)
        saved = read_checkpoint(run.checkpoints / "000000000001-0")
        assert (saved.facts["iteration"], saved.facts["version"]) == (1, 1)
        assert saved.facts["learning"] == {"norms": [], "totals": [{}]}
        for path in (run.path, run.path / "policies" / "iteration-000001"):
            loaded = VLAPolicy.load(path / "policy.safetensors")
            assert (loaded.version, digest_of_arrays(loaded.parameters())) == (1, moment["policy"])


def test_the_next_save_waits_and_says_how_long(tmp_path: Path, policy: Path, disk: Disk) -> None:
    """One write at a time; the wait is in the metrics of the iteration after."""
    disk.held[2] = threading.Event()
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, iterations=3, checkpoint_every=1))
    found: list[int] = []

    def release() -> None:
        wait_for(lambda: disk.num_begun == 2)
        wait_for(lambda: training._writer._writes.is_waiting)
        found.append(disk.num_begun)
        disk.held[2].set()

    with OnPolicyRun(run) as training:
        thread = threading.Thread(target=release)
        thread.start()
        training.run()
        thread.join()
    assert found == [2]
    first, second, third = read_metrics(run.metrics, "train")
    assert first["save_s"] > 0  # of the checkpoint that the run begins with
    assert first["save_wait_s"] == 0
    assert second["save_s"] > 0
    assert 0 < third["save_wait_s"] < third["save_s"]


def test_a_failed_write_ends_the_run_with_its_cause(tmp_path: Path, policy: Path, disk: Disk) -> None:
    disk.failing.add(2)
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, iterations=50, checkpoint_every=1))
    said = r"the last checkpoint was not written: OSError: .*No space left on device.*those before it are intact"
    with pytest.raises(CheckpointError, match=said) as failed, OnPolicyRun(run) as training:
        training.run()
    assert isinstance(failed.value.__cause__, OSError)
    assert failed.value.__cause__.errno == errno.ENOSPC
    assert training.iteration <= 2
    with OnPolicyRun(Run(run.path)) as resumed:
        assert resumed.iteration == 0


def test_a_write_that_fails_at_the_end_is_raised(tmp_path: Path, policy: Path, disk: Disk) -> None:
    """By the run, or by whoever closes it without one."""
    disk.failing |= {2, 4}
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, iterations=1))
    with pytest.raises(UnderstudyError, match="the last checkpoint was not written"), OnPolicyRun(run) as training:
        training.run()
    other = Run.create(tmp_path / "other", "grpo", make_config(policy, iterations=1))
    with pytest.raises(UnderstudyError, match="the last checkpoint was not written"), OnPolicyRun(other) as training:
        training._save()


def test_a_stopped_run_says_so_when_it_is_saved(tmp_path: Path, policy: Path, disk: Disk) -> None:
    disk.held[2] = threading.Event()
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, iterations=5, checkpoint_every=100))
    stop = StopRequest()

    def watch(news: OnPolicyProgress) -> None:
        if news.metrics:
            stop.request()

    def release() -> None:
        wait_for(lambda: disk.num_begun == 2)
        wait_for(lambda: training._writer._writes.is_waiting)
        disk.held[2].set()

    with OnPolicyRun(run, watch, stop=stop) as training:
        thread = threading.Thread(target=release)
        thread.start()
        with pytest.raises(Stopped) as stopped:
            training.run()
        assert names(run) == ["000000000000-0", "000000000001-0"]
        thread.join()
    assert stopped.value.sentence.startswith("stopped and saved at iteration 1 of 5")


def test_steps_count_as_unsaved_until_they_are_on_the_disk(tmp_path: Path, policy: Path, disk: Disk) -> None:
    disk.held[2] = threading.Event()
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, iterations=5))
    with OnPolicyRun(run) as training:
        training.iterate()
        training._save()
        assert training._describe_unsaved().startswith(f"{training.num_steps} steps")
        disk.held[2].set()
        training._wait_saved()
        assert training._describe_unsaved().startswith("0 steps")


def save_and_raise(training: OnPolicyRun, error: BaseException) -> None:
    training.iterate()
    training._save()
    raise error


def test_whoever_quits_at_once_does_not_wait_and_leaves_the_lock_to_the_process(
    tmp_path: Path, policy: Path, disk: Disk
) -> None:
    """The thread may still write: nobody else may train the run before the process has ended."""
    disk.held[2] = threading.Event()
    run = Run.create(tmp_path / "run", "grpo", make_config(policy))
    with pytest.raises(QuitAtOnce), OnPolicyRun(run) as training:
        save_and_raise(training, QuitAtOnce())
    assert names(run) == [".new-000000000001", "000000000000-0"]
    with pytest.raises(UnderstudyError, match="another process is training it"):
        OnPolicyRun(Run(run.path))
    disk.held[2].set()
    training._writer.wait()
    assert names(run) == ["000000000000-0", "000000000001-0"]


def test_another_error_lets_the_write_end(tmp_path: Path, policy: Path, disk: Disk) -> None:
    """And what failed besides is a note of the error."""
    disk.failing.add(4)
    for name, found in (
        ("one", ["000000000000-0", "000000000001-0"]),
        ("two", [".new-000000000001", "000000000000-0"]),
    ):
        run = Run.create(tmp_path / name, "grpo", make_config(policy))
        with pytest.raises(ZeroDivisionError) as error, OnPolicyRun(run) as training:
            save_and_raise(training, ZeroDivisionError())
        assert names(run) == found
    assert "the last checkpoint was not written" in error.value.__notes__[0]


def test_an_owner_that_waits_says_so_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others do not take it for dead."""
    monkeypatch.setattr(background_write, "LOOK_S", 0.001)
    ended, calls = threading.Event(), []

    def waiting() -> None:
        calls.append(writes.is_waiting)
        if len(calls) == 3:
            ended.set()

    writes = BackgroundWrite("checkpoint", waiting)
    writes.start(ended.wait)
    assert writes.under_way
    writes.wait()
    assert calls[:3] == [True, True, True]
    assert not writes.under_way
    assert writes.waited_s > 0


def test_a_snapshot_is_of_tensors_that_are_not_contiguous_too(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    module.weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).T)
    engine = Engine(module, EngineConfig(), single_rank("cpu"))
    staged = engine.stage(tmp_path)
    with torch.no_grad():
        module.weight.fill_(7)
    staged.write()
    engine.load(tmp_path)
    assert module.weight.tolist() == [[0, 2, 4], [1, 3, 5]]
