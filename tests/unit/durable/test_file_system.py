from pathlib import Path

import pytest

from understudy.core import StoreFormatError
from understudy.durable.file_system import file_system_type, refuse_network_file_system


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused(kind: str, tmp_path: Path) -> None:
    mounts = f"22 1 8:1 / / rw - ext4 /dev/sda rw\n23 22 0:5 / {tmp_path} rw - {kind} server:/x rw\n"
    with pytest.raises(StoreFormatError, match=f"cannot be on a network file system \\(this is {kind}\\).*local disk"):
        refuse_network_file_system(tmp_path / "store", mounts)
    refuse_network_file_system(tmp_path.parent, mounts)


def test_the_innermost_mount_decides(tmp_path: Path) -> None:
    mounts = f"22 1 8:1 / / rw - ext4 /dev/sda rw\n23 22 0:5 / {tmp_path}/a\\040b rw - xfs /dev/sdb rw\nnonsense\n"
    assert file_system_type(tmp_path, mounts) == "ext4"
    assert file_system_type(tmp_path / "a b" / "c", mounts) == "xfs"
    assert file_system_type(tmp_path, "") is None
