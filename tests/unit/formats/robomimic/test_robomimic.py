"""robomimic and LIBERO: the golden files, what each option changes, and what would lead out of a file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import dies

from understudy.core import Episode, Source
from understudy.core.examples import nested_spec, random_episode, robot_spec
from understudy.formats import DatasetReader, FormatError, find_format

h5py = pytest.importorskip("h5py", reason="the extra `hdf5` is not installed")
FORMAT = find_format("robomimic")
GOLDEN = Path(__file__).parents[3] / "golden" / "formats" / "robomimic"
ROBOMIMIC, LIBERO = GOLDEN / "robomimic.hdf5", GOLDEN / "libero.hdf5"


def opened(path: Path, **options: str) -> DatasetReader:
    return FORMAT.read(path, options)


def read(path: Path, **options: str) -> dict[str, Episode]:
    with closing(opened(path, **options)) as source:
        return dict(source.episodes())


def changed(path: Path, copy: Path, change: Callable[[Any], None]) -> Path:
    shutil.copy(path, copy)
    with h5py.File(copy, "a") as file:
        change(file)
    return copy


def without_next(file: Any) -> None:
    for demo in file["data"].values():
        del demo["next_obs"]


# ---- robomimic


def test_demonstrations_come_in_the_order_of_their_numbers_with_all_that_they_hold() -> None:
    found = read(ROBOMIMIC)
    assert list(found) == ["demo_0", "demo_2", "demo_10"]
    with h5py.File(ROBOMIMIC) as file:
        for demo, episode in found.items():
            theirs = file["data"][demo]
            for name in ("object", "agentview_image"):
                np.testing.assert_array_equal(episode.observation[name][:-1], theirs["obs"][name])
                np.testing.assert_array_equal(episode.observation[name][1:], theirs["next_obs"][name])
            np.testing.assert_array_equal(episode.action, theirs["actions"])
            np.testing.assert_array_equal(episode.extras["states"], theirs["states"])
            np.testing.assert_array_equal(episode.reward, np.asarray(theirs["rewards"], np.float32))
            assert episode.terminated.tolist() == [False] * (len(episode) - 1) + [True]
            assert episode.info.labels == {"dones": "2"}  # robomimic marks every step in which the task is solved
            assert (episode.info.task, episode.info.success, episode.info.kind) == ("Lift", True, "demonstration")
            assert set(episode.source.tolist()) == {int(Source.HUMAN)}
    assert [episode.info.split for episode in found.values()] == ["train", "eval", "train"]


def test_options_of_robomimic(tmp_path: Path) -> None:
    assert list(read(ROBOMIMIC, mask="valid")) == ["demo_2"]
    with pytest.raises(FormatError, match="has no mask 'test'; it has train, valid"):
        read(ROBOMIMIC, mask="test")
    shorter = read(ROBOMIMIC, end="first")
    assert [len(episode) for episode in shorter.values()] == [3, 2, 4]
    assert all(episode.terminated[-1] and not episode.info.labels for episode in shorter.values())
    assert read(ROBOMIMIC, extras="none")["demo_0"].extras == {}
    other = read(ROBOMIMIC, kind="practice", source="script")["demo_0"]
    assert (other.info.kind, int(other.source[0])) == ("practice", int(Source.SCRIPT))


def test_without_next_obs_nothing_is_made_up_that_is_learned_from(tmp_path: Path) -> None:
    path = changed(ROBOMIMIC, tmp_path / "a.hdf5", without_next)
    ended = read(path)["demo_0"]
    assert (len(ended), bool(ended.terminated[-1])) == (4, True)
    np.testing.assert_array_equal(ended.observation["object"][-1], ended.observation["object"][-2])
    assert len(read(path, last="drop")["demo_0"]) == 3

    def never_done(file: Any) -> None:
        without_next(file)
        for demo in file["data"].values():
            demo["dones"][:] = 0

    path = changed(ROBOMIMIC, tmp_path / "b.hdf5", never_done)
    cut = read(path)["demo_0"]
    assert (len(cut), bool(cut.truncated[-1])) == (3, True)
    assert len(read(path, last="repeat")["demo_0"]) == 4


def test_next_obs_that_is_another_is_refused(tmp_path: Path) -> None:
    def other(file: Any) -> None:
        file["data/demo_0/next_obs/object"][0] += 1

    with pytest.raises(FormatError, match=r"demo_0: next_obs/object: differs from obs/object of the next row"):
        read(changed(ROBOMIMIC, tmp_path / "a.hdf5", other))


# ---- LIBERO


def test_libero_records_after_the_step_so_actions_are_of_the_next_row() -> None:
    source = opened(LIBERO)
    found = dict(source.episodes())
    source.close()
    assert [line.how for line in source.mapping if line.internal == "action"] == ["of the next row"]
    with h5py.File(LIBERO) as file:
        for demo, episode in found.items():
            theirs = file["data"][demo]
            assert len(episode) == 4
            np.testing.assert_array_equal(episode.action, theirs["actions"][1:])
            np.testing.assert_array_equal(episode.observation["agentview_rgb"], theirs["obs/agentview_rgb"])
            # the state that the simulator was in before each action shows that they belong together
            np.testing.assert_array_equal(episode.extras["states"][:, 1:8], episode.observation["joint_states"][:-1])
            assert episode.reward.tolist() == [0, 0, 0, 1]
            assert episode.terminated[-1]
            assert episode.info.instruction == "pick up the milk"
            assert (episode.info.task, episode.info.success) == ("pick_up_the_milk", True)
    as_written = read(LIBERO, align="before")["demo_0"]
    assert len(as_written) == 5
    np.testing.assert_array_equal(as_written.action[1:], found["demo_0"].action)


def test_a_directory_of_files_has_keys_with_their_names(tmp_path: Path) -> None:
    shutil.copy(LIBERO, tmp_path / "task_10.hdf5")

    def other_scene(file: Any) -> None:
        for demo in file["data"].values():
            del demo["states"]
            demo["states"] = np.zeros((5, 99))

    changed(LIBERO, tmp_path / "task_9.hdf5", other_scene)
    source = opened(tmp_path)
    found = dict(source.episodes())
    source.close()
    assert list(found) == ["task_9.hdf5/demo_0", "task_9.hdf5/demo_1", "task_10.hdf5/demo_0", "task_10.hdf5/demo_1"]
    assert set(source.spec.extras.flat) == {"robot_states"}  # states of different scenes have different sizes
    assert "states" in [line.external for line in source.mapping if not line.internal]


# ---- and back


def test_what_is_written_has_the_layout_of_robomimic(tmp_path: Path) -> None:
    spec, path = robot_spec(8), tmp_path / "a.hdf5"
    episode = random_episode(spec, 9, 0)
    target = FORMAT.write(path, spec, {})
    target.add("a", episode)
    target.add("b", replace(episode, info=replace(episode.info, split="eval")))
    target.close()
    with h5py.File(path) as file:
        demo = file["data/demo_1"]
        assert list(file["data"]) == ["demo_0", "demo_1"]
        assert demo.attrs["num_samples"] == 9
        assert file["data"].attrs["total"] == 18
        assert json.loads(file["data"].attrs["env_args"])["env_name"] == "task-0"
        np.testing.assert_array_equal(demo["obs/wrist_1"], episode.observation["wrist_1"][:-1])
        np.testing.assert_array_equal(demo["next_obs/state"], episode.observation["state"][1:])
        np.testing.assert_array_equal(demo["actions"], episode.action)
        np.testing.assert_array_equal(demo["dones"], episode.terminated)
        assert [name.decode() for name in file["mask/valid"]] == ["demo_1"]


def test_an_action_that_is_a_tree_stands_side_by_side_and_gzip_packs(tmp_path: Path) -> None:
    spec = nested_spec()
    episode = random_episode(spec, 4, 0)
    sizes = []
    for compression in ("none", "gzip"):
        path = tmp_path / f"{compression}.hdf5"
        target = FORMAT.write(path, spec, {"compression": compression})
        target.add("a", replace(episode, observation={**episode.observation}))
        target.close()
        with h5py.File(path) as file:
            actions = np.asarray(file["data/demo_0/actions"])
            np.testing.assert_array_equal(actions[:, :6], episode.action["arm"])
            np.testing.assert_array_equal(actions[:, 6], episode.action["gripper"])
            sizes.append(file["data/demo_0/obs/cameras/front"].compression)
        (back,) = read(path).values()
        assert back.equals(episode)
    assert sizes == [None, "gzip"]


# ---- what would lead out of a file, or bring it down


def refused(path: Path, copy: Path, change: Callable[[Any], None], match: str) -> None:
    with pytest.raises(FormatError, match=match):
        read(changed(path, copy, change))


def test_what_leads_out_of_the_file_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(80 * 4))

    def external_data(file: Any) -> None:
        del file["data/demo_0/obs/object"]
        file["data/demo_0"].create_dataset("obs/object", (4, 10), "f8", external=[(str(secret), 0, 320)])

    refused(ROBOMIMIC, tmp_path / "a.hdf5", external_data, "its values are in another file, which is not opened")

    def external_link(file: Any) -> None:
        file["data/demo_0/obs/other"] = h5py.ExternalLink(str(ROBOMIMIC), "/data/demo_0/actions")

    refused(ROBOMIMIC, tmp_path / "b.hdf5", external_link, "is a link to elsewhere, not followed")

    def virtual(file: Any) -> None:
        layout = h5py.VirtualLayout((4, 7), "f8")
        layout[:] = h5py.VirtualSource(str(ROBOMIMIC), "data/demo_0/actions", (4, 7))
        del file["data/demo_0/actions"]
        file["data/demo_0"].create_virtual_dataset("actions", layout)

    refused(ROBOMIMIC, tmp_path / "c.hdf5", virtual, "its values are in another file")

    def soft_link(file: Any) -> None:
        file["data/demo_0/obs/other"] = h5py.SoftLink("/data/demo_0/actions")

    refused(ROBOMIMIC, tmp_path / "d.hdf5", soft_link, "is a link to elsewhere")

    def loop(file: Any) -> None:
        file["data/demo_0/obs/again"] = file["data/demo_0"]

    refused(ROBOMIMIC, tmp_path / "e.hdf5", loop, "is deeper than 12 groups")


def test_bombs_are_refused(tmp_path: Path) -> None:
    def huge(file: Any) -> None:
        del file["data/demo_0/states"]
        file["data/demo_0"].create_dataset("states", (4, 2**40), "f8", chunks=(1, 1024), fillvalue=1.0)

    refused(ROBOMIMIC, tmp_path / "a.hdf5", huge, "claims 35184372088832 bytes, and the file stores 0")

    def objects(file: Any) -> None:
        del file["data/demo_0/obs/object"]
        file["data/demo_0/obs/object"] = np.zeros(4, [("a", "f4")])

    refused(ROBOMIMIC, tmp_path / "b.hdf5", objects, "obs/object can be read")


def test_a_process_that_dies_of_a_file_is_not_the_users(tmp_path: Path) -> None:
    source = opened(ROBOMIMIC)
    episodes = source.episodes()
    next(episodes)
    child = source._files[0].reader._child  # type: ignore[attr-defined]
    child.kill()
    child.wait()
    with pytest.raises(FormatError, match=r"robomimic\.hdf5: .*ended with -9: the HDF5 library crashed on the file"):
        list(episodes)
    assert len(list(source.episodes())) == 3  # it starts again when it is asked
    source.close()


def test_the_child_ends_with_its_caller(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from understudy.formats import find_format
source = find_format("robomimic").read(Path({str(ROBOMIMIC)!r}), {{}})
print(source._files[0].reader._child.pid, flush=True)
import os
os._exit(0)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert dies(int(completed.stdout), 60)


def test_what_is_no_file_of_demonstrations(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        file["other"] = 1
    with pytest.raises(FormatError, match="has no group 'data'"):
        read(path)
    path.write_bytes(b"text")
    with pytest.raises(FormatError, match="is not an HDF5 file"):
        read(path)

    def no_obs(file: Any) -> None:
        for demo in file["data"].values():
            del demo["obs"]

    with pytest.raises(FormatError, match=r"made by robomimic's dataset_states_to_obs\.py"):
        read(changed(ROBOMIMIC, tmp_path / "b.hdf5", no_obs))
