"""An episode is downloaded in the formats of others, and cut to a part if nobody writes."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from understudy.core import StoreError
from understudy.dashboard.api import episode_queries
from understudy.dashboard.api.episode_files import EXPORTS, export_episode, trim_episode
from understudy.dashboard.api.targets import Target
from understudy.replay import Store
from understudy.replay.write.edit_requests import EditRequest

NEEDS = {"rlds": "google_crc32c", "lerobot": "pyarrow", "robomimic": "h5py", "mcap": "mcap"}


@pytest.mark.parametrize("name", EXPORTS)
def test_every_format_can_be_downloaded(name: str, target: Target) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    file, directory = export_episode(target, 2, name)
    assert file.name.startswith("pick-2")
    assert file.stat().st_size > 1000
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as zipped:
            assert all(one.startswith("pick-2/") for one in zipped.namelist())
    shutil.rmtree(directory)


def test_what_cannot_be_exported_is_said(target: Target) -> None:
    with pytest.raises(StoreError, match="of film, rlds, lerobot, hil_serl, robomimic, mcap, got 'minari'"):
        export_episode(target, 2, "minari")
    with pytest.raises(StoreError, match="99"):
        export_episode(target, 99, "film")


def test_a_trim_can_be_taken_back_and_waits_for_nobody(target: Target, store: Path) -> None:
    made = trim_episode(target, 4, 1, 3)
    assert made["episode"] == 13
    assert episode_queries.one_episode(target, 13)["recorded_labels"]["trimmed_from"] == "episode 4, steps 1 to 2"
    for edit in made["undo"]:
        episode_queries.edit_episodes(target, EditRequest(action=edit["action"], episodes=tuple(edit["episodes"])))
    assert not episode_queries.one_episode(target, 4)["deleted"]
    assert episode_queries.one_episode(target, 13)["deleted"]
    with Store.open(store), pytest.raises(StoreError, match=r"is being written \(process \d+ on .*\); trim .* ended"):
        trim_episode(target, 4, 1, 3)


def test_a_judgement_is_pending_while_somebody_writes_and_undone(target: Target, store: Path) -> None:
    before = episode_queries.one_episode(target, 4)["success"]
    with Store.open(store):
        answer = episode_queries.edit_episodes(target, EditRequest(action="judge", episodes=(4,), success=not before))
        shown = episode_queries.one_episode(target, 4)
        assert (answer["pending"], shown["pending"], shown["success"]) == (True, True, not before)
    assert answer["undo"] == [{"action": "judge", "episodes": [4], "success": before}]
    Store.open(store).close()
    assert episode_queries.one_episode(target, 4)["success"] is (not before)
