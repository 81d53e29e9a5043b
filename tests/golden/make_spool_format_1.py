"""Makes the golden spool: what three processes of one writer recorded and no server has acknowledged. It was run once.

    python -m tests.golden.make_spool_format_1

The archive beside this file is kept for ever: every later version must deliver what it holds.
"""

import itertools
import json
import tarfile
import tempfile
import uuid
from pathlib import Path
from unittest.mock import patch

from understudy.core.examples import CANONICAL
from understudy.service import connect

HERE = Path(__file__).parent
ARCHIVE = HERE / "spool_format_1.tar.xz"
NOBODY = "shard-0=127.0.0.1:1"  # no server listens there


def make(spool: Path) -> None:
    """Write the spool, the same bytes each time.

    The first process recorded a whole episode. The second recorded one in two chunks, and a server that is gone
    acknowledged the first of them, so what is left was rerouted. The third recorded text and died in an episode.
    """
    numbers = itertools.count(1)
    with patch("uuid.uuid4", lambda: uuid.UUID(int=next(numbers))):
        _record(spool, "images", commit_steps=7)
        _record(spool, "nested", commit_steps=2)
        _record(spool, "text", commit_steps=100, end=False)
    (log,) = spool.glob("00000002-*")
    (log / "00000000.safetensors").unlink()
    route = {"writer": "arm", "shard": "shard-0", "base": 1, "episode": 0, "shift": 2}
    (log / "route.json").write_text(json.dumps(route))


def _record(spool: Path, name: str, *, commit_steps: int, end: bool = True) -> None:
    spec, episode = CANONICAL[name]()
    with connect(NOBODY) as remote:
        writer = remote.writer("arm", spec, spool=spool, commit_steps=commit_steps)
        writer.begin(episode.info)
        for step in episode.steps():
            writer.append(step)
        if end:
            writer.end(episode.last_observation)
        writer.flush()
        writer.close(timeout_s=0.0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        spool = Path(directory) / "spool"
        make(spool)
        (spool / "lock").unlink()
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(spool, "spool_format_1")
