"""Damage: what happens to files on the way, and what files are made of by people who mean no good.

`survive` writes a small dataset, damages it in one way after another, and reads it. Each time it must be refused with
a FormatError, or give whole episodes that fit its spec; never another error, a hang, or much memory.
"""

from __future__ import annotations

import random
import re
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from tests.contracts.formats.case import Case

from understudy.core import Episode, StepSpec, UnderstudyError
from understudy.core.examples import CANONICAL
from understudy.formats import DatasetReader, FormatError

LIMIT_S = 20.0  # for a dataset that is read in some milliseconds
LIMIT_BYTES = 512 * 2**20  # beyond what the process had when it began

Damage = Callable[[bytearray, random.Random], bytearray]


def flip_bit(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_many(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.randrange(2, 30)):
        flip_bit(data, rng)
    return data


def truncate(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def zero(data: bytearray, rng: random.Random) -> bytearray:
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice([1, 8, 64, 4096]))
    data[start:stop] = bytes(stop - start)
    return data


def insert(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
    return data


def repeat(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data))
    piece = data[at : at + rng.choice([1, 16, 1000])]
    data[at:at] = piece * rng.choice([1, 2, 50])
    return data


def huge(data: bytearray, rng: random.Random) -> bytearray:
    """Eight bytes that are an absurd number, wherever they are."""
    at = rng.randrange(len(data))
    number = rng.choice([2**63 - 1, 2**64 - 1, 2**31 - 1, 2**32, 2**40, 10**10])
    data[at : at + 8] = number.to_bytes(8, rng.choice(["little", "big"]))
    return data


def absurd_number(data: bytearray, rng: random.Random) -> bytearray:
    """Another number in a text: a shape, a count, a version."""
    numbers = list(re.finditer(rb"-?\d+", bytes(data)))
    if not numbers:
        return flip_bit(data, rng)
    found = rng.choice(numbers)
    data[found.start() : found.end()] = rng.choice(
        [
            b"-1",
            b"0",
            b"1",
            b"3",
            b"1e99",
            b"999999999999",
            b"9223372036854775808",
            b"1.5",
            b"null",
            b'"x"',
            b"[]",
            b"{}",
        ]
    )
    return data


def other_word(data: bytearray, rng: random.Random) -> bytearray:
    """Another word in a text: a name, a dtype, a value."""
    words = list(re.finditer(rb"[A-Za-z_]{3,}", bytes(data)))
    if not words:
        return flip_bit(data, rng)
    found, other = rng.choice(words), rng.choice([*(word.group() for word in words), b"float99", b"../../x", b"null"])
    data[found.start() : found.end()] = other
    return data


BINARY: tuple[Damage, ...] = (flip_bit, flip_many, truncate, zero, insert, repeat, huge)
TEXT: tuple[Damage, ...] = (*BINARY, absurd_number, absurd_number, other_word, other_word)


def damage(dataset_dir: Path, rng: random.Random) -> str:
    """Damage one file of a dataset, or take it away; returns what was changed."""
    files = sorted(path for path in dataset_dir.rglob("*") if path.is_file()) if dataset_dir.is_dir() else [dataset_dir]
    path = rng.choice(files)
    if dataset_dir.is_dir() and rng.random() < 0.02:
        path.unlink()
        return f"{path.name}: removed"
    data = bytearray(path.read_bytes()) or bytearray(b"\0")
    text = path.suffix in (".json", ".jsonl") or b"\0" not in data[:1000]
    how = rng.choice(TEXT if text else BINARY)
    path.write_bytes(how(data, rng))
    return f"{path.name}: {how.__name__}"


def read_all(source: DatasetReader) -> list[Episode]:
    """The episodes, each checked against the spec."""
    found = []
    for _, episode in source.episodes():
        check(source.spec, episode)
        found.append(episode)
    return found


def check(spec: StepSpec, episode: Episode) -> None:
    """Refuse an episode that is not whole: one that could not have been written step by step."""
    again = Episode.from_steps(spec, list(episode.steps()), episode.last_observation, episode.info)
    assert episode.equals(again), "an episode is not made of steps of its spec"
    assert not (episode.terminated | episode.truncated)[:-1].any()


def survive(case: Case, folder: Path, *, num: int, seed: int = 0) -> Counter[str]:
    """How often what came of it: 'refused', 'read', or a failure's name. Prints each failure with its seed."""
    places = []
    for name in ("images", "nested", "text", "one_step"):
        spec, episode = CANONICAL[name]()
        if case.carried(spec, episode) is not None:
            (folder / name).mkdir()
            target = case.write(folder / name, spec)
            for key in ("a", "b"):
                target.add(key, episode)
            target.close()
            places.append(folder / name)
    assert places, f"{case}: carries none of the canonical episodes"
    return survive_in(str(case), places, case.file, case.read, folder, num=num, seed=seed)


def survive_in(
    name: str,
    places: Sequence[Path],
    file: str,
    read: Callable[[Path], DatasetReader],
    folder: Path,
    *,
    num: int,
    seed: int = 0,
) -> Counter[str]:
    """Like `survive`, for existing datasets: each of `places` holds one, called `file`; `read` gets a directory."""
    base = _peak_bytes()
    outcomes: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _too_long)
    for number in range(seed, seed + num):
        rng = random.Random(number)
        copy = folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(rng.choice(places), copy)
        damaged = damage(copy / file, rng)
        before = time.process_time()
        outcome = _outcome(read, copy)
        if time.process_time() - before > LIMIT_S / 2:
            outcome = "slow"
        if _peak_bytes() - base > LIMIT_BYTES:
            outcome, base = "memory", _peak_bytes()
        outcomes[outcome.partition(":")[0]] += 1
        if outcome not in ("refused", "read"):
            print(f"{name}, seed {number}, {damaged}: {outcome}", flush=True)
    return outcomes


def _outcome(read: Callable[[Path], DatasetReader], folder: Path) -> str:
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        source = read(folder)
        try:
            read_all(source)
        finally:
            source.close()
    except FormatError:
        return "refused"
    except UnderstudyError as error:
        return f"{type(error).__name__}: {error}"  # a FormatError would say which file it is
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "read"


class Hang(BaseException):
    """A read that took too long."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {LIMIT_S:.0f} s")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
