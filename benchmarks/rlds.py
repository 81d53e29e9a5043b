"""Reading RLDS with two JPEG cameras: CPU time a step beside TensorFlow Datasets, memory, and what a second core gives.

    python benchmarks/rlds.py --tfds-python /path/to/python     # one with tensorflow-datasets, which makes the data

Both read the same files in turn, several times; the least of each is taken. Prints JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

from understudy.formats import find_format

MAKE = Path(__file__).parents[1] / "tests" / "golden" / "formats" / "rlds" / "make.py"

THEIRS = """
import sys, time
import tensorflow as tf, tensorflow_datasets as tfds
builder = tfds.builder_from_directory(sys.argv[1])
data = builder.as_dataset(split="train", shuffle_files=False).flat_map(lambda episode: episode["steps"])
for attempt in range(3):
    cpu, steps = time.process_time(), 0
    for step in data.as_numpy_iterator():
        steps += 1
    print((time.process_time() - cpu) / steps * 1e6)
"""


def read(place: Path, workers: int) -> tuple[float, float]:
    """CPU microseconds and microseconds a row of one pass."""
    cpu, wall, rows = time.process_time(), time.perf_counter(), 0
    for _, episode in find_format("rlds").read(place, {"workers": str(workers)}).episodes():
        rows += len(episode) + 1
    return (time.process_time() - cpu) / rows * 1e6, (time.perf_counter() - wall) / rows * 1e6


def peak_mb(place: Path) -> float:
    """What a process that reads all of it needs at most."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak-of", str(place)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main(tfds_python: Path | None = None, episodes: int = 20, rounds: int = 3, peak_of: Path | None = None) -> None:
    """Measure.

    Args:
        tfds_python: A Python with tensorflow-datasets.
        episodes: Of 50 rows each; memory is measured with ten times as many too.
        rounds: Passes of each.
        peak_of: Only read this, and print the peak of memory.
    """
    if peak_of is not None:
        read(peak_of, 2)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
        return
    assert tfds_python is not None, "--tfds-python: expected a Python with tensorflow-datasets"
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("small", episodes), ("large", 10 * episodes)):
            subprocess.run([tfds_python, MAKE, "size", f"{folder}/{name}", str(count)], check=True, capture_output=True)
        small, large = Path(folder) / "small" / "cameras", Path(folder) / "large" / "cameras"
        theirs, ours, one, two = [], [], [], []
        for _ in range(rounds):
            done = subprocess.run(
                [tfds_python, "-c", THEIRS, small / "1.0.0"], check=True, capture_output=True, text=True
            )
            theirs.append(min(map(float, done.stdout.split())))
            ours.append(min(read(small, 1)[0] for _ in range(3)))
            one.append(min(read(small, 1)[1] for _ in range(3)))
            two.append(min(read(small, 2)[1] for _ in range(3)))
        found = {
            "tfds_cpu_us_per_step": min(theirs),
            "cpu_us_per_step": min(ours),
            "ratio": min(ours) / min(theirs),
            "one_worker_us": min(one),
            "two_workers_us": min(two),
            "speedup": min(one) / min(two),
            "peak_mb": peak_mb(small),
            "peak_mb_at_10x": peak_mb(large),
        }
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2))


if __name__ == "__main__":
    tyro.cli(main)
