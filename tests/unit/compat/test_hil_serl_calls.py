"""The calls of HIL-SERL's scripts that go beyond insert and sample: devices, nested images, labels, loading again."""

import logging
import pickle
import sys
from collections import UserDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.compat.test_hil_serl import ACTION, Box, Dict, check, make, observation, transition

from understudy.compat import (
    MemoryEfficientReplayBufferDataStore,
    ReplayBuffer,
    ReplayBufferDataStore,
    concat_batches,
    populate_data_store,
)
from understudy.compat.hil_serl import transitions
from understudy.core import SpecError
from understudy.core import tree as trees


def nested(time: int, stack: bool) -> dict[str, Any]:
    shape = (1, 4, 4, 3) if stack else (4, 4, 3)
    images = {name: np.full(shape, time + n, np.uint8) for n, name in enumerate(("wrist_1", "wrist_2"))}
    return {"images": images, "state": {"tcp_pose": np.full(7, time, np.float32)}}


def nested_space(stack: bool) -> Dict:
    shape = (1, 4, 4, 3) if stack else (4, 4, 3)
    images = Dict(wrist_1=Box(*shape, dtype=np.uint8), wrist_2=Box(*shape, dtype=np.uint8))
    return Dict(images=images, state=Dict(tcp_pose=Box(7)))


def nested_transition(time: int, stack: bool) -> dict[str, Any]:
    return {
        "observations": nested(time, stack),
        "actions": np.zeros(2, np.float32),
        "next_observations": nested(time + 1, stack),
        "rewards": 0.0,
        "masks": float(time != 19),
        "dones": time == 19,
    }


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("keys", [("images/wrist_1", "images/wrist_2"), ("wrist_1", "wrist_2"), ()])
def test_nested_images_are_packed_with_frames_stacked_or_not(keys: tuple[str, ...], stack: bool) -> None:
    with MemoryEfficientReplayBufferDataStore(nested_space(stack), ACTION, 100, image_keys=keys) as buffer:
        for time in range(20):
            buffer.insert(nested_transition(time, stack))
        batch = buffer.sample(32, pack_obs_and_next_obs=True)
        time = batch["observations"]["state"]["tcp_pose"][:, 0]
        assert np.array_equal(batch["next_observations"]["state"]["tcp_pose"][:, 0], time + 1)
        found = batch["observations"]["images"]["wrist_2"]
        if keys:
            assert found.shape == (32, 2, 4, 4, 3)
            assert "images" not in batch["next_observations"]
            assert np.array_equal(found[:, 0, 0, 0, 0], time + 1)
            assert np.array_equal(found[:, 1, 0, 0, 0], time + 2)
        else:  # nothing to pack: both are whole
            assert found.shape == (32, *((1,) if stack else ()), 4, 4, 3)
            assert trees.flatten(batch["next_observations"]).keys() == trees.flatten(batch["observations"]).keys()


def test_batches_are_placed_on_the_device_that_was_asked_for(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(20):
            buffer.insert(transition(1, t, done=t == 19))
        for device in ("cpu", "meta", torch.device("cpu")):
            iterator = buffer.get_iterator(sample_args={"batch_size": 8, "pack_obs_and_next_obs": True}, device=device)
            batch = next(iterator)
            assert {leaf.device for leaf in trees.flatten(batch).values()} == {torch.device(device)}
            iterator.close()  # type: ignore[attr-defined]
        joined = concat_batches(buffer.sample(4), buffer.sample(4), axis=0)
        assert joined["observations"]["image"].shape == (8, 1, 4, 4, 3)
        assert len(check(joined)) > 1


def test_batches_are_frozen_dicts_in_a_program_that_uses_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of flax's module where flax is not installed."""
    try:
        from flax.core import frozen_dict  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        frozen_dict = ModuleType("flax.core.frozen_dict")
        frozen_dict.freeze = frozen_dict.FrozenDict = UserDict  # type: ignore[attr-defined]
    with make(None) as buffer:
        for t in range(4):
            buffer.insert(transition(1, t, done=t == 3))
        assert type(concat_batches(buffer.sample(2), buffer.sample(2), axis=0)) is dict
        monkeypatch.setitem(sys.modules, "flax.core.frozen_dict", frozen_dict)
        batch = buffer.sample(4, pack_obs_and_next_obs=True)
        for made in (batch, next(buffer.get_iterator(sample_args={"batch_size": 4}, device="cpu"))):
            assert isinstance(made, frozen_dict.FrozenDict)
        joined = concat_batches(batch, buffer.sample(4, pack_obs_and_next_obs=True), axis=0)
        assert isinstance(joined, frozen_dict.FrozenDict)
        assert joined["observations"]["image"].shape == (8, 2, 4, 4, 3)
        assert concat_batches(batch["actions"], batch["actions"], axis=0).shape[0] == 8


def test_a_device_of_jax_needs_jax() -> None:
    try:
        import jax
    except ImportError:
        with make(None) as buffer:
            buffer.insert(transition(1, 0, done=True))
            with pytest.raises(SpecError, match=r"device: .* jax is not installed"):
                next(buffer.get_iterator(sample_args={"batch_size": 1}, device=object()))
    else:
        with make(None) as buffer:
            buffer.insert(transition(1, 0, done=True))
            batch = next(buffer.get_iterator(sample_args={"batch_size": 1}, device=jax.devices()[0]))
            assert isinstance(batch["actions"], jax.Array)


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferDataStore])
def test_a_buffer_without_images_has_labels_and_next_actions(kind: type[ReplayBuffer]) -> None:
    with kind(Dict(state=Box(3)), ACTION, 100, None, True, True, True) as buffer:
        buffer.batch_insert(
            {
                "observations": {"state": np.full(3, t, np.float32)},
                "actions": np.zeros(2, np.float32),
                "next_observations": {"state": np.full(3, t + 1, np.float32)},
                "rewards": 0.0,
                "masks": 1.0,
                "dones": False,
                "next_actions": np.full(2, t, np.float64),
                "next_intvn": t % 2 == 0,
                "labels": t,
                "grasp_penalty": -t,
            }
            for t in range(10)
        )
        assert len(buffer) == 10
        batch = buffer.sample(64)
        time = batch["observations"]["state"][:, 0]
        assert (batch["labels"].dtype, batch["next_intvn"].dtype) == (np.int64, np.bool_)
        assert np.array_equal(batch["labels"], time)
        assert np.array_equal(batch["next_intvn"], time % 2 == 0)
        assert np.array_equal(batch["next_actions"][:, 1], time)
        assert np.array_equal(batch["grasp_penalty"], -time)
        assert buffer.sample(4, keys=["observations", "labels"]).keys() == {"observations", "labels"}
        assert buffer.seed(3) == [3]


def test_fields_that_no_buffer_keeps_are_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "_logged", set())
    with make(None) as buffer:
        for t in range(5):
            given = transition(1, t, grasp_penalty=0.0, mc_returns=1.0)
            given["observations"]["side_classifier"] = np.zeros(3)
            buffer.insert(given)
        assert check(buffer.sample(50)) == {(1, t) for t in range(4)}
    assert caplog.messages == [
        "grasp_penalty: left out of every transition; pass include_grasp_penalty=True to the buffer to keep it",
        "mc_returns: left out of every transition; no buffer keeps it",
        "observations/side_classifier: left out of every transition; it is not in the observation space",
    ]


def test_demonstrations_that_are_loaded_at_each_start_do_not_multiply(tmp_path: Path) -> None:
    demo = [transition(n, t, done=t == 9) for n in range(4) for t in range(10)] + [transition(0, 0)] * 2
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(demo))
    for start in range(3):
        with make(tmp_path / "store") as buffer:
            populate_data_store(buffer, [tmp_path / "demo.pkl"])
            assert len(buffer) == 42 + start  # also equal ones that were inserted twice are kept
            buffer.insert(transition(9, start, done=True))  # and what is new is added
            changed = transition(0, 3)
            changed["next_observations"] = observation(0, 5)
            if start == 2:
                buffer.insert(changed)  # another outcome of a step that is there
                assert len(buffer) == 46
            check(buffer.sample(32))


def test_every_transition_is_new_to_a_buffer_that_was_empty(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), make(None) as buffer:
        for _ in range(3):
            buffer.insert(transition(0, 0, done=True))
        assert len(buffer) == 3
