"""Makes the data sets in this folder with the real lerobot, and writes beside each what that library reads of it.

`make.py read DIR FILE` writes what it reads of any other.

    python -m venv v3 && v3/bin/pip install 'lerobot[dataset]==0.6.1' && v3/bin/python make.py v3
    python -m venv v21 && v21/bin/pip install lerobot==0.3.3 "numpy<2.3" && v21/bin/python make.py v21

lerobot 0.6.1 needs Python 3.12; 0.3.3 is the last that writes v2.1.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from pathlib import Path

import numpy as np

try:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
except ImportError:
    from lerobot.common.datasets.lerobot_dataset import LeRobotDataset

HERE = Path(__file__).parent
LENGTHS = (6, 9, 2)  # lerobot 0.6.1 fails on an episode of one frame where a feature has two dimensions
FPS = 10
FEATURES = {
    "observation.images.top": {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    "observation.images.wrist": {"dtype": "image", "shape": (16, 24, 3), "names": ["height", "width", "channels"]},
    "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "grip"]},
    "observation.touch": {"dtype": "int64", "shape": (2, 3), "names": None},
    "action": {"dtype": "float32", "shape": (3,), "names": None},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    "intervention": {"dtype": "bool", "shape": (1,), "names": None},
    "force": {"dtype": "float64", "shape": (1,), "names": None},
}
TASKS = ("push the block", "lift the block")


def frame(episode: int, index: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([episode, index])
    across, down = np.meshgrid(np.arange(96), np.arange(64))
    top = np.stack([across * 2, down * 3 + 8 * index, 60 * episode + across + 4 * index], -1) % 256
    last = index == LENGTHS[episode] - 1
    return {
        "observation.images.top": top.astype(np.uint8),
        "observation.images.wrist": rng.integers(0, 256, (16, 24, 3), dtype=np.uint8),
        "observation.state": rng.normal(size=4).astype(np.float32),
        "observation.touch": rng.integers(-9, 9, (2, 3)),
        "action": rng.normal(size=3).astype(np.float32),
        "next.reward": np.array([1.0 if last and episode == 0 else 0.0], np.float32),
        "next.done": np.array([last and episode == 0]),
        "next.success": np.array([last and episode == 0]),
        "intervention": np.array([episode == 1 and 3 <= index < 6]),
        "force": rng.normal(size=1),
    }


def main(name: str) -> None:
    shutil.rmtree(HERE / name, ignore_errors=True)
    made = LeRobotDataset.create("someone/golden", FPS, FEATURES, root=HERE / name, robot_type="toy", use_videos=True)
    with_task = "task" in inspect.signature(made.add_frame).parameters
    for episode, length in enumerate(LENGTHS):
        for index in range(length):
            task = TASKS[1 if episode == 1 and index >= 5 else 0]
            row = frame(episode, index)
            made.add_frame(row, task=task) if with_task else made.add_frame({**row, "task": task})
        made.save_episode()
    if hasattr(made, "finalize"):
        made.finalize()
    shutil.rmtree(HERE / name / "images", ignore_errors=True)
    np.savez_compressed(HERE / f"{name}.npz", **read(HERE / name))


def read(root: Path) -> dict[str, np.ndarray]:
    """All frames as lerobot gives them out, pictures as uint8 [T, height, width, 3]."""
    data = LeRobotDataset("someone/golden", root=root, video_backend="pyav")
    rows = [data[index] for index in range(len(data))]
    found = {}
    for key in rows[0]:
        column = [row[key] if isinstance(row[key], str) else row[key].numpy() for row in rows]
        found[key] = np.stack(column) if not isinstance(column[0], str) else np.array(column)
        if key in data.meta.camera_keys:
            found[key] = np.rint(found[key] * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "read":
        np.savez(sys.argv[3], **read(Path(sys.argv[2])))
    else:
        main(sys.argv[1])
