"""What the ranks of the tests do; each function joins, and writes what came of it into a directory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.unit.training.distributed.small import Net, Sometimes, lora, rows, train

from understudy.training.distributed import shard_file
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine, local_shard
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import Ranks, join, single_rank
from understudy.training.distributed.row_exchange import exchange_rows

TIMEOUT_S = 120.0


def make(ranks: Ranks, module: torch.nn.Module | None = None, **options: Any) -> Engine:
    """Each rank with other weights: those of rank 0 must count. What no loss reaches must not decay either."""
    module = Net(seed=ranks.rank) if module is None else module
    return Engine(module, EngineConfig(learning_rate=1e-2, weight_decay=0.1, **options), ranks)


def write(ranks: Ranks, path: Path, said: Any, engine: Engine) -> None:
    weights = engine.parameters(everywhere=False)
    assert bool(weights) == ranks.first
    if ranks.first:
        np.savez(path, said=np.array(said), **weights)


def refused(call: Callable[[], Any]) -> str:
    """What it was refused with."""
    try:
        call()
    except RanksError as error:
        return str(error)
    return "was not refused"


def two(place: str) -> None:
    """All that is to be seen with two ranks, in one go, because each process takes seconds to start."""
    torch.set_num_threads(1)
    out = Path(place)
    with join(timeout_s=TIMEOUT_S) as ranks:
        for parallel in ("ddp", "fsdp"):
            equality(ranks, out, parallel)
            engine = make(ranks, parallel=parallel, precision="bfloat16")
            write(ranks, out / f"{parallel}-bfloat16.npz", train(engine, ranks), engine)
            assert engine.forward(rows(2)[0])["out"].dtype == torch.float32
            engine = make(ranks, parallel=parallel, gradient_checkpointing=True)
            write(ranks, out / f"{parallel}-again.npz", train(engine, ranks), engine)
            if importlib.util.find_spec("peft"):
                engine = make(ranks, lora(Net(seed=ranks.rank)), parallel=parallel)
                write(ranks, out / f"{parallel}-lora.npz", train(engine, ranks), engine)
                engine.save(out / f"{parallel}-lora")
            saves(ranks, out, parallel)
            sometimes(ranks, parallel)
        sharded_gradients(ranks)
        claims(ranks)
        engine = make(ranks, parallel="fsdp", offload_parameters=True)
        groups = engine.module._get_fsdp_state()._fsdp_param_group.fsdp_params  # type: ignore[operator, union-attr]
        assert all(one.offload_to_cpu for one in groups)
        write(ranks, out / "offload.npz", train(engine, ranks), engine)
        pace(ranks, out)
        make(ranks, torch.nn.Linear(4, 1), parallel="fsdp").save(out / "line")
        words(ranks, out)
        said = refused(lambda: make(ranks))
        assert said == "parallel: 'none' would train 2 separate policies; use 'ddp' or 'fsdp'", said
        assert "state: is for one process, and there are 2" in refused(engine.state)


def claims(ranks: Ranks) -> None:
    """Each number is claimed by one rank, as often as the ranks share work."""
    for _ in range(3):
        claim = ranks.claims()
        mine = [number for number in range(50) if claim(number)]
        assert not any(claim(number) for number in mine)
        everyone = ranks.gather_json(mine, name="claimed")
        assert sorted(number for theirs in everyone for number in theirs) == list(range(50))


def four(place: str) -> None:
    torch.set_num_threads(1)
    with join(timeout_s=TIMEOUT_S) as ranks:
        for parallel in ("ddp", "fsdp"):
            equality(ranks, Path(place), parallel)
        trouble(ranks, Path(place), "raised", "fsdp")


def equality(ranks: Ranks, out: Path, parallel: str) -> None:
    """Uneven rows, and fewer rows than ranks, which leaves one with nothing but padding."""
    for dtype in (torch.float32, torch.float64):
        for num_rows in (7, ranks.size - 1):
            engine = make(ranks, Net(seed=ranks.rank).to(dtype), parallel=parallel)
            said = train(engine, ranks, dtype=dtype, num_rows=num_rows)
            write(ranks, out / f"{parallel}-{str(dtype)[6:]}-{num_rows}.npz", said, engine)


def sharded_gradients(ranks: Ranks) -> None:
    """Between two micro batches a rank holds its shard of each gradient, and not the whole."""
    engine = make(ranks, parallel="fsdp", precision="bfloat16")
    engine.backward(engine.forward(rows(2)[0])["out"].square().sum(), last=False)
    used = {name: value for name, value in engine.module.named_parameters() if not name.startswith("judge")}
    gradients = [local_shard(value.grad) for value in used.values() if value.grad is not None]
    assert len(gradients) == len(used)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    whole = sum(value.numel() for value in used.values())
    assert sum(gradient.numel() for gradient in gradients) <= 0.6 * whole


def pace(ranks: Ranks, out: Path) -> None:
    """Acting at one's own pace, and weights that come from elsewhere."""
    engine = make(ranks, parallel="fsdp")
    inputs = rows(2)[0]
    with engine.unsharded(), torch.no_grad():
        acted = [engine.forward(inputs)["out"].tolist() for _ in range(1 + 2 * ranks.rank)]  # as often as it likes
        assert all(one == acted[0] for one in acted)
        assert "weights: within unsharded() only forward" in refused(engine.parameters)
        assert "backward: within unsharded()" in refused(lambda: engine.backward(torch.zeros(()), last=True))
    said = train(engine, ranks)
    with engine.unsharded(), torch.no_grad():
        acted.append(engine.forward(inputs)["out"].tolist())
    write(ranks, out / "pace.npz", said, engine)
    with torch.no_grad():
        assert engine.forward(inputs)["out"].tolist() == acted[-1]  # together again
    weights = Net(seed=77).state_dict()
    engine.load_parameters({name: value.numpy() for name, value in weights.items()})
    loaded = engine.parameters()
    assert all(np.array_equal(loaded[name], weights[name].numpy()) for name in weights)
    with torch.no_grad():  # what was gathered before is not used again
        torch.testing.assert_close(engine.forward(inputs)["out"], Net(seed=77)(inputs)["out"])
    whole = sum(value.numel() for value in Net().parameters())
    mine = sum(local_shard(value).numel() for name, value in engine.tensors().items() if name.startswith("module/"))
    assert mine <= 0.6 * whole, (mine, whole)


def sometimes(ranks: Ranks, parallel: str) -> None:
    """A head in only one of two micro batches, or in only some updates."""
    inputs = rows(8, torch.float64)[0]
    for asked in (lambda update, micro: micro == 0, lambda update, micro: micro == 1, lambda update, micro: update % 2):
        engine, single = make(ranks, Sometimes().double(), parallel=parallel), make(single_rank(), Sometimes().double())
        for update in range(4):
            for micro in range(2):
                part = inputs[4 * micro : 4 * micro + 4]
                for one in (engine, single):
                    mine = part[one.ranks.rank :: one.ranks.size]
                    one.backward(one.forward(mine, bool(asked(update, micro))).square().sum(), last=micro == 1)
            np.testing.assert_allclose(engine.step(), single.step(), rtol=1e-12)
        for name, value in single.parameters().items():
            np.testing.assert_allclose(engine.parameters()[name], value, atol=1e-12)


def saves(ranks: Ranks, out: Path, parallel: str) -> None:
    engine = make(ranks, Net(seed=ranks.rank).double(), parallel=parallel)
    engine.save(out / parallel)  # of which nothing is left in the end
    train(engine, ranks, dtype=torch.float64)
    said = refused(lambda: unwritten(ranks, engine, out / parallel))
    wanted = f"rank 0: {out / parallel}: rank 1: its shard was not written: OSError: [Errno 28] No space left on device"
    assert said.startswith(wanted), said
    staged = engine.stage(out / parallel)
    writing = threading.Thread(target=staged.write)
    if ranks.first:  # waits for the others, while it trains with them
        writing.start()
    np.save(out / f"saved-{parallel}-{ranks.rank}.npy", np.array(train(engine, ranks, dtype=torch.float64)))
    if not ranks.first:  # writes what the weights were before
        writing.start()
    writing.join()
    ranks.barrier("saved")


def unwritten(ranks: Ranks, engine: Engine, directory: Path) -> None:
    """A save for which one rank has no space."""
    full = mock.patch.object(shard_file, "write_shard", side_effect=OSError(28, "No space left on device"))
    with full if ranks.rank == 1 else contextlib.nullcontext():
        engine.save(directory)


def three(place: str) -> None:
    """What two have saved goes on with three; what ranks say to each other, and rows that move; an end by force."""
    torch.set_num_threads(1)
    out = Path(place)
    with join(timeout_s=TIMEOUT_S) as ranks:
        for source in ("ddp", "fsdp"):
            for parallel in ("ddp", "fsdp"):
                engine = make(ranks, Net(seed=40 + ranks.rank).double(), parallel=parallel)
                engine.load(out / source)
                assert engine.num_updates == 5
                said = train(engine, ranks, dtype=torch.float64)
                if ranks.first:
                    np.save(out / f"{source}-{parallel}-3.npy", np.array(said))
        engine = make(ranks, parallel="fsdp")
        before = engine.parameters()
        problem = refused(lambda: engine.load(out / "nowhere"))
        assert problem.startswith(f"rank 0: {out}/nowhere: holds no complete checkpoint"), problem
        assert "are only on one side" in refused(lambda: engine.load(out / "line"))
        assert all(np.array_equal(before[name], value) for name, value in engine.parameters().items())
        words(ranks, out)
        trouble(ranks, out, "killed", "ddp")


def words(ranks: Ranks, out: Path) -> None:
    source = ranks.size - 1
    given = {"x": np.arange(6.0).reshape(2, 3)[:, ::2], "t": np.array(["a", "bc"]), "n": np.array(7), "e": np.zeros(0)}
    got = ranks.broadcast_arrays(given if ranks.rank == source else None, source=source)
    assert got.keys() == given.keys()
    assert all(np.array_equal(got[name], given[name]) and got[name].dtype == given[name].dtype for name in given)
    ids, wide = np.array([ranks.rank]), {"c": np.zeros((1, 1 + ranks.rank))}
    heard = {
        "gathered": ranks.gather_json({"rank": ranks.rank, "text": "ü" * ranks.rank}),
        "sum": ranks.sum({"a": 0.1 * (ranks.rank + 1), "b": -1.0}),
        "errors": [
            refused(lambda: ranks.sum({"a": 1.0} if ranks.rank else {"b": 1.0})),
            refused(lambda: ranks.barrier("left" if ranks.rank else "right")),
            refused(lambda: exchange_rows(ranks, ids, {}, np.array([99] if ranks.rank == 1 else []))),
            refused(lambda: exchange_rows(ranks, ids, wide, np.array([0]))),
            refused(lambda: exchange_rows(ranks, np.array([5, 5]), {}, np.array([]))),
        ],
        "moved": _exchange(ranks),
    }
    (out / f"words-{ranks.size}-{ranks.rank}.json").write_text(json.dumps(heard))
    ranks.barrier("written")


def _exchange(ranks: Ranks) -> list[int]:
    """Rank 0 has 5 rows, rank 1 none, the others 2 each; the last one also has row 0."""
    first = 5 + 2 * (ranks.rank - 2)
    have = [0, 1, 2, 3, 4] if ranks.rank == 0 else [] if ranks.rank == 1 else [first + 1, first]
    have += [0] if ranks.rank == ranks.size - 1 else []
    ids = np.array(have, np.int64)
    columns = {
        "picture": ids[:, None, None].astype(np.uint8) + np.arange(6, dtype=np.uint8).reshape(2, 3),
        "words": np.array([f"task {'x' * one}" for one in have]),
        "flag": ids % 2 == 0,
        "value": ids * 0.5,
    }
    need = np.array([4, 0, 4, ranks.rank])
    done = exchange_rows(ranks, ids, columns if have else {}, need)
    assert done.columns["value"].tolist() == (need * 0.5).tolist()
    assert done.columns["flag"].tolist() == (need % 2 == 0).tolist()
    assert done.columns["words"].tolist() == [f"task {'x' * one}" for one in need]
    assert done.columns["picture"].dtype == np.uint8
    assert done.columns["picture"][:, 1, 2].tolist() == (need + 5).tolist()
    return [done.num_rows_moved, done.num_bytes_sent, done.num_bytes_received]


def killed(place: str) -> None:
    torch.set_num_threads(1)
    with join(timeout_s=TIMEOUT_S) as ranks:
        trouble(ranks, Path(place), "killed", "ddp")


def hung(place: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    with join(timeout_s=timeout_s) as ranks:
        trouble(ranks, Path(place), "hung", "fsdp")


def late(place: str, timeout_s: float) -> None:
    """Rank 1 works for half as long again as the limit, and says so; rank 0 waits for it, and then rank 1 for it."""
    with join(timeout_s=timeout_s) as ranks:
        for slow in (1, 0):
            began = time.monotonic()
            while ranks.rank == slow and time.monotonic() < began + 1.5 * timeout_s:
                ranks.progress("evaluating")
                time.sleep(0.05)
            ranks.barrier(f"after rank {slow}")
            waited_s = time.monotonic() - began
            assert waited_s > 1.1 * timeout_s, waited_s
    (Path(place) / f"late-{ranks.rank}").write_text("both arrived")


def trouble(ranks: Ranks, out: Path, what: str, parallel: str) -> None:
    """Rank 1 makes trouble in the third update; the others write what they were told, and when."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that the launcher ends us is another test
    engine = make(ranks, parallel=parallel)
    train(engine, ranks, updates=2)
    ranks.barrier("before")
    began = time.monotonic()
    try:
        if ranks.rank == 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hung":
                ranks.progress("evaluating")
                time.sleep(3600)
            raise ValueError("the world fell off the table")
        train(engine, ranks, updates=1)
    except RanksError as error:
        said = {"said": str(error), "after_s": time.monotonic() - began}
        (out / f"{what}-{ranks.rank}.json").write_text(json.dumps(said))
        raise
