"""One replay buffer in one process, told by a pipe what to do. Started by peers.py in the buffer's own environment.

    python peers_worker.py NAME DIRECTORY CAPACITY

Takes one JSON object a line on standard input and answers each with one on standard output; what libraries print goes
to standard error. An answer with `error` ends the process.

| do | answer |
|---|---|
| insert (first, episodes) | CPU and wall seconds of putting these episodes in |
| settle | bytes in memory and on disk since the start, and the number of wrong transitions in a batch |
| sample (batches) | CPU and wall seconds |
| save | what was called, and its wall seconds |
| recover | the steps that a new process finds in DIRECTORY, and the wrong transitions in a batch of them |
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import sys
import time
import types
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Columns = dict[str, Any]  # name: [steps, ...]

BATCH_SIZE = 256
EPISODE_STEPS = 100
CAMERAS = ("wrist_1", "wrist_2")
OBSERVED = (*CAMERAS, "state")
FRAMES = np.random.default_rng(0).integers(0, 256, (64, 128, 128, 3), np.uint8)


# ---- the work: every value of a step follows from the number of its observation


def make_episode(number: int) -> Columns:
    """An episode: its observations, one more than steps, with actions, rewards and ends."""
    ids = np.arange(EPISODE_STEPS + 1) + number * (EPISODE_STEPS + 1)
    return {name: array if name in OBSERVED else array[:-1] for name, array in values_of(ids).items()}


def values_of(ids: Array) -> dict[str, Array]:
    state = np.zeros((len(ids), 20), np.float32)
    action = np.zeros((len(ids), 7), np.float32)
    state[:, 0] = ids
    action[:, 0] = ids % 64 / 64
    return {
        "wrist_1": FRAMES[ids % 64],
        "wrist_2": FRAMES[ids * 7 % 64],
        "state": state,
        "action": action,
        "reward": (ids % 10).astype(np.float32),
        "done": ids % (EPISODE_STEPS + 1) == EPISODE_STEPS - 1,
    }


def count_wrong(batch: Columns) -> int:
    """Transitions that are not what was inserted; a camera may be one level off, as after a way through floats."""
    ids = np.asarray(batch["state"])[:, 0].astype(int)
    now, then = values_of(ids), values_of(ids + 1)
    wanted = now | {f"next_{name}": then[name] for name in OBSERVED}
    wrong = np.zeros(len(ids), bool)
    for name, right in wanted.items():
        off = np.abs(np.asarray(batch[name]).astype(np.float32).reshape(right.shape) - right.astype(np.float32))
        wrong |= off.reshape(len(ids), -1).max(axis=1) > (1 if name.endswith(CAMERAS) else 0)
    return int(wrong.sum())


# ---- buffers


class Buffer(ABC):
    """A replay buffer as its project documents it, with default settings where nothing else is said."""

    package = "numpy"
    module = "numpy"
    saving: str | None = None  # the call that its project documents for keeping data, where there is one

    @classmethod
    def load(cls) -> str:
        """Import what the buffer is in, before its memory is measured; returns the version of the package."""
        module = importlib.import_module(cls.module)
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:  # not installed, but on the path
            return str(getattr(module, "__version__", "?"))

    def __init__(self, directory: Path, capacity: int):
        self.directory = directory
        self.capacity = capacity

    def prepare(self, episode: Columns) -> Any:
        """An episode in the form that `insert` takes; not part of the measured time."""
        return episode

    @abstractmethod
    def insert(self, episode: Any) -> None: ...

    def settle(self) -> None:
        """Make ready to sample; nothing is inserted afterwards."""
        return

    @abstractmethod
    def sample(self) -> Any: ...

    @abstractmethod
    def columns(self, batch: Any) -> Columns:
        """What `sample` gave, under the names of `values_of`, next observations as `next_...`."""

    def save(self) -> None:
        """Call what `saving` names."""
        return

    def recover(self) -> int:
        """In a new process: open what is on disk, and return how many steps are there."""
        return 0


class Understudy(Buffer):
    package = module = "understudy"

    def __init__(self, directory: Path, capacity: int):
        super().__init__(directory, capacity)
        from understudy.core.examples import robot_spec
        from understudy.replay import Store

        self._store = Store.open(directory / "store")
        self._writer = self._store.writer("bench", robot_spec())

    def insert(self, episode: Columns) -> None:
        from understudy.core import Step

        def see(index: int) -> dict[str, Any]:
            return {name: episode[name][index] for name in OBSERVED}

        self._writer.begin()
        for index in range(EPISODE_STEPS):
            self._writer.append(
                Step(
                    observation=see(index),
                    action=episode["action"][index],
                    reward=episode["reward"][index],
                    terminated=bool(episode["done"][index]),
                )
            )
        self._writer.end(see(EPISODE_STEPS))

    def settle(self) -> None:
        from understudy.replay import Reader
        from understudy.replay.read.view import EVERYTHING
        from understudy.replay.sample.sampler import Sampler

        self._sampler = Sampler(Reader(self.directory / "store"), EVERYTHING, batch_size=BATCH_SIZE)
        total = self._sampler.follow()
        self._batch = self._sampler.make()
        for _ in range(4 * total // BATCH_SIZE):  # until nearly every frame was read once
            self._sampler.sample(self._batch)

    def sample(self) -> Any:
        return self._sampler.sample(self._batch)

    def columns(self, batch: Any) -> Columns:
        after = {f"next_{name}": array for name, array in batch.next_observation.items()}
        return {**batch.observation, **after, "action": batch.action, "reward": batch.reward, "done": batch.terminated}

    def recover(self) -> int:
        self.settle()
        return len(self._sampler)


class UnderstudyNewBatch(Understudy):
    """The same with a new batch each time, as all other buffers give one."""

    def sample(self) -> Any:
        return self._sampler.sample()


class NumpyTake(Buffer):
    """The limit: arrays in memory, each observation once, taken into a batch that is there already."""

    def __init__(self, directory: Path, capacity: int):
        super().__init__(directory, capacity)
        self._num_rows = 0
        self._rows: dict[str, Array] = {}
        self._into: dict[str, Array] = {}
        self._rng = np.random.default_rng(1)

    def insert(self, episode: Columns) -> None:
        if not self._rows:
            num_rows = self.capacity // EPISODE_STEPS * (EPISODE_STEPS + 1)
            self._rows = {name: np.zeros((num_rows, *array.shape[1:]), array.dtype) for name, array in episode.items()}
        for name, array in episode.items():
            self._rows[name][self._num_rows : self._num_rows + len(array)] = array
        self._num_rows += EPISODE_STEPS + 1

    def settle(self) -> None:
        rows = np.arange(self._num_rows)
        self._steps = rows[rows % (EPISODE_STEPS + 1) < EPISODE_STEPS]
        names = [*self._rows, *(f"next_{name}" for name in OBSERVED)]
        shapes = {name: self._rows[name.removeprefix("next_")] for name in names}
        self._into = {name: np.zeros((BATCH_SIZE, *a.shape[1:]), a.dtype) for name, a in shapes.items()}

    def sample(self) -> Any:
        rows = self._steps[self._rng.integers(0, len(self._steps), BATCH_SIZE)]
        after = rows + 1
        for name, array in self._rows.items():
            np.take(array, rows, axis=0, out=self._into[name], mode="clip")
        for name in OBSERVED:
            np.take(self._rows[name], after, axis=0, out=self._into[f"next_{name}"], mode="clip")
        return self._into

    def columns(self, batch: Any) -> Columns:
        return dict(batch)


class TorchRL(Buffer):
    """Memory-mapped files; next observations are stored beside observations, as its collectors give them."""

    package = "torchrl"
    module = "torchrl.data"
    saving = "dumps(path)"

    def __init__(self, directory: Path, capacity: int):
        super().__init__(directory, capacity)
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        storage = LazyMemmapStorage(capacity, scratch_dir=str(directory / f"scratch-{os.getpid()}"))
        self._buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH_SIZE)

    def prepare(self, episode: Columns) -> Any:
        import torch
        from tensordict import TensorDict

        now = {name: torch.from_numpy(episode[name][:EPISODE_STEPS]) for name in (*OBSERVED, "action")}
        then = {name: torch.from_numpy(episode[name][1:]) for name in OBSERVED}
        then |= {name: torch.from_numpy(episode[name])[:, None] for name in ("reward", "done")}
        return TensorDict({**now, "next": TensorDict(then, [EPISODE_STEPS])}, [EPISODE_STEPS])

    def insert(self, episode: Any) -> None:
        self._buffer.extend(episode)

    def sample(self) -> Any:
        return self._buffer.sample()

    def columns(self, batch: Any) -> Columns:
        found = {name: batch[name] for name in (*OBSERVED, "action")}
        found |= {f"next_{name}": batch["next", name] for name in OBSERVED}
        return found | {name: batch["next", name] for name in ("reward", "done")}

    def save(self) -> None:
        self._buffer.dumps(self.directory / "saved")

    def recover(self) -> int:
        self._buffer.loads(self.directory / "saved")
        return len(self._buffer)


class Cpprb(Buffer):
    """In memory; next observations share the rows of observations (`next_of`)."""

    package = module = "cpprb"
    saving = "save_transitions(file)"

    def __init__(self, directory: Path, capacity: int):
        super().__init__(directory, capacity)
        from cpprb import ReplayBuffer

        fields: dict[str, Any] = {name: {"shape": (128, 128, 3), "dtype": np.uint8} for name in CAMERAS}
        fields |= {"state": {"shape": 20}, "action": {"shape": 7}, "reward": {}, "done": {"dtype": np.bool_}}
        self._buffer = ReplayBuffer(capacity, fields, next_of=OBSERVED)

    def insert(self, episode: Columns) -> None:
        now = {name: array[:EPISODE_STEPS] for name, array in episode.items()}
        self._buffer.add(**now, **{f"next_{name}": episode[name][1:] for name in OBSERVED})
        self._buffer.on_episode_end()

    def sample(self) -> Any:
        return self._buffer.sample(BATCH_SIZE)

    def columns(self, batch: Any) -> Columns:
        return dict(batch)

    def save(self) -> None:
        self._buffer.save_transitions(str(self.directory / "saved.npz"))

    def recover(self) -> int:
        self._buffer.load_transitions(str(self.directory / "saved.npz"))
        return int(self._buffer.get_stored_size())


class LeRobot(Buffer):
    """In memory, as float32 images of [0, 1] with channels first; no augmentation (`use_drq=False`)."""

    package = "lerobot"
    module = "lerobot.rl.buffer"
    saving = "to_lerobot_dataset(repo_id, root=)"
    keys = ("observation.images.wrist_1", "observation.images.wrist_2", "observation.state")

    @classmethod
    def load(cls) -> str:
        _stand_in_for_torchvision()
        return super().load()

    def __init__(self, directory: Path, capacity: int):
        super().__init__(directory, capacity)
        from lerobot.rl.buffer import ReplayBuffer

        self._buffer = ReplayBuffer(capacity, device="cpu", state_keys=self.keys, use_drq=False)

    def prepare(self, episode: Columns) -> Any:
        import torch

        seen = {key: torch.from_numpy(episode[name]) for key, name in zip(self.keys, OBSERVED, strict=True)}
        for key in self.keys[:2]:
            seen[key] = (seen[key].permute(0, 3, 1, 2).float() / 255).contiguous()
        return [
            {
                "state": {key: value[index : index + 1] for key, value in seen.items()},
                "next_state": {key: value[index + 1 : index + 2] for key, value in seen.items()},
                "action": torch.from_numpy(episode["action"][index : index + 1]),
                "reward": float(episode["reward"][index]),
                "done": bool(episode["done"][index]),
                "truncated": False,
            }
            for index in range(EPISODE_STEPS)
        ]

    def insert(self, episode: Any) -> None:
        for transition in episode:
            self._buffer.add(**transition)

    def sample(self) -> Any:
        return self._buffer.sample(BATCH_SIZE)

    def columns(self, batch: Any) -> Columns:
        found = {name: batch[name] for name in ("action", "reward", "done")}
        for prefix, tree in (("", batch["state"]), ("next_", batch["next_state"])):
            found |= {prefix + name: tree[key] for key, name in zip(self.keys, OBSERVED, strict=True)}
            found |= {prefix + name: found[prefix + name].permute(0, 2, 3, 1) * 255 for name in CAMERAS}
        return found

    def save(self) -> None:
        self._buffer.to_lerobot_dataset("bench/peers", fps=10, root=self.directory / "saved")

    def recover(self) -> int:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
        from lerobot.rl.buffer import ReplayBuffer

        data = LeRobotDataset("bench/peers", root=self.directory / "saved")
        self._buffer = ReplayBuffer.from_lerobot_dataset(data, device="cpu", state_keys=self.keys, use_drq=False)
        return len(self._buffer)


def _stand_in_for_torchvision() -> None:
    """LeRobot's data sets import torchvision for one function; the real one would need another torch."""
    importlib.import_module("datasets")  # these two look for the real one, and do without
    importlib.import_module("accelerate")
    import torch

    class ToTensor:
        def __call__(self, image: Any) -> Any:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255

    module, transforms = types.ModuleType("torchvision"), types.ModuleType("torchvision.transforms")
    transforms.ToTensor = ToTensor  # type: ignore[attr-defined]
    module.transforms = transforms  # type: ignore[attr-defined]
    sys.modules |= {"torchvision": module, "torchvision.transforms": transforms}


class Reverb(Buffer):
    """A server in this process; items of two steps that share their chunks, read by a TrajectoryDataset."""

    package = "dm-reverb"
    module = "reverb"
    saving = "client.checkpoint()"

    def __init__(self, directory: Path, capacity: int):
        super().__init__(directory, capacity)
        import reverb

        table = reverb.Table(
            name="replay",
            sampler=reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=capacity,
            rate_limiter=reverb.rate_limiters.MinSize(1),
        )
        keeper = reverb.platform.checkpointers_lib.DefaultCheckpointer(str(directory / "saved"))
        self._server = reverb.Server([table], checkpointer=keeper)
        self._client = reverb.Client(f"localhost:{self._server.port}")
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=2)

    def insert(self, episode: Columns) -> None:
        writer = self._writer
        for index in range(EPISODE_STEPS + 1):
            writer.append({name: array[index] for name, array in episode.items() if index < len(array)})
            if index:
                item = {name: writer.history[name][-2:] for name in OBSERVED}
                item |= {name: writer.history[name][-2] for name in ("action", "reward", "done")}
                writer.create_item("replay", 1.0, item)
        writer.end_episode()

    def settle(self) -> None:
        import reverb
        import tensorflow as tf

        example = make_episode(0)
        shapes = {name: (2, *example[name].shape[1:]) for name in OBSERVED}
        shapes |= {name: example[name].shape[1:] for name in ("action", "reward", "done")}
        data = reverb.TrajectoryDataset(
            self._client.server_address,
            table="replay",
            dtypes={name: tf.as_dtype(example[name].dtype) for name in shapes},
            shapes={name: tf.TensorShape(shape) for name, shape in shapes.items()},
            max_in_flight_samples_per_worker=2 * BATCH_SIZE,
        )
        self._batches = data.batch(BATCH_SIZE).as_numpy_iterator()

    def sample(self) -> Any:
        return next(self._batches).data

    def columns(self, batch: Any) -> Columns:
        found = {name: batch[name] for name in ("action", "reward", "done")}
        found |= {name: batch[name][:, 0] for name in OBSERVED}
        return found | {f"next_{name}": batch[name][:, 1] for name in OBSERVED}

    def save(self) -> None:
        self._client.checkpoint()

    def recover(self) -> int:
        num_items = int(self._client.server_info()["replay"].current_size)
        if num_items:
            self.settle()
        return num_items


class RLinf(Buffer):
    """Trajectories of [T, 1, ...] in its cache, which takes all of them."""

    package = "rlinf"
    module = "rlinf.data.replay_buffer"
    saving = "save_checkpoint(path)"

    def __init__(self, directory: Path, capacity: int):
        super().__init__(directory, capacity)
        from rlinf.data.replay_buffer import TrajectoryReplayBuffer

        self._buffer = TrajectoryReplayBuffer(sample_window_size=capacity // EPISODE_STEPS)

    def prepare(self, episode: Columns) -> Any:
        import torch
        from rlinf.data.embodied_io_struct import Trajectory

        columns = {name: torch.from_numpy(array)[:, None] for name, array in episode.items()}
        return Trajectory(
            max_episode_length=EPISODE_STEPS,
            actions=columns["action"],
            rewards=columns["reward"],
            dones=columns["done"],
            curr_obs={name: columns[name][:-1] for name in OBSERVED},
            next_obs={name: columns[name][1:] for name in OBSERVED},
        )

    def insert(self, episode: Any) -> None:
        self._buffer.add_trajectories([episode])

    def sample(self) -> Any:
        return self._buffer.sample(BATCH_SIZE)

    def columns(self, batch: Any) -> Columns:
        found = {"action": batch["actions"], "reward": batch["rewards"], "done": batch["dones"]}
        found |= {name: batch["curr_obs"][name] for name in OBSERVED}
        return found | {f"next_{name}": batch["next_obs"][name] for name in OBSERVED}

    def save(self) -> None:
        self._buffer.save_checkpoint(str(self.directory / "saved"))

    def recover(self) -> int:
        self._buffer.load_checkpoint(str(self.directory / "saved"))
        return int(self._buffer.total_samples)


BUFFERS: dict[str, type[Buffer]] = {
    "numpy": NumpyTake,
    "understudy": Understudy,
    "understudy-new": UnderstudyNewBatch,
    "torchrl": TorchRL,
    "cpprb": Cpprb,
    "lerobot": LeRobot,
    "reverb": Reverb,
    "rlinf": RLinf,
}


# ---- the pipe


class Worker:
    """Does what it is told with one buffer."""

    def __init__(self, kind: type[Buffer], directory: Path, capacity: int):
        self.version = kind.load()
        self._memory_bytes = _memory_bytes()
        self.buffer = kind(directory, capacity)
        self._cpu_s = 0.0  # at the end of the last turn

    def insert(self, first: int, episodes: int) -> dict[str, Any]:
        cpu_s = wall_s = 0.0
        for number in range(first, first + episodes):
            episode = self.buffer.prepare(make_episode(number))
            cpu, wall = time.process_time(), time.perf_counter()
            self.buffer.insert(episode)
            wall_s += time.perf_counter() - wall
            cpu_s += time.process_time() - cpu
        return {"cpu_s": cpu_s, "wall_s": wall_s}

    def settle(self) -> dict[str, Any]:
        ctypes.CDLL(None).malloc_trim(0)
        memory_bytes = _memory_bytes() - self._memory_bytes
        self.buffer.settle()
        wrong = count_wrong(self.buffer.columns(self.buffer.sample()))
        self._cpu_s = time.process_time()
        return {"memory_bytes": memory_bytes, "disk_bytes": _disk_bytes(self.buffer.directory), "wrong": wrong}

    def sample(self, batches: int) -> dict[str, Any]:
        """CPU time counts from the end of the last turn, so that what is fetched ahead in between is in it."""
        wall = time.perf_counter()
        for _ in range(batches):
            self.buffer.sample()
        wall_s = time.perf_counter() - wall
        before, self._cpu_s = self._cpu_s, time.process_time()
        return {"cpu_s": self._cpu_s - before, "wall_s": wall_s}

    def save(self) -> dict[str, Any]:
        wall = time.perf_counter()
        self.buffer.save()
        return {"saving": self.buffer.saving, "wall_s": time.perf_counter() - wall}

    def recover(self) -> dict[str, Any]:
        steps = self.buffer.recover()
        return {"steps": steps, "wrong": count_wrong(self.buffer.columns(self.buffer.sample())) if steps else 0}


def _memory_bytes() -> int:
    """Memory of this process that no file on a disk backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def main(name: str, directory: str, capacity: str) -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")

    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        worker = Worker(BUFFERS[name], Path(directory), int(capacity))
        answer({"version": worker.version, "python": sys.version.split()[0]})
        for line in sys.stdin:
            order = json.loads(line)
            answer(getattr(worker, order.pop("do"))(**order))
    except Exception as error:  # the outermost loop of a process; the parent has to be told
        answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
