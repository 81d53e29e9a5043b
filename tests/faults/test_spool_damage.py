"""Damage in every file of a spool: what is whole is delivered, nothing wrong is, and nothing is dropped without a word.

Each case is a spool that a killed process left, with one file flipped or cut at a seeded position, opened by a real
writer that delivers to a real server.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.service.conftest import cleanup, remote_to, serve  # noqa: F401 (fixtures)

from understudy.core import Step
from understudy.core.examples import small_spec
from understudy.replay import Reader, verify
from understudy.service import Remote, Server, connect
from understudy.service.client.spool import Spool
from understudy.service.wire.message import unpack

SPEC = small_spec()
NUM_EPISODES, NUM_STEPS = 3, 10
Row = tuple[int, int]


def observation(episode: int, index: int) -> np.ndarray[Any, Any]:
    return np.array([episode, index, 0, 0], np.float32)


def record(remote: Remote, place: Path, first_episode: int) -> None:
    """Write episodes into a spool whose server cannot be reached."""
    writer = remote.writer("arm", SPEC, spool=place, commit_steps=4)
    for episode in range(first_episode, first_episode + NUM_EPISODES):
        writer.begin(seed=episode)
        for index in range(NUM_STEPS):
            action = np.zeros(2, np.float32)
            writer.append(Step(observation=observation(episode, index), action=action, reward=0.0))
        writer.cut(observation(episode, NUM_STEPS))
    writer.flush()
    writer.close(timeout_s=0.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two logs: of the older, the first chunks are delivered and the others go under another name."""
    place = tmp_path_factory.mktemp("spools") / "spool"
    with ExitStack() as stack:
        remote = stack.enter_context(connect("shard-0=127.0.0.1:9"))
        record(remote, place, 0)
        spool = Spool(place)
        spool.logs[0].acknowledge(1)
        spool.logs[0].reroute(writer="arm~1", shard="shard-0")
        spool.close()
        record(remote, place, NUM_EPISODES)
    return place


def rows_of(message: bytes) -> list[Row]:
    return [(int(a), int(b)) for a, b in unpack(message)[1]["observation"][:, :2]]


def rows_in(spool: Path) -> dict[Path, list[Row]]:
    """The rows of every chunk, by its path in the spool."""
    return {path.relative_to(spool): rows_of(path.read_bytes()) for path in sorted(spool.glob("0*/*.safetensors"))}


def stored_rows(place: Path) -> list[Row]:
    found = []
    with Reader(place) as reader:
        for episode in reader.episodes("num_rows > 0"):
            rows = [(int(a), int(b)) for a, b in reader.rows(episode.id)[1]["observation"][:, :2]]
            assert rows == [(rows[0][0], rows[0][1] + offset) for offset in range(len(rows))]  # its own neighbours
            found += rows
    assert verify(place).ok
    return found


def damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if rng.random() < 0.3:
        del content[at:]
    else:
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(12, 300))])
def test_what_is_whole_arrives(
    template: Path,
    tmp_path: Path,
    serve: Callable[..., Server],  # noqa: F811
    remote_to: Callable[..., Remote],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    seed: int,
) -> None:
    rng = random.Random(seed)
    spool = Path(shutil.copytree(template, tmp_path / "spool"))
    if old := rng.random() < 0.3:  # as an older version wrote it
        for copy in spool.glob("*/*.check"):
            copy.unlink()
    chunks = rows_in(spool)
    files = sorted(path.relative_to(spool) for path in spool.glob("*/*"))
    descriptions = [path for path in files if path.suffix != ".safetensors"]
    damaged = rng.choice(descriptions if rng.random() < 0.3 else files)
    damage(spool / damaged, rng)
    with remote_to(f"shard-0={serve().address}").writer("arm", SPEC, spool=spool) as writer:
        assert writer.wait_delivered(60)
        num_damaged = writer.delivery.damaged_chunks
    kept = {path.relative_to(spool) for path in spool.glob("damaged-*/*.safetensors")}
    set_aside = {path for path in chunks if Path(f"damaged-{path}") in kept}
    assert len(kept) == len(set_aside) == num_damaged
    assert sorted(stored_rows(tmp_path / "store")) == sorted(
        row for path, rows in chunks.items() if path not in set_aside for row in rows
    )
    if damaged.suffix == ".safetensors":
        assert set_aside == {damaged}
    elif not old:
        assert not set_aside  # each description has a copy
    if set_aside:
        assert "is kept in" in caplog.text or "are kept in" in caplog.text
