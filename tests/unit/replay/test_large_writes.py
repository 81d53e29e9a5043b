import os

import numpy as np
import pytest

from understudy.core import StoreFailedError
from understudy.durable import files


@pytest.mark.parametrize("offset", [0, 1, files.PIECE_BYTES - 1, files.PIECE_BYTES, 12345])
@pytest.mark.parametrize(
    "size", [0, 1, files.LARGE_WRITE_BYTES - 1, files.LARGE_WRITE_BYTES, files.PIECE_BYTES, 3 * files.PIECE_BYTES + 7]
)
def test_every_byte_arrives_at_its_place(tmp_path, offset, size):
    data = np.random.default_rng(size).integers(1, 256, size, np.uint8)
    path = tmp_path / "file"
    with path.open("w+b") as file:
        files.write_at(file.fileno(), data, offset, path)
        files.sync_data(file.fileno(), path)
    assert path.read_bytes() == (bytes(offset) + data.tobytes() if size else b"")


def test_a_write_that_fails_names_the_file(tmp_path):
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(StoreFailedError, match=f"^{path}: write failed: Bad file descriptor; check the disk"):
            files.write_at(fd, b"x", 0, path)
    finally:
        os.close(fd)
