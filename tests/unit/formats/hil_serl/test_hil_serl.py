"""HIL-SERL's files: the golden ones, made as its scripts make them, and what each option changes."""

from __future__ import annotations

import copy
import pickle
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core import Episode, Source
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.formats import FormatError, find_format

GOLDEN = Path(__file__).parents[3] / "golden" / "formats" / "hil_serl"
FORMAT = find_format("hil_serl")


def read(path: Path, **options: str) -> dict[str, Episode]:
    with closing(FORMAT.read(path, options)) as source:
        return dict(source.episodes())


def originals(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return list(pickle.load(file))


def transition(time: int, *, last: bool = False, **more: Any) -> dict[str, Any]:
    def see(at: int) -> dict[str, Any]:
        return {"state": np.full((1, 3), at, np.float32)}

    return {
        "observations": see(time),
        "actions": np.full(2, time, np.float32),
        "next_observations": see(time + 1),
        "rewards": 0.0,
        "masks": 1.0 - last,
        "dones": last,
        **more,
    }


def dumped(path: Path, transitions: list[dict[str, Any]]) -> Path:
    path.write_bytes(pickle.dumps(copy.deepcopy(transitions)))
    return path


# ---- golden files


def test_demonstrations_are_chained_and_say_where_the_person_acted() -> None:
    path = GOLDEN / "demo_data"
    (file,) = path.iterdir()
    theirs = originals(file)
    found = read(path)
    assert list(found) == [f"{file.name}#0", f"{file.name}#4"]
    for start, episode in zip((0, 4), found.values(), strict=True):
        assert len(episode) == 4
        assert episode.info.kind == "demonstration"
        assert episode.info.success is True
        assert episode.terminated.tolist() == [False, False, False, True]
        assert not episode.truncated.any()
        human, idle = int(Source.HUMAN), int(Source.SCRIPT)
        assert episode.source.tolist() == [human, idle, human, human]
        for index in range(4):
            np.testing.assert_array_equal(
                episode.observation["state"][index], theirs[start + index]["observations"]["state"]
            )
            np.testing.assert_array_equal(episode.action[index], theirs[start + index]["actions"].astype(np.float32))
            assert episode.extras["grasp_penalty"][index] == np.float32(theirs[start + index]["infos"]["grasp_penalty"])
        last = theirs[start + 3]["next_observations"]
        np.testing.assert_array_equal(episode.last_observation["wrist_1"], last["wrist_1"])


def test_a_run_knows_from_its_demo_buffer_who_acted_and_goes_on_over_files() -> None:
    found = read(GOLDEN / "run")
    assert list(found) == ["buffer/transitions_5.pkl#0", "buffer/transitions_10.pkl#1", "buffer/transitions_15.pkl#1"]
    first, second, third = found.values()
    assert [len(episode) for episode in (first, second, third)] == [6, 5, 4]
    assert [int(source) for source in first.source] == [0, 1, 1, 0, 0, 0]
    assert first.info.kind == "correction"
    assert first.terminated[-1]
    assert first.info.success is True
    assert second.truncated[-1]  # reset without `dones`
    assert second.info.labels == {"cut": "the next transition does not follow"}
    assert second.info.success is None
    assert third.info.kind == "practice"
    assert third.info.labels == {"cut": "the files end here"}


def test_the_buffers_on_their_own() -> None:
    buffer = read(GOLDEN / "run" / "buffer")
    assert {episode.info.kind for episode in buffer.values()} == {"practice"}
    assert {int(source) for episode in buffer.values() for source in episode.source} == {int(Source.POLICY)}
    demo_buffer = read(GOLDEN / "run" / "demo_buffer")
    assert [len(episode) for episode in demo_buffer.values()] == [2, 1]
    assert {episode.info.kind for episode in demo_buffer.values()} == {"correction"}
    assert {int(source) for episode in demo_buffer.values() for source in episode.source} == {int(Source.HUMAN)}


def test_a_demo_buffer_that_is_not_of_this_buffer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "run", tmp_path / "run")
    dumped(tmp_path / "run" / "demo_buffer" / "transitions_5.pkl", [transition(99)])
    with pytest.raises(FormatError, match=r"transitions_5\.pkl: transition 0 is not in .*read the directories buffer"):
        read(tmp_path / "run")


# ---- options


def test_kind_and_source_are_what_the_user_says() -> None:
    found = read(GOLDEN / "demo_data", kind="practice", source="random")
    assert {episode.info.kind for episode in found.values()} == {"correction"}  # practice in which a person took over
    assert {int(source) for episode in found.values() for source in episode.source} == {
        int(Source.RANDOM),
        int(Source.HUMAN),
    }


def test_floats_are_rounded_as_the_buffer_of_hil_serl_does_or_kept(tmp_path: Path) -> None:
    wide = [transition(0, actions=np.array([0.1, 0.2])), transition(1, actions=np.array([0.1, 0.2], np.float32))]
    path = dumped(tmp_path / "a.pkl", wide)
    (rounded,) = read(path).values()
    assert rounded.action.dtype == np.float32
    (kept,) = read(path, floats="keep").values()
    assert kept.action.dtype == np.float64
    assert kept.action[0].tolist() == [0.1, 0.2]
    path = dumped(tmp_path / "b.pkl", wide[::-1])
    with pytest.raises(FormatError, match=r"b\.pkl#1: actions: .*read with floats=float32"):
        read(path, floats="keep")
    assert len(read(path)) == 2


def test_stack_takes_the_newest_frame() -> None:
    for episode in read(GOLDEN / "demo_data", stack="last").values():
        assert episode.observation["wrist_1"].shape == (5, 8, 8, 3)
        assert episode.observation["state"].shape == (5, 5)


def test_max_steps_tells_time_up_from_the_end_of_the_task(tmp_path: Path) -> None:
    timed_out = [transition(0), transition(1), transition(2, last=True)]
    succeeded = [transition(10), transition(11), transition(12, last=True, rewards=1)]
    path = dumped(tmp_path / "a.pkl", timed_out + succeeded)
    for episode in read(path).values():
        assert episode.terminated[-1]
    late, succeeded = read(path, max_steps="3").values()
    assert (late.terminated[-1], late.truncated[-1], late.info.success) == (False, True, False)
    assert (succeeded.terminated[-1], succeeded.truncated[-1], succeeded.info.success) == (True, False, True)  # type: ignore[attr-defined]


def test_masks_of_one_with_dones_are_time_outs(tmp_path: Path) -> None:
    (episode,) = read(dumped(tmp_path / "a.pkl", [transition(0), transition(1, last=True, masks=1.0)])).values()
    assert (episode.terminated[-1], episode.truncated[-1]) == (False, True)
    with pytest.raises(FormatError, match=r"a\.pkl#0: masks: expected 1 where dones is False"):
        read(dumped(tmp_path / "a.pkl", [transition(0, masks=0.0)]))


def test_fields_with_slashes_extras_and_what_is_left_out(tmp_path: Path) -> None:
    arms = {"state": {"left/pose": np.zeros((1, 2), np.float32), "right/pose": np.ones((1, 2), np.float32)}}
    path = dumped(
        tmp_path / "a.pkl",
        [
            transition(
                0, last=True, observations=arms, next_observations=arms, labels=3, infos={"left": True, "odd": {"x": 2}}
            )
        ],
    )
    source = FORMAT.read(path, {})
    (episode,) = dict(source.episodes()).values()
    assert episode.observation["state"]["right"]["pose"].shape == (2, 1, 2)
    assert episode.extras["labels"].tolist() == [3]
    assert [line.external for line in source.mapping if not line.internal] == ["infos/left", "infos/odd/x"]


def test_transitions_that_do_not_fit_the_first_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match=r"a\.pkl#1: observations/state: expected float32 \[1, 3\], got float32 \[1, 4\]"
    ):
        read(
            dumped(
                tmp_path / "a.pkl", [transition(0), transition(1, observations={"state": np.zeros((1, 4), np.float32)})]
            )
        )
    with pytest.raises(FormatError, match="has no 'masks', got observations"):
        read(dumped(tmp_path / "a.pkl", [{name: x for name, x in transition(0).items() if name != "masks"}]))
    with pytest.raises(FormatError, match="holds no transitions"):
        read(dumped(tmp_path / "a.pkl", []))
    with pytest.raises(FormatError, match=r"expected kind=demonstration\|practice\|correction, got 'x'"):
        read(GOLDEN / "demo_data", kind="x")


# ---- and back


def test_hil_serl_finds_its_fields_in_what_is_written(tmp_path: Path) -> None:
    spec = robot_spec(8)
    episode = random_episode(spec, 9, 0, terminated=False)
    target = FORMAT.write(tmp_path / "out", spec, {"stack": "add", "steps_per_file": "9"})
    target.add("a", episode)
    target.add("b", episode)
    target.close()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["transitions_18.pkl", "transitions_9.pkl"]
    theirs = originals(tmp_path / "out" / "transitions_9.pkl")
    assert len(theirs) == 9
    for index, found in enumerate(theirs):
        np.testing.assert_array_equal(found["observations"]["wrist_1"], episode.observation["wrist_1"][index][None])
        np.testing.assert_array_equal(
            found["next_observations"]["state"], episode.observation["state"][index + 1][None]
        )
        np.testing.assert_array_equal(found["actions"], episode.action[index])
        assert (found["rewards"], found["masks"]) == (episode.reward[index], 1.0)
        assert found["dones"] is (index == 8)
        assert ("intervene_action" in found["infos"]) == (episode.source[index] == Source.HUMAN)


def test_one_file_and_nothing_to_write(tmp_path: Path) -> None:
    target = FORMAT.write(tmp_path / "a.pkl", small_spec(), {})
    with pytest.raises(FormatError, match="no episode was written"):
        target.close()
    assert list(tmp_path.iterdir()) == []
