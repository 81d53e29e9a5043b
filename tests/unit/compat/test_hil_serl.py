"""The face of HIL-SERL: every pair that comes out was put in, and what would be ignored is refused."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.compat import MemoryEfficientReplayBuffer
from understudy.core import ArraySpec, SpecError, StoreClosedError, StoreError, StoreFormatError
from understudy.replay import Reader, verify


class Box:
    """What a gymnasium space of arrays has."""

    def __init__(self, *shape: int, dtype: Any = np.float32):
        self.shape, self.dtype = shape, np.dtype(dtype)


class Dict:
    def __init__(self, **spaces: Any):
        self.spaces = spaces


SPACE = Dict(image=Box(1, 4, 4, 3, dtype=np.uint8), state=Box(1, 3))
ACTION = Box(2)


def make(path: Path | None, capacity: int = 10_000, **options: Any) -> MemoryEfficientReplayBuffer:
    return MemoryEfficientReplayBuffer(SPACE, ACTION, capacity, path=path, **options)


def observation(env: int, time: int, stack: int = 1) -> dict[str, np.ndarray]:
    """An observation that says in every field when and where it was made."""
    times = [max(time - stack + 1 + n, 0) for n in range(stack)]
    image = np.zeros((stack, 4, 4, 3), np.uint8)
    state = np.zeros((stack, 3), np.float32)
    for n, t in enumerate(times):
        image[n, :, :, 0], image[n, :, :, 1], image[n, :, :, 2] = t % 256, t // 256, env
        state[n] = env, t, env * 1000 + t
    return {"image": image, "state": state}


def transition(env: int, time: int, *, done: bool = False, mask: float | None = None, **others: Any) -> dict[str, Any]:
    return {
        "observations": observation(env, time),
        "actions": np.array([env, time], np.float32),
        "next_observations": observation(env, time + 1),
        "rewards": time / 2,
        "masks": float(not done) if mask is None else mask,
        "dones": done,
        **others,
    }


def when(tree: dict[str, np.ndarray]) -> np.ndarray:
    """Environment and time of each observation of a batch, which all of its fields must agree on."""
    image, state = tree["image"][:, -1].astype(int), tree["state"][:, -1]
    times = image[..., 0] + 256 * image[..., 1]
    assert (times == times[:, :1, :1]).all()
    assert (image[..., 2] == image[:, :1, :1, 2]).all()
    found = np.stack([image[:, 0, 0, 2], times[:, 0, 0]], 1)
    assert np.array_equal(found, state[:, :2])
    assert np.array_equal(state[:, 2], found[:, 0] * 1000 + found[:, 1])
    return found


def check(batch: dict[str, Any]) -> set[tuple[int, int]]:
    """Every transition is one that was inserted; returns which."""
    now, then = when(batch["observations"]), when(batch["next_observations"])
    assert np.array_equal(batch["actions"], now)
    assert np.array_equal(then, now + np.array([0, 1]))
    assert np.array_equal(batch["rewards"], (now[:, 1] / 2).astype(np.float32))
    return {tuple(pair) for pair in now.tolist()}


def test_batches_look_as_they_do_there(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(30):
            buffer.insert(transition(1, t, done=t == 29))
        batch = buffer.sample(64)
        assert len(buffer) == 30
    assert list(batch) == ["observations", "actions", "next_observations", "rewards", "masks", "dones"]
    assert batch["observations"]["image"].shape == (64, 1, 4, 4, 3)
    assert batch["observations"]["image"].dtype == np.uint8
    assert batch["actions"].shape == (64, 2)
    assert (batch["rewards"].dtype, batch["masks"].dtype, batch["dones"].dtype) == (np.float32, np.float32, np.bool_)
    assert type(batch["observations"]) is dict
    assert len(check(batch)) > 20


def test_every_inserted_transition_can_be_drawn_and_no_other(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(20):
            buffer.insert(transition(0, t, done=t == 19))
        for t in range(12):  # this one is still going on: its newest step waits for the next insert
            buffer.insert(transition(1, t))
        assert check(buffer.sample(2000)) == {(0, t) for t in range(20)} | {(1, t) for t in range(11)}
        buffer.flush()
        assert check(buffer.sample(2000)) == {(0, t) for t in range(20)} | {(1, t) for t in range(12)}


def test_frames_are_stored_once(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(20):
            buffer.insert(transition(0, t, done=t == 19))
    with Reader(tmp_path / "store") as reader:
        (record,) = reader.episodes()
        assert (record.num_steps, record.num_rows, record.state) == (20, 21, "ended")
    assert verify(tmp_path / "store").ok


def test_intervened_steps_alone_keep_their_true_neighbours(tmp_path: Path) -> None:
    """In the demonstration buffer of HIL-SERL only such steps arrive, and a fifth of its pairs are wrong."""
    rng = np.random.default_rng(1)
    kept = [(e, t) for e in range(8) for t in range(50) if rng.random() < 0.4 or t == 49]
    with make(tmp_path / "store") as buffer:
        for e, t in kept:
            buffer.insert(transition(e, t, done=t == 49, infos={"intervene_action": np.zeros(2)}))
        buffer.flush()
        assert check(buffer.sample(6000)) == set(kept)
    with Reader(tmp_path / "store") as reader:
        records = list(reader.episodes())
        assert sum(record.num_steps for record in records) == len(kept)
        assert all(record.num_human == record.num_steps for record in records)
        assert {record.info.kind for record in records} == {"correction"}


def test_interleaved_environments_do_not_mix(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(40):
            for env in (1, 2, 3):
                buffer.insert(transition(env, t, done=t == 39))
        assert check(buffer.sample(4000)) == {(env, t) for env in (1, 2, 3) for t in range(40)}


def test_threads_insert_and_sample_at_once(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        buffer.insert(transition(0, 0, done=True))

        def insert(env: int) -> None:
            for t in range(100):
                buffer.insert(transition(env, t, done=t % 25 == 24))

        threads = [threading.Thread(target=insert, args=(env,)) for env in (1, 2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            check(buffer.sample(32))
        for thread in threads:
            thread.join()
        buffer.flush()
        assert len(check(buffer.sample(5000))) == 201


def test_terminations_and_time_limits_come_back_apart(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for env, mask in ((1, 0.0), (2, 1.0)):
            for t in range(4):
                buffer.insert(transition(env, t, done=t == 3, mask=mask if t == 3 else 1.0))
        batch = buffer.sample(500)
    env, time = when(batch["observations"]).T
    assert np.array_equal(batch["dones"], time == 3)
    assert np.array_equal(batch["masks"], 1 - ((time == 3) & (env == 1)))
    with Reader(tmp_path / "store") as reader:
        assert reader.read(1).terminated.tolist() == [False, False, False, True]
        assert reader.read(2).truncated.tolist() == [False, False, False, True]


def test_packed_images_hold_both_frames(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(20):
            buffer.insert(transition(5, t, done=t == 19))
        batch = buffer.sample(100, pack_obs_and_next_obs=True)
    assert batch["observations"]["image"].shape == (100, 2, 4, 4, 3)
    assert list(batch["next_observations"]) == ["state"]
    frames = batch["observations"]["image"][:, :, 0, 0, 0]
    time = batch["observations"]["state"][:, 0, 1]
    assert np.array_equal(frames, np.stack([time, time + 1], 1))


def test_stacked_frames_are_packed_too(tmp_path: Path) -> None:
    space = Dict(image=Box(3, 4, 4, 3, dtype=np.uint8), state=Box(3, 3))
    with MemoryEfficientReplayBuffer(space, ACTION, 1000, path=tmp_path / "store") as buffer:
        for t in range(20):
            step = transition(5, t, done=t == 19)
            step["observations"], step["next_observations"] = observation(5, t, 3), observation(5, t + 1, 3)
            buffer.insert(step)
        batch = buffer.sample(100, pack_obs_and_next_obs=True)
        frames = batch["observations"]["image"][:, :, 0, 0, 0].astype(int)
        time = batch["observations"]["state"][:, -1, 1].astype(int)
        assert np.array_equal(frames, np.maximum(time[:, None] + [-2, -1, 0, 1], 0))
        step["next_observations"]["image"][0] = 77
        buffer.insert(step)
        with pytest.raises(StoreError, match="observations/image: a stack does not share its frames with the next"):
            buffer.sample(1000, pack_obs_and_next_obs=True)


def test_the_newest_capacity_transitions_are_drawn(tmp_path: Path) -> None:
    with make(tmp_path / "store", capacity=37) as buffer:
        for e in range(30):
            for t in range(10):
                buffer.insert(transition(e, t, done=t == 9))
            expected = [(e, t) for e in range(e + 1) for t in range(10)][-37:]
            assert len(buffer) == len(expected)
            if e % 7 == 6:
                assert check(buffer.sample(1500)) == set(expected)
        assert buffer.latest_data_id() == 300
    with make(tmp_path / "store", capacity=37) as buffer:
        assert len(buffer) == 37
        assert buffer.latest_data_id() == 300
        assert check(buffer.sample(1500)) == set(expected)


def test_an_endless_episode_is_stored_in_pieces(tmp_path: Path) -> None:
    with make(tmp_path / "store", capacity=30) as buffer:
        for t in range(400):
            buffer.insert(transition(1, t))
        assert check(buffer.sample(1500)) == {(1, t) for t in range(369, 399)}
    with Reader(tmp_path / "store") as reader:
        assert sum(record.num_steps for record in reader.episodes()) < 200


def test_the_disk_space_of_old_transitions_comes_back(tmp_path: Path) -> None:
    space = Dict(image=Box(1, 64, 64, 3, dtype=np.uint8))
    frame = np.zeros((1, 64, 64, 3), np.uint8)
    with MemoryEfficientReplayBuffer(space, ACTION, 200, path=tmp_path / "store") as buffer:
        for t in range(1500):  # 18 MB of frames, of which 2.5 MB are kept
            now, then = frame + np.uint8(t % 251), frame + np.uint8((t + 1) % 251)
            buffer.insert(
                {
                    "observations": {"image": now},
                    "actions": np.zeros(2),
                    "next_observations": {"image": then},
                    "rewards": 0,
                    "masks": 1,
                    "dones": t % 20 == 19,
                }
            )
            if t % 100 == 50:
                batch = buffer.sample(64)
                shown = batch["observations"]["image"][:, 0, 0, 0, 0].astype(int)
                assert np.array_equal(batch["next_observations"]["image"][:, 0, 0, 0, 0], (shown + 1) % 251)
        used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "store").rglob("*.safetensors"))
        opened = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
        ours = [file for file in opened if f"{tmp_path}/store/segments" in file]
    assert used < 7_000_000
    assert ours
    assert not [file for file in ours if file.endswith("(deleted)")]


def test_restored_transitions_keep_their_neighbours(tmp_path: Path) -> None:
    buffer = make(tmp_path / "store")
    for t in range(60):
        buffer.insert(transition(1, t))
    buffer.close()
    with make(tmp_path / "store") as buffer:
        for t in range(60, 80):  # goes on where the first left off: another episode, the same true pairs
            buffer.insert(transition(1, t, done=t == 79))
        assert len(buffer) == 80
        assert check(buffer.sample(2500)) == {(1, t) for t in range(80)}


def test_a_buffer_that_was_killed_has_what_was_flushed(tmp_path: Path) -> None:
    buffer = make(tmp_path / "store")
    for t in range(30):
        buffer.insert(transition(1, t))
    buffer.flush()
    buffer._store.close()  # as a kill leaves it: nothing more is written
    with make(tmp_path / "store") as again:
        assert check(again.sample(1000)) == {(1, t) for t in range(30)}


def test_success_and_infos(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(3):
            buffer.insert(transition(1, t, done=t == 2, infos={"succeed": t == 2}))
        buffer.insert(transition(2, 0, done=True, infos={"succeed": np.bool_(False)}))
        buffer.insert(transition(3, 0, done=True, infos={}))
    with Reader(tmp_path / "store") as reader:
        assert [record.info.success for record in reader.episodes()] == [True, False, None]


def test_the_grasp_penalty_is_kept_when_asked_for(tmp_path: Path) -> None:
    with make(tmp_path / "store", include_grasp_penalty=True) as buffer:
        for t in range(10):
            buffer.insert(transition(1, t, done=t == 9, grasp_penalty=-0.5 * t))
        batch = buffer.sample(50)
        assert np.array_equal(batch["grasp_penalty"], batch["observations"]["state"][:, 0, 1] * -0.5)
        with pytest.raises(SpecError, match="grasp_penalty: expected in every transition"):
            buffer.insert(transition(1, 0))


def test_without_a_path_it_lives_in_a_temporary_directory() -> None:
    with make(None) as buffer:
        buffer.insert(transition(1, 0))
        assert check(buffer.sample(4)) == {(1, 0)}
        path = buffer.path
        assert path.is_dir()
    assert not path.exists()
    with pytest.raises(StoreClosedError, match="the buffer is closed; make a new one"):
        buffer.sample(1)


class Tensor:
    """What a torch tensor has, on a device and with a gradient."""

    def __init__(self, array: Any):
        self.array = np.asarray(array)
        self.ready = 0

    def detach(self) -> "Tensor":
        self.ready += 1
        return self

    def cpu(self) -> "Tensor":
        self.ready += 1
        return self

    def numpy(self) -> np.ndarray:
        assert self.ready >= 2
        if self.array.dtype == np.float16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


def test_tensors_lists_and_float64_are_taken(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        given = transition(1, 0, done=True)
        given["observations"] = {name: Tensor(value) for name, value in given["observations"].items()}
        given["next_observations"]["state"] = given["next_observations"]["state"].astype(np.float64)
        given["actions"] = [1.0, 0.0]
        given["rewards"], given["dones"] = Tensor([0.0]), Tensor(True)
        buffer.insert(given)
        assert check(buffer.sample(4)) == {(1, 0)}
        given["actions"] = Tensor(np.zeros(2, np.float16))
        with pytest.raises(SpecError, match=r"actions: numpy cannot hold it .*BFloat16.*for example to float32"):
            buffer.insert(given)


def test_the_caller_may_reuse_its_arrays(tmp_path: Path) -> None:
    image, state = np.zeros((1, 4, 4, 3), np.uint8), np.zeros((1, 3), np.float32)
    with make(tmp_path / "store") as buffer:
        for t in range(20):
            given = transition(1, t, done=t == 19)
            image[...], state[...] = given["next_observations"]["image"], given["next_observations"]["state"]
            buffer.insert({**given, "next_observations": {"image": image, "state": state}})
            image[...], state[...] = 0, 0
        assert len(check(buffer.sample(500))) == 20


def test_specs_are_taken_in_place_of_spaces(tmp_path: Path) -> None:
    spec = {"image": ArraySpec(shape=(1, 4, 4, 3), dtype="uint8"), "state": ArraySpec(shape=(1, 3), dtype="float32")}
    action = ArraySpec(shape=(2,), dtype="float32", low=-9.0, high=9.0)
    with MemoryEfficientReplayBuffer(spec, action, 100, path=tmp_path / "store") as buffer:
        buffer.insert(transition(1, 0))
        with pytest.raises(SpecError, match=r"actions\[1\]: expected a value from -9 to 9, got 10"):
            buffer.insert(transition(1, 10))


def test_the_iterator_makes_batches_ahead(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for t in range(20):
            buffer.insert(transition(1, t, done=t == 19))
        iterator = buffer.get_iterator(queue_size=3, sample_args={"batch_size": 16, "pack_obs_and_next_obs": True})
        batches = [next(iterator) for _ in range(8)]
        assert len({batch["rewards"].tobytes() for batch in batches}) > 1  # each has arrays of its own
        assert all(batch["observations"]["image"].shape == (16, 2, 4, 4, 3) for batch in batches)
        iterator.close()  # type: ignore[attr-defined]
        assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]
        with pytest.raises(StoreError, match="queue_size: expected a number from 1, got 0"):
            buffer.get_iterator(queue_size=0)


def test_an_error_in_the_iterator_reaches_the_caller(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer, pytest.raises(StoreError, match="nothing to sample; insert a transition"):
        next(buffer.get_iterator(sample_args={"batch_size": 4}))


def test_the_same_seed_draws_the_same_batches(tmp_path: Path) -> None:
    def draw(name: str, seed: int) -> bytes:
        with make(tmp_path / name, seed=seed) as buffer:
            for t in range(20):
                buffer.insert(transition(1, t, done=t == 19))
            return buffer.sample(64)["actions"].tobytes()

    assert draw("a", 1) == draw("b", 1) != draw("c", 2)


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="there is no option 'image_key'; did you mean 'image_keys'"):
        make(tmp_path / "store", image_key="x")
    with pytest.raises(StoreError, match="capacity: expected a number from 1, got 0"):
        make(tmp_path / "store", capacity=0)
    with pytest.raises(SpecError, match="image_keys: there is no observations/wrist; choose among image, state"):
        make(tmp_path / "store", image_keys=("wrist",))
    with pytest.raises(SpecError, match=r"observations/state: expected frames \[T, height, width, channels\]"):
        make(tmp_path / "store", image_keys=("state",))
    with pytest.raises(SpecError, match="observations/words: expected a space of arrays or a dict of them"):
        MemoryEfficientReplayBuffer({"words": object()}, ACTION, 10, (), tmp_path / "store")
    with make(tmp_path / "store") as buffer:
        buffer.insert(transition(1, 0))
        with pytest.raises(StoreError, match="batch_size: expected a number from 1, got 0"):
            buffer.sample(0)
        with pytest.raises(StoreError, match=r"indx: a batch is drawn, and not chosen by position; .*Reader"):
            buffer.sample(1, indx=np.arange(1))
        with pytest.raises(StoreError, match=r"get_latest_data: .*understudy\.replay\.Reader on .*follow\(\)"):
            buffer.get_latest_data(0)
    with pytest.raises(StoreFormatError, match=r"holds steps of another spec .*choose another path"):
        MemoryEfficientReplayBuffer(SPACE, Box(3), 100, path=tmp_path / "store")
    with make(tmp_path / "store") as buffer:  # the refusal let go of the store
        assert len(buffer) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"masks": 0.5}, "masks: expected 0 or 1, got 0.5; pass 1 - terminated"),
        ({"masks": 0.0}, "masks: expected 1 where dones is False, got 0"),
        ({"rewards": [1.0, 2.0]}, "rewards: expected one number"),
        ({"observations": {"image": 1}}, r"observations/state: expected float32 \[1, 3\], got nothing; add the field"),
        ({"actions": np.zeros(3, np.float32)}, r"actions: expected float32 \[2\], got float32 \[3\]"),
        (
            {"next_observations": {**observation(1, 5), "image": np.zeros((1, 4, 4, 3), np.float32)}},
            r"next_observations/image: expected uint8 \[1, 4, 4, 3\], got float32",
        ),
        ({"rewards": float("nan")}, "reward: expected a finite number"),
    ],
)
def test_a_wrong_transition_is_refused_and_changes_nothing(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        buffer.insert(transition(1, 3))
        for time in (4, 9):  # one that would follow, and one that would not
            with pytest.raises(SpecError, match=text):
                buffer.insert({**transition(1, time), **change})
        assert len(buffer) == 1
        buffer.insert(transition(1, 4))
        assert check(buffer.sample(100)) <= {(1, 3), (1, 4)}
    with pytest.raises(SpecError, match="masks: expected in every transition"), make(None) as buffer:
        buffer.insert({name: value for name, value in transition(1, 0).items() if name != "masks"})
