"""Episode files: one episode as a data set of another format or a film, to download; and an episode cut to a part."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from understudy.core import StoreError, StoreLockedError
from understudy.dashboard.api.alarms import lock_owner
from understudy.dashboard.api.targets import Target
from understudy.formats import FORMATS, DatasetPath, find_format
from understudy.replay import Reader, Store
from understudy.replay.maintain.episode_parts import trim
from understudy.training.data.dataset_io import export_episodes
from understudy.training.runs.video import film_of, write_video

FILM = "film"
READ_ONLY = ("minari", "rosbag2")
EXPORTS = {
    FILM: "A film of its cameras (GIF, or MP4 of encoded frames).",
    **{name: FORMATS[name] for name in FORMATS if name not in READ_ONLY},
}


def export_episode(target: Target, episode: int, name: str) -> tuple[Path, Path]:
    """Write one episode as `name` says: one of EXPORTS. Returns the file, and the directory to remove afterwards."""
    if name not in EXPORTS:
        raise StoreError(f"format: expected one of {', '.join(EXPORTS)}, got {name!r}")
    with target.catalog().reader() as reader:
        task = reader.record(episode).info.task or "episode"
    stem = f"{re.sub('[^A-Za-z0-9]+', '-', task).strip('-')[:60] or 'episode'}-{episode}"
    directory = Path(tempfile.mkdtemp(prefix="understudy-export-"))
    try:
        if name == FILM:
            with Reader(target.store) as reader:
                film = film_of(reader, episode)
                path = directory / f"{stem}{film.suffix}"
                write_video(path, film.frames, fps=film.fps)
            return path, directory
        found = find_format(name)
        suffix = FILE_SUFFIXES.get(name, "")
        made = directory / f"{stem}{suffix}"
        export_episodes(target.store, DatasetPath(format=found, path=made), where=f"id = {int(episode)}")
        if made.is_file():
            return made, directory
        zipped = shutil.make_archive(str(directory / f"{stem}-{name}"), "zip", directory, made.name)
        return Path(zipped), directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


FILE_SUFFIXES = {"robomimic": ".hdf5", "hil_serl": ".pkl", "mcap": ".mcap"}  # formats that are one file


def trim_episode(target: Target, episode: int, first: int, stop: int) -> dict[str, Any]:
    """Keep the steps from `first` up to `stop` as a new episode. Returns its id, and the edits that take it back."""
    target.close_readers()
    try:
        with Store.open(target.store, create=False) as store:
            new = trim(store, episode, first, stop, delete_source=True)
    except StoreLockedError:
        owner = lock_owner(target) or {}
        raise StoreError(
            f"the store is being written (process {owner.get('pid', 'unknown')} on {owner.get('host', 'unknown')}); "
            f"trim the episode when that process has ended"
        ) from None
    return {
        "episode": new,
        "undo": [{"action": "restore", "episodes": [episode]}, {"action": "delete", "episodes": [new]}],
    }
