"""BatchDataset under a real DataLoader: the batches of the single-process sampler, each once, in its order."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.writing import write_episode
from torch.utils.data import DataLoader

from understudy.core import StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.examples import random_episode, robot_spec, small_spec, text_spec
from understudy.replay import EVERYTHING, BatchSource, EmptyError, Fifo, Mixture, Sampler, Store, Transitions
from understudy.service import connect
from understudy.training.data.batch_dataset import BatchDataset, to_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on a machine with few cores
]

EPOCH = 7  # batches, which no number of workers below divides


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("dataset") / "store", robot_spec())


def fill(path: Path, spec: StepSpec, num_episodes: int = 4) -> Path:
    with Store.open(path) as store:
        writer = store.writer("w", spec, flush_each_episode=False)
        for seed in range(num_episodes):
            write_episode(writer, random_episode(spec, 9, seed))
        writer.flush()
    return path


def opener(path: Path, **options: Any) -> Callable[[], BatchSource[Any]]:
    """Can be pickled, for workers that are spawned."""
    return partial(Sampler, path, EVERYTHING, **{"batch_size": 5, "seed": 3, **options})


def digest(batch: dict[str, Any]) -> str:
    """Of every bit."""
    found = hashlib.sha256()
    for path, leaf in trees.leaves(batch):
        found.update(path.encode())
        found.update(repr(leaf).encode() if isinstance(leaf, list) else leaf.contiguous().numpy().tobytes())
    return found.hexdigest()


def digests(batches: Iterable[dict[str, Any]]) -> list[str]:
    return [digest(batch) for batch in batches]


def plain(open_source: Callable[[], BatchSource[Any]], num_batches: int) -> list[str]:
    """What the source itself draws, in one process."""
    source = open_source()
    source.follow()
    found = [digest(to_tensors(source.sample())) for _ in range(num_batches)]
    source.close()
    return found


def loader(dataset: BatchDataset, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    context = options.pop("context", "fork") if num_workers else None
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=context,
        timeout=num_workers and 120,
        **options,
    )


@pytest.mark.parametrize(
    ("num_workers", "persistent"), [(0, False), (2, False), (3, True), pytest.param(9, True, marks=pytest.mark.nightly)]
)
def test_the_batches_of_the_sampler_in_its_order(path: Path, num_workers: int, persistent: bool) -> None:
    wanted = plain(opener(path), 3 * EPOCH)
    assert len(set(wanted)) == 3 * EPOCH
    batches = loader(BatchDataset(opener(path), num_batches=EPOCH), num_workers, persistent_workers=persistent)
    assert [digest for _ in range(3) for digest in digests(batches)] == wanted


@pytest.mark.parametrize("context", ["spawn", pytest.param("forkserver", marks=pytest.mark.nightly)])
def test_workers_that_are_not_forked(path: Path, context: str) -> None:
    batches = loader(BatchDataset(opener(path), num_batches=3), 2, context=context, persistent_workers=True)
    assert digests(batches) + digests(batches) == plain(opener(path), 6)


def test_mixtures(path: Path) -> None:
    def open_mixture() -> Mixture[Any]:
        samplers = {name: Sampler(path, EVERYTHING, batch_size=5, seed=ord(name)) for name in "ab"}
        return Mixture(samplers, {"a": 1, "b": 4}, batch_size=3)  # `a` gives nothing to some batches

    batches = loader(BatchDataset(open_mixture, num_batches=EPOCH), 2)
    assert digests(batches) + digests(batches) == plain(open_mixture, 2 * EPOCH)


def test_a_queue_gives_each_step_once(path: Path) -> None:
    open_queue = opener(path, selector=Fifo(), batch_size=6)
    batches = loader(BatchDataset(open_queue, num_batches=6), 2)
    steps = [pair for batch in batches for pair in zip(batch["episode"].tolist(), batch["index"].tolist(), strict=True)]
    assert sorted(steps) == [(episode, index) for episode in range(1, 5) for index in range(9)]


SERVE = """
import sys
from understudy.replay import Store
from understudy.service import Server, ServerConfig
with Store.open(sys.argv[1]) as store, Server(store, ServerConfig(port=0)) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server in a process of its own."""
    command = [sys.executable, "-c", SERVE, fill(tmp_path / "served", small_spec())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.communicate("\n")


@pytest.mark.serial  # in a process without Ray, which keeps gRPC running
def test_remote_and_sharded_samplers(address: str) -> None:
    for open_source in (
        lambda: connect(address).sampler(EVERYTHING, batch_size=5, seed=3),
        lambda: connect(address).sampler(EVERYTHING, batch_size=5, seed=3, depth=0),
        lambda: connect(f"a={address}").sharded_sampler(EVERYTHING, batch_size=5, seed=3),
    ):
        batches = loader(BatchDataset(open_source, num_batches=EPOCH), 2, persistent_workers=True)
        assert digests(batches) + digests(batches) == plain(open_source, 2 * EPOCH)
        del batches


@pytest.mark.parametrize("given", [True, False])
def test_ranks_share_the_batches(path: Path, tmp_path: Path, given: bool) -> None:
    """Two real processes, with two workers each; the rank is an argument, or that of torch.distributed."""

    def run(rank: int) -> None:
        options = {"rank": rank, "world_size": 2}
        if not given:
            torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", **options)
        dataset = BatchDataset(opener(path), num_batches=10, **(options if given else {}))
        batches = loader(dataset, 2)
        (tmp_path / f"rank-{rank}").write_text(json.dumps([digests(batches), digests(batches)]))

    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(200)
            try:
                run(rank)
            finally:
                os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    wanted = plain(opener(path), 20)
    for rank in range(2):
        first, second = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert first == wanted[:10][rank::2]
        assert second == wanted[10:][rank::2]


def test_a_run_continues_at_a_batch_as_of_the_same_commit(tmp_path: Path) -> None:
    path = fill(tmp_path / "store", small_spec())
    dataset = BatchDataset(opener(path), num_batches=EPOCH)
    wanted = plain(opener(path), 3 * EPOCH)
    batches = loader(dataset, 2)
    digests(batches)
    assert digests(islice(batches, 3)) == wanted[EPOCH : EPOCH + 3]
    saved = json.loads(json.dumps({"state": dataset.state, "start": EPOCH + 3}))
    fill(path, small_spec(), 2)  # the store grows
    for num_workers in (0, 2):
        again = loader(BatchDataset(opener(path, seed=99), num_batches=EPOCH, **saved), num_workers)
        assert digests(again) == wanted[EPOCH + 3 : 2 * EPOCH + 3]
    assert plain(opener(path), 1) != wanted[:1]
    later = BatchDataset(opener(path), num_batches=EPOCH)
    assert digests(later) == plain(opener(path), EPOCH)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_is_broken_off_is_over(path: Path, num_workers: int) -> None:
    dataset = BatchDataset(opener(path), num_batches=EPOCH, start=4)
    batches = loader(dataset, num_workers)
    wanted = plain(opener(path), 4 + 3 * EPOCH)[4:]
    torch.manual_seed(0)
    assert digests(islice(batches, 2)) == wanted[:2]
    torch.manual_seed(0)  # a loader that is seeded alike is another one
    assert digests(batches) == wanted[EPOCH : 2 * EPOCH]
    assert dataset.next_start == 4 + 2 * EPOCH
    assert digests(loader(dataset, 0)) == wanted[2 * EPOCH :]  # so is one with another number of workers


def test_two_passes_at_once_in_one_process(path: Path) -> None:
    dataset = BatchDataset(opener(path), num_batches=3)
    wanted = plain(opener(path), 6)
    assert [digest(batch) for pair in zip(dataset, dataset, strict=True) for batch in pair] == [
        wanted[number] for number in (0, 3, 1, 4, 2, 5)
    ]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_pinned_batches_are_the_same(path: Path) -> None:
    batches = loader(BatchDataset(opener(path), num_batches=3), 1, pin_memory=True)
    assert digests(batches) == plain(opener(path), 3)


def test_texts_and_ragged_fields_are_lists(tmp_path: Path) -> None:
    open_source = opener(fill(tmp_path / "store", text_spec()), shape=Transitions())
    batches = loader(BatchDataset(open_source, num_batches=3), 2)
    assert digests(batches) == plain(open_source, 3)


def test_tensors_share_the_memory_of_the_batch(path: Path) -> None:
    with Sampler(path, EVERYTHING, batch_size=5, seed=3) as sampler:
        sampler.follow()
        batch = sampler.sample()
    tensors = to_tensors(batch)
    batch.reward[2] = 17.0
    assert tensors["reward"][2] == 17.0
    assert tensors.keys() == vars(batch).keys()


def test_the_file_of_the_epochs_goes_with_the_dataset(path: Path) -> None:
    dataset = BatchDataset(opener(path), num_batches=2)
    file = dataset._epochs._path
    digests(loader(dataset, 2))
    assert file.exists()
    del dataset
    assert not file.exists()


def test_what_cannot_be_shared_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StoreError, match="num_batches: expected a multiple of the 2 ranks, so that all get as many, got 3"
    ):
        BatchDataset(opener(path), num_batches=3, rank=0, world_size=2)
    with pytest.raises(StoreError, match="rank: expected a rank below world_size, and both, got 2 of 2"):
        BatchDataset(opener(path), num_batches=4, rank=2, world_size=2)
    with pytest.raises(StoreError, match="start: expected a number from 0, got -1"):
        BatchDataset(opener(path), num_batches=4, start=-1)
    with pytest.raises(StoreError, match="the source gives this rank's part of each batch already"):
        BatchDataset(opener(path, rank=0, world_size=2), num_batches=4, rank=0, world_size=2)
    Store.open(tmp_path / "empty").close()
    with pytest.raises(EmptyError, match="record something before you make a dataset"):
        BatchDataset(opener(tmp_path / "empty"), num_batches=4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StoreError, match="call init_process_group first, or pass rank= and world_size="):
        BatchDataset(opener(path), num_batches=4)


def test_a_source_of_parts_gives_its_part_of_every_batch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    open_part = opener(path, rank=1, world_size=2)
    assert digests(loader(BatchDataset(open_part, num_batches=3), 2)) == plain(open_part, 3)
