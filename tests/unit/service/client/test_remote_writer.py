"""RemoteWriter: flush records, wait_delivered delivers, and close tells what is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import ArraySpec, DeliveryError, Spec, Step, StepSpec
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader
from understudy.service import Remote, Server, connect
from understudy.service.client.remote_writer import MAX_CHUNK_BYTES

EPISODE = random_episode(small_spec(), 12, 1)
NOBODY = "127.0.0.1:1"


def test_an_episode_is_recorded_then_delivered(remote: Remote, server: Server, tmp_path: Path) -> None:
    with remote.writer("arm", small_spec(), spool=tmp_path / "spool", commit_steps=5) as writer:
        write_episode(writer, EPISODE)
        writer.flush()
        assert writer.num_uncommitted == 0
        assert writer.wait_delivered(30)
        assert (writer.delivery.recorded, writer.delivery.delivered) == (0, 13)
    with Reader(server.store.path) as reader:
        assert reader.read(1).equals(EPISODE)


def test_nan_is_named_on_the_robot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = np.array([0, np.nan, 0, 0], np.float32)
    with connect(NOBODY) as remote, remote.writer("arm", small_spec(), spool=tmp_path / "spool") as writer:
        for _ in range(2):
            writer.begin()
            writer.append(Step(observation=state, action=np.zeros(2, np.float32), reward=0.0))
            writer.cut()
        writer.flush()
        writer.close(timeout_s=0.0)
    (said,) = [message for message in caplog.messages if "nan" in message]
    assert said.startswith("writer 'arm', episode 0, step 0: observation has nan. It is stored as it is")


def test_without_a_spool_close_says_how_many_rows_are_lost() -> None:
    with connect(NOBODY) as remote:
        writer = remote.writer("arm", small_spec())
        write_episode(writer, EPISODE)
        with pytest.raises(DeliveryError, match="writer 'arm': closed with 13 rows that the server does not have"):
            writer.close(timeout_s=0.0)


def test_chunks_of_large_rows_are_kept_small(tmp_path: Path) -> None:
    image = ArraySpec(shape=(1024, 1024), dtype="uint8")
    spec = StepSpec(observation=Spec({"image": image}), action=Spec(ArraySpec(shape=(1,), dtype="float32")))
    with connect(NOBODY) as remote, remote.writer("arm", spec, spool=tmp_path, commit_steps=1000) as writer:
        write_episode(writer, random_episode(spec, 20, 1))
        writer.flush()
        chunks = [path.stat().st_size for path in tmp_path.glob("*/*.safetensors")]
        assert len(chunks) == 3  # 21 rows of a little more than a megabyte each
        assert max(chunks) <= MAX_CHUNK_BYTES + 2**16
        writer.close(timeout_s=0.0)
