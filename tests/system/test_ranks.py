"""Real ranks on this machine: the numbers of one process from any number of them, and an end for all when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.unit.training.distributed.processes import make
from tests.unit.training.distributed.small import Net, lora, train
from tests.waiting import wait_for

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.launch import launch, launch_function
from understudy.training.distributed.ranks import join, single_rank

HERE = "tests.unit.training.distributed.processes"
ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0  # for what takes seconds

pytestmark = pytest.mark.xdist_group("ranks")  # they share what two and three ranks have written


@pytest.fixture(autouse=True, scope="module")
def _at_home() -> Iterator[None]:
    """The ranks find the tests from here; one thread, as there."""
    before, threads = Path.cwd(), torch.get_num_threads()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.chdir(before)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have written; see processes.py."""
    place = tmp_path_factory.mktemp("two")
    assert launch_function(2, f"{HERE}:two", place=str(place)) == 0
    return place


@pytest.fixture(scope="module")
def three(two: Path) -> Path:
    """What three have, in the same place."""
    with pytest.raises(RanksError) as caught:
        launch_function(3, f"{HERE}:three", grace_s=LIMIT_S, place=str(two))
    assert str(caught.value).startswith(
        "rank 1 of 3 was killed by SIGKILL (out of memory?), and the others were ended; its last lines:"
    )
    return two


def test_two_ranks_come_to_the_numbers_of_one(two: Path) -> None:
    equals_one(two, 2)


@pytest.mark.nightly
def test_four_ranks_come_to_the_numbers_of_one_and_end_when_one_raises(tmp_path: Path) -> None:
    code, problem = ends(4, f"{HERE}:four", grace_s=LIMIT_S, place=str(tmp_path))
    assert code == 1 or problem.startswith("rank "), problem
    assert code == 1 or "the world fell off the table" in problem
    equals_one(tmp_path, 4)
    told(tmp_path, "raised", 4, "rank 1 failed with ValueError: the world fell off the table")


def ends(num_ranks: int, function: str, **options: object) -> tuple[int, str]:
    """Its exit code, if rank 0 was the first to fail and has said why here; or the error about another one."""
    try:
        return launch_function(num_ranks, function, **options), ""  # type: ignore[arg-type]
    except RanksError as error:
        return 0, str(error)


def told(place: Path, what: str, num_ranks: int, said: str) -> None:
    """All others ended with one line, long before the group's limit, and it names the one in trouble."""
    others = [rank for rank in range(num_ranks) if rank != 1]
    lines = [json.loads((place / f"{what}-{rank}.json").read_text()) for rank in others]
    for rank, one in zip(others, lines, strict=True):
        assert one["said"].startswith(f"rank {rank} of {num_ranks}: ")
        assert "\n" not in one["said"]
        assert one["after_s"] < LIMIT_S / 2
    assert any(said in one["said"] for one in lines), lines


def equals_one(place: Path, num_ranks: int) -> None:
    for dtype, tolerance in ((torch.float32, 5e-6), (torch.float64, 1e-12)):
        for num_rows in (7, num_ranks - 1):
            engine = make(single_rank(), Net().to(dtype))
            said = train(engine, single_rank(), num_rows=num_rows, dtype=dtype)
            for parallel in ("ddp", "fsdp"):
                expect(place / f"{parallel}-{str(dtype)[6:]}-{num_rows}.npz", said, engine.parameters(), tolerance)


def expect(path: Path, said: list[list[float]], weights: dict[str, np.ndarray], tolerance: float) -> None:
    """Losses and norms to a relative, weights to an absolute tolerance."""
    got = np.load(path)
    np.testing.assert_allclose(got["said"], said, rtol=tolerance, err_msg=str(path))
    assert set(got) - {"said"} == set(weights)
    for name, value in weights.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance, err_msg=f"{path} {name}")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_options_with_ranks(two: Path, parallel: str) -> None:
    engine = make(single_rank())
    said = train(engine, single_rank())
    expect(two / f"{parallel}-again.npz", said, engine.parameters(), 5e-6)
    low = np.load(two / f"{parallel}-bfloat16.npz")["said"]
    np.testing.assert_allclose(low, said, rtol=0.1)
    assert np.abs(low / np.array(said) - 1).max() > 1e-4  # but it was computed in less
    if parallel == "fsdp":
        for name in ("pace", "offload"):
            expect(two / f"{name}.npz", said, engine.parameters(), 5e-6)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_adapters_with_ranks(two: Path, parallel: str) -> None:
    pytest.importorskip("peft")
    adapted = make(single_rank(), lora(Net()))
    said = train(adapted, single_rank())
    assert said[-1][0] < said[0][0]
    expect(two / f"{parallel}-lora.npz", said, adapted.parameters(), 5e-6)
    shards = list((two / f"{parallel}-lora").glob("*/*.safetensors"))
    assert len(shards) == 2
    names = {name for shard in shards for name in load_file(shard) if name.startswith("module/")}
    assert names == {f"module/{name}" for name in adapted.parameters(trainable_only=True)} | {
        "module/base_model.model.scale"
    }
    again = make(single_rank(), lora(Net()))
    again.load(two / f"{parallel}-lora")
    np.testing.assert_allclose(train(again, single_rank()), train(adapted, single_rank()), rtol=2e-5)


def test_a_checkpoint_of_two_resumes_with_one(two: Path) -> None:
    for parallel in ("ddp", "fsdp"):
        assert sorted(path.name for path in (two / parallel).iterdir()) == ["000000000005-0", "current"]
    expected = np.load(two / "saved-ddp-0.npy")
    for source in ("ddp", "fsdp"):
        for parallel in ("none", "fsdp"):
            with single_rank() as ranks:  # for shards of one, it has a group
                engine = make(ranks, Net(seed=50).double(), parallel=parallel)
                engine.load(two / source)
                assert engine.num_updates == 5
                np.testing.assert_allclose(train(engine, ranks, dtype=torch.float64), expected, rtol=1e-11)


@pytest.mark.nightly
def test_a_checkpoint_of_two_resumes_with_three(three: Path) -> None:
    expected = np.load(three / "saved-ddp-0.npy")
    for source in ("ddp", "fsdp"):
        for parallel in ("ddp", "fsdp"):
            np.testing.assert_allclose(np.load(three / f"{source}-{parallel}-3.npy"), expected, rtol=1e-11)


def test_two_ranks_hear_each_other_and_rows_move_once(two: Path) -> None:
    # Rank 0 has rows 0-4, rank 1 has row 0; they need {4, 0} and {4, 0, 1}.
    row = 6 + 4 * len("task xxxx") + 1 + 8
    assert hear_each_other(two, 2) == [[0, 2 * row, 0], [2, 0, 2 * row]]


@pytest.mark.nightly
def test_three_ranks_hear_each_other_and_rows_move_once(three: Path) -> None:
    # Rank 0 has 0-4, rank 1 nothing, rank 2 has 5, 6 and 0; they need {4, 0}, {4, 0, 1} and {4, 0, 2}.
    row = 6 + 4 * len("task xxxxxx") + 1 + 8
    assert hear_each_other(three, 3) == [[0, 5 * row, 0], [3, 0, 3 * row], [2, 0, 2 * row]]


def hear_each_other(place: Path, num_ranks: int) -> list[list[int]]:
    """Rows that moved to each rank, bytes that it sent, and bytes that it received."""
    heard = [json.loads((place / f"words-{num_ranks}-{rank}.json").read_text()) for rank in range(num_ranks)]
    for one in heard:
        assert one["gathered"] == [{"rank": rank, "text": "ü" * rank} for rank in range(num_ranks)]
        assert one["sum"] == {"a": pytest.approx(0.1 * sum(range(1, num_ranks + 1))), "b": -float(num_ranks)}
        assert one["sum"] == heard[0]["sum"]
        assert "sum: rank 1 and rank 0 differ in a, b; give the same names" in one["errors"][0]
        assert "all ranks must do the same" in one["errors"][1]
        assert one["errors"][2] == "need: rank 1 needs 1 rows that no rank has: 99"
        assert one["errors"][3] == "c: rank 0 has float64 [1], rank 1 float64 [2]; give rows of one kind"
        assert one["errors"][4] == "ids: rank 0 has the same row twice; give every row its own number"
    return [one["moved"] for one in heard]


@pytest.mark.nightly  # the one below hangs, which is harder to notice
def test_one_of_two_that_is_killed_ends_the_other_in_time(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"^rank 1 of 2 was killed by SIGKILL \(out of memory\?\), and the other"):
        launch_function(2, f"{HERE}:killed", grace_s=LIMIT_S, place=str(tmp_path))
    told(tmp_path, "killed", 2, "rank 1 did not arrive (was last at 'before'")


@pytest.mark.nightly
def test_one_of_three_that_is_killed_ends_the_others_in_time(three: Path) -> None:
    told(three, "killed", 3, "rank 1 did not arrive (was last at 'before'")


def test_one_that_hangs_ends_the_others_in_time(tmp_path: Path) -> None:
    code, problem = ends(2, f"{HERE}:hung", grace_s=1.0, place=str(tmp_path), timeout_s=8.0)
    assert (code, problem) == (1, "")
    told(tmp_path, "hung", 2, "rank 1 did not arrive (was last at 'before'")
    told(tmp_path, "hung", 2, "s ago; its last progress: evaluating)")


def test_one_that_is_late_and_works_is_waited_for(tmp_path: Path) -> None:
    """However long it takes: rank 0 may evaluate for an hour while the others wait."""
    assert launch_function(2, f"{HERE}:late", grace_s=LIMIT_S, place=str(tmp_path), timeout_s=6.0) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"late-0", "late-1"}


def test_says_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RanksError, match="MASTER_ADDR, MASTER_PORT: expected in the environment; start the ranks with"):
        join()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(RanksError, match=r"rank 0 of 3: rank 1, 2 did not join at 127.0.0.1:0 within 0.2 s"):
        join(join_s=0.2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RanksError, match=r"rank 1 of 3: no answer from rank 0 at 127.0.0.1:1 within 0.2 s"):
        join(join_s=0.2)


@pytest.mark.nightly  # what it calls is in the tests above
def test_the_program_of_the_docs_runs_under_torchrun(tmp_path: Path) -> None:
    program = re.findall(r"```py\n(# train\.py.*?)```", (ROOT / "docs" / "ranks.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(program[0])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    assert done.stdout.startswith("2 ranks, 10 rows, loss ")


CHILD = """
import os, pathlib, signal, sys, time
place, what, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
def heard(number, frame):
    (place / f"heard-{rank}").write_text(signal.Signals(number).name)
    if what != "deaf":
        sys.exit(0 if what == "orderly" else 9)
signal.signal(signal.SIGINT, heard)
signal.signal(signal.SIGTERM, heard)
print("out", rank, os.environ["OMP_NUM_THREADS"], flush=True)
sys.stderr.write(f"err {rank}\\n")  # in one piece, so that no other line can come into it
sys.stderr.flush()
(place / f"here-{rank}").write_text(str(os.getpid()))
if what == "fails" and rank == "1":
    while not all((place / f"here-{other}").exists() for other in (0, 2)):
        time.sleep(0.01)
    sys.exit("no such thing")
while what not in ("ends", "three"):
    time.sleep(0.01)
sys.exit(3 if what == "three" and rank == "0" else 0)
"""


def test_launch_says_what_ranks_say(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, ["-c", CHILD, str(tmp_path), "ends"], env={"OMP_NUM_THREADS": "5"}) == 0
    out, err = capfd.readouterr()
    assert out == "out 0 5\n"
    assert sorted(err.splitlines()) == ["[rank 1] err 1", "[rank 1] out 1 5", "err 0"]
    assert launch(1, ["-c", CHILD, str(tmp_path), "three"]) == 3
    with pytest.raises(RanksError, match="num_ranks: expected at least 1, got 0"):
        launch(0, [])


def test_launch_ends_all_when_one_fails(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        launch(3, ["-c", CHILD, str(tmp_path), "fails"])
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 ended with exit code 1, and the others were ended; its last lines:")
    assert text.endswith("no such thing")
    for rank in (0, 2):
        assert written(tmp_path / f"heard-{rank}") == "SIGTERM"  # and time to end in order
        assert not alive(int(written(tmp_path / f"here-{rank}")))


@pytest.mark.parametrize("what", ["orderly", "stubborn", "deaf"])
def test_ctrl_c_reaches_all(tmp_path: Path, what: str) -> None:
    with launcher(tmp_path, CHILD, what) as (process, pids):
        process.send_signal(signal.SIGINT)
        assert [written(tmp_path / f"heard-{rank}") for rank in range(2)] == ["SIGINT", "SIGINT"]
        if what == "deaf":
            assert process.poll() is None
            process.send_signal(signal.SIGINT)  # once more
        code = process.wait(LIMIT_S)
        assert code == (0 if what == "orderly" else -signal.SIGINT)
        assert not any(alive(pid) for pid in pids)


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    hold = "from understudy.training.distributed.launcher_fds import die_with_launcher\ndie_with_launcher()\n"
    with launcher(tmp_path, hold + CHILD, "deaf") as (process, pids):
        process.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids))


@contextlib.contextmanager
def launcher(place: Path, child: str, what: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process that has launched two ranks, and their ids; nothing of it is left in the end."""
    code = (
        "import sys\nfrom understudy.training.distributed.launch import launch\n"
        "sys.exit(launch(2, sys.argv[1:], grace_s=float('inf')))"
    )
    command = [sys.executable, "-c", code, "-c", child, str(place), what]
    pids: list[int] = []
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            pids += [int(written(place / f"here-{rank}")) for rank in range(2)]
            wait_for(lambda: catches(process.pid, signal.SIGTERM))  # it waits for the ranks now
            yield process, pids
        finally:
            process.kill()
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)


def catches(pid: int, number: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def written(path: Path) -> str:
    return wait_for(lambda: path.exists() and path.read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False
