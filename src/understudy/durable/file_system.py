"""File system: what kind holds a directory, and which kinds a store must not be on."""

from __future__ import annotations

from pathlib import Path

from understudy.core import StoreFormatError

NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "ocfs2", "gfs2"),
        *("fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "davfs"),
    )
)


def file_system_type(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds `path`, from Linux's mountinfo; None on other systems."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return None
    path = path.resolve()
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = Path(fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), right.split()[0])
    return best[1] if best else None


def refuse_network_file_system(path: Path, mounts: str | None = None) -> None:
    """Refuse a directory for a store whose file system does not keep locks and syncs."""
    kind = file_system_type(path, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreFormatError(
            f"{path}: a store cannot be on a network file system (this is {kind}), whose locks and syncs do not hold; "
            f"put it on a local disk, and send experience to it with `understudy serve` on that machine"
        )
