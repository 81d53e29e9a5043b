"""The processes of test_readers.py: one that writes rows anyone can check, and one that follows and checks them.

    python reader_process.py write STORE RESULT SECONDS
    python reader_process.py read STORE RESULT DONE

Both print `ready` when they have opened the store. The writer begins at a line on its stdin; a reader ends when the
file DONE is there and it has seen all that is in the store. What they found they leave in RESULT, as JSON.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| two writing threads | the clock | the commit; a pause after it | the disk; time |
| reader | the catalog | `follow` | a commit; its time-out |
"""

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

from understudy.core import ArraySpec, DamageError, Spec, Step, StepSpec
from understudy.replay import Reader, Store

NUM_WRITERS = 2
COMMIT_STEPS = 4  # so that most episodes are committed in several parts
PAUSE_S = 0.05  # of each writer after each commit: the machine is not to be the bottleneck
SEGMENT_BYTES = 64 * 1024  # the fewest rows a segment can have: about two are sealed each second
IMAGE_SHAPE = (64, 64, 3)
SPEC = StepSpec(
    observation=Spec(
        {"image": ArraySpec(shape=IMAGE_SHAPE, dtype="uint8"), "name": ArraySpec(shape=(3,), dtype="int64")}
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="float32")),
)
_NOISE = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)


def observation(writer: int, episode: int, index: int) -> dict[str, np.ndarray]:
    """What stands in a row, and nowhere else in the store."""
    size = int(np.prod(IMAGE_SHAPE))
    start = (writer * 7919 + episode * 104729 + index * 31) % (len(_NOISE) - size)
    return {"image": _NOISE[start : start + size].reshape(IMAGE_SHAPE), "name": np.array([writer, episode, index])}


def num_steps(writer: int, episode: int) -> int:
    return 1 + (episode * 5 + writer * 3) % 11


# ---- writing


def write(path: Path, seconds: float) -> list[list[float]]:
    """A log of commits: writer, episode, first index, rows, when it was begun and when it had been acknowledged."""
    log: list[list[float]] = []
    with Store.open(path, segment_bytes=SEGMENT_BYTES) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        threads = [
            threading.Thread(target=_write_episodes, args=(store, writer, time.monotonic() + seconds, log))
            for writer in range(NUM_WRITERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return log


def _write_episodes(store: Store, name: int, stop: float, log: list[list[float]]) -> None:
    writer = store.writer(f"writer-{name}", SPEC, commit_steps=COMMIT_STEPS, background=False)
    episode = 0
    while time.monotonic() < stop:
        writer.begin()
        first, length = 0, num_steps(name, episode)
        for index in range(length + 1):
            begun = time.monotonic()
            if index < length:
                action = np.array([name, index], np.float32)
                writer.append(
                    Step(
                        observation=observation(name, episode, index),
                        action=action,
                        reward=float(index),
                        terminated=index == length - 1,
                    )
                )
            else:
                writer.end(observation(name, episode, index))
            if writer.num_uncommitted == 0:
                log.append([name, episode, first, index + 1 - first, begun, time.monotonic()])
                first = index + 1
                time.sleep(PAUSE_S)
        episode += 1


# ---- reading


def read(path: Path, done: Path) -> dict[str, list]:
    """What was seen: writer, episode, first index, rows and when; and all that should not have been."""
    seen: list[list[float]] = []
    wrong: list[str] = []
    with Reader(path) as reader:
        print("ready", flush=True)
        while True:
            finished = done.exists()  # before the look: what was committed by then is in it
            before = reader.commit
            changes = reader.follow(timeout_s=0.1)
            for span in changes.spans:
                if not before < span["commit_id"] <= changes.commit:
                    wrong.append(f"commit {span['commit_id']} told between {before} and {changes.commit}")
                try:
                    rows = reader.read_span(span)
                except DamageError as error:
                    wrong.append(str(error))
                    continue
                now = time.monotonic()
                writer, episode, first = (int(x) for x in rows["observation/name"][0])
                wrong.extend(_wrong_rows(rows, writer, episode, first, int(span["num_rows"])))
                seen.append([writer, episode, first, int(span["num_rows"]), now])
            if finished and not changes:
                return {"seen": seen, "wrong": wrong}


def _wrong_rows(rows: dict, writer: int, episode: int, first: int, num_rows: int) -> list[str]:
    wrong = []
    for row, index in enumerate(range(first, first + num_rows)):
        wanted = observation(writer, episode, index)
        is_step = index < num_steps(writer, episode)
        good = (
            np.array_equal(rows["observation/image"][row], wanted["image"])
            and np.array_equal(rows["observation/name"][row], wanted["name"])
            and np.array_equal(rows["action"][row], [writer, index] if is_step else [0, 0])
            and rows["is_step"][row] == is_step
            and rows["row/index"][row] == index
        )
        if not good:
            wrong.append(f"writer {writer}, episode {episode}, index {index}: not what was written")
    return wrong


def main() -> None:
    role, path, result, last = sys.argv[1], *map(Path, sys.argv[2:5])
    found = write(path, float(str(last))) if role == "write" else read(path, last)
    part = result.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(result)


if __name__ == "__main__":
    main()
