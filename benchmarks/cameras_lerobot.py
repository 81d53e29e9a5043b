"""The real lerobot records or reads frames. Started by `benchmarks.cameras` with the Python of lerobot.

    python cameras_lerobot.py record FRAMES OUT SECONDS    # at 30 Hz, what `benchmarks.cameras record` records
    python cameras_lerobot.py read FRAMES OUT STEPS        # items in random order, beside `benchmarks.cameras resized`
    python cameras_lerobot.py check DATASET OUT ITEMS      # random items of an hour that `benchmarks.cameras` exported

FRAMES has `front.npy`, `side.npy` and `wrist.npy`, which are taken back and forth as in cameras.py. Both ways in which
lerobot records are taken, each with its defaults, as one episode: `streaming` encodes while it records, `images` writes
PNG files with four threads a camera and encodes them at the end. What is read was recorded in the second way, with the
cameras of which FRAMES has a file. The answers are in OUT/answers.json.

Each frame shows its number in black and white squares, so that it is known which one a decoded frame is.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CAMERAS = ("front", "side", "wrist")
HZ = 30
MOST_ITEMS = 400  # that are read
NUM_HOUR_FRAMES = 60  # of each camera in an episode of the hour, back and forth
SQUARE, BITS = 16, 8  # pixels of a square; a frame has one for each bit of its number, in its upper left corner
Array = np.ndarray[Any, Any]

WAYS: dict[str, dict[str, Any]] = {
    "streaming": {"streaming_encoding": True},
    "images": {"image_writer_threads": 4 * len(CAMERAS)},
}


def main(what: str, frames: Path, out: Path, amount: float) -> None:
    logging.disable(logging.CRITICAL)  # one line for each slow step would be part of what is measured
    os.environ["SVT_LOG"] = "1"  # errors only
    pictures = {name: np.load(frames / f"{name}.npy") for name in CAMERAS if (frames / f"{name}.npy").exists()}
    if what == "check":
        answers = check(frames, int(amount))
    else:
        answers = read_all(out / "data", pictures, int(amount)) if what == "read" else record_all(out, pictures, amount)
    (out / "answers.json").write_text(json.dumps(answers))


def record_all(out: Path, pictures: dict[str, Array], seconds: float) -> dict[str, Any]:
    answers = {}
    for way, options in WAYS.items():
        answers[way] = record(create(out / way, pictures, **options), out / way, pictures, int(seconds * HZ))
        shutil.rmtree(out / way)
    return answers


def create(root: Path, pictures: dict[str, Array], **options: Any) -> Any:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    joints = {"dtype": "float32", "shape": (14,), "names": None}
    image = {"dtype": "video", "shape": (480, 640, 3), "names": ["height", "width", "channels"]}
    features = {f"observation.images.{name}": image for name in pictures}
    features |= {"observation.state": joints, "action": joints}
    return LeRobotDataset.create("someone/arm", HZ, features, root=root, **options)


def step_of(pictures: dict[str, Array], number: int) -> dict[str, Any]:
    joints = np.sin(number / HZ + np.arange(14)).astype(np.float32)
    seen = {f"observation.images.{name}": found[place_of(number, len(found))] for name, found in pictures.items()}
    return {**seen, "observation.state": joints, "action": np.zeros(14, np.float32), "task": "record"}


def read_all(root: Path, pictures: dict[str, Array], num_steps: int) -> dict[str, Any]:
    """CPU time of random items with one observation, and with that of the next step too; they are not resized."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    torch.set_num_threads(1)
    data = create(root, pictures, **WAYS["images"])
    for number in range(num_steps):
        data.add_frame(step_of(pictures, number))
    data.save_episode()
    data.finalize()
    answers = {}
    for name, deltas in {"observation": [0.0], "transition": [0.0, 1 / HZ]}.items():
        times = {f"observation.images.{camera}": deltas for camera in pictures}
        data = LeRobotDataset("someone/arm", root=root, delta_timestamps=times)
        order = np.random.default_rng(0).permutation(num_steps)[:MOST_ITEMS]
        data[0]  # opens the files
        before_s = time.process_time()
        for number in order:
            data[int(number)]
        answers[f"CPU ms, {name}"] = round((time.process_time() - before_s) / len(order) * 1e3, 2)
    return answers


def check(root: Path, num_items: int) -> dict[str, Any]:
    """Read random items, and compare the number in each frame and the joints with what that step recorded."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    torch.set_num_threads(1)
    before_s = cpu_s()
    data = LeRobotDataset("someone/arm", root=root)
    opened_s, wrong = cpu_s() - before_s, 0
    chosen = np.random.default_rng(0).permutation(len(data))[:num_items]
    before_s = cpu_s()
    for index in chosen:
        item = data[int(index)]
        number = int(item["frame_index"])
        shown = place_of(number, NUM_HOUR_FRAMES)
        joints = np.sin(number / HZ + np.arange(14)).astype(np.float32)
        wrong += any(not np.array_equal(item[key].numpy(), joints) for key in ("observation.joints", "action"))
        for name in CAMERAS:
            frame = (item[f"observation.images.{name}"] * 255).round().byte().permute(1, 2, 0).numpy()
            wrong += number_in(frame) != shown
    return {
        "steps": len(data),
        "episodes": data.num_episodes,
        "fps": data.fps,
        "opened, CPU s": round(opened_s, 1),
        "items read": len(chosen),
        "CPU ms an item": round((cpu_s() - before_s) / len(chosen) * 1e3, 1),
        "wrong frames and joints": wrong,
    }


def record(data: Any, place: Path, pictures: dict[str, Array], num_steps: int) -> dict[str, Any]:
    """The same steps as in cameras.py; what was written is decoded and compared."""
    took_s, late = list[float](), 0
    spent_s, start_s = cpu_s(), time.monotonic()
    for number in range(num_steps):
        left_s = start_s + number / HZ - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        late += left_s < -1 / HZ
        step = step_of(pictures, number)
        before_s = time.monotonic()
        data.add_frame(step)
        took_s.append(time.monotonic() - before_s)
    ended_s = time.monotonic()
    data.save_episode()
    data.finalize()
    waited_s, spent_s = time.monotonic() - ended_s, cpu_s() - spent_s
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    found = {name: compare(place, name, pictures[name]) for name in CAMERAS}
    return {
        "steps": num_steps,
        "recorded in, s": round(ended_s - start_s, 1),
        "until it was saved, s more": round(waited_s, 1),
        "frames lost": {name: num_steps - count for name, (count, *_) in found.items()},
        "frames at another step, of 100": {name: round(100 * apart, 1) for name, (_, apart, _) in found.items()},
        "add_frame ms": {f"p{q}": round(float(np.percentile(took_s, q)) * 1e3, 2) for q in (50, 99, 99.9, 100)},
        "late ticks": late,
        "kB a step": round(size / num_steps / 1e3, 1),
        "CPU ms a step": round(spent_s / num_steps * 1e3, 1),
        "memory at most, MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "PSNR dB": {name: round(quality, 2) for name, (*_, quality) in found.items()},
    }


def place_of(number: int, count: int) -> int:
    """Which of the frames the step has: back and forth, without a jump."""
    return min(number % (2 * count), 2 * count - 1 - number % (2 * count))


def cpu_s() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def mark(pictures: Array) -> Array:
    """Copies of up to 256 frames, each with its number in squares."""
    marked = pictures.copy()
    for number, picture in enumerate(marked):
        for bit in range(BITS):
            picture[:SQUARE, bit * SQUARE : (bit + 1) * SQUARE] = 255 * (number >> bit & 1)
    return marked


def number_in(frame: Array) -> int:
    """The number that a marked frame shows."""
    squares = frame[:SQUARE, : BITS * SQUARE].reshape(SQUARE, BITS, -1).mean(axis=(0, 2))
    return int(sum(1 << bit for bit in range(BITS) if squares[bit] > 127))


def psnr(shown: Array, picture: Array) -> float:
    error = float(np.mean((shown.astype(np.float32) - picture) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def compare(place: Path, name: str, pictures: Array) -> tuple[int, float, float]:
    """The frames in the videos; which part of them is not that of its step; and the PSNR to the frame that is shown.

    A frame that was lost moves all after it.
    """
    import av

    count, apart, qualities = 0, 0, list[float]()
    for path in sorted(place.glob(f"videos/observation.images.{name}/**/*.mp4")):
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                shown = frame.to_ndarray(format="rgb24")
                number = number_in(shown)
                apart += number != place_of(count, len(pictures))
                if count % 7 == 0:
                    qualities.append(psnr(shown, pictures[number]))
                count += 1
    return count, apart / max(count, 1), float(np.mean(qualities))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder has a file called lerobot.py
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
