"""Recording and sampling with three cameras of 480x640: what `append` takes, bytes, quality and CPU time.

    python -m benchmarks.cameras record --seconds 60 --codec h264
    python -m benchmarks.cameras record --seconds 60 --codec h264 --kills 2   # over the network, with a spool
    python -m benchmarks.cameras record --seconds 60 --lerobot-python PY   # and lerobot, which PY has
    python -m benchmarks.cameras sample
    python -m benchmarks.cameras resized      # batches of 128x128 out of 480x640; --lerobot-python PY reads too
    python -m benchmarks.cameras codecs
    python -m benchmarks.cameras hour runs/hour   # a store of an hour, to look at with info, watch, film and export
    python -m benchmarks.cameras export-hour runs/hour runs/hour-lerobot --lerobot-python PY

The frames are a textured scene that pans, with sensor noise; `--frames DIR` takes `front.npy`, `side.npy` and
`wrist.npy` of a directory instead, [frames, 480, 640, 3] uint8.
"""

from __future__ import annotations

import io
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from benchmarks.cameras_lerobot import NUM_HOUR_FRAMES, mark, number_in, place_of, psnr

from understudy.codecs import decode_frames, encode_frames
from understudy.core import H264, ArraySpec, Jpeg, Png, Spec, Step, StepSpec
from understudy.core.cameras import CodecName, encode_cameras
from understudy.core.episode import FPS
from understudy.core.resize import Resize, resize_frame
from understudy.replay import EVERYTHING, FrameCache, Reader, Sampler, Store, trim
from understudy.service import OutboxConfig, connect

CAMERAS = ("front", "side", "wrist")
ROOT = Path(__file__).resolve().parent.parent  # where `python -m benchmarks.cameras` finds it
HZ = 30
WAIT = OutboxConfig(block_timeout_s=60.0)  # on a machine that is too busy, say how long `append` took instead of ending
Array = np.ndarray[Any, Any]


def spec_of(codec: CodecName, cameras: Sequence[str] = CAMERAS, size: tuple[int, int] = (480, 640)) -> StepSpec:
    frames = {name: ArraySpec(shape=(*size, 3), dtype="uint8") for name in cameras}
    joints = ArraySpec(shape=(14,), dtype="float32")
    return encode_cameras(StepSpec(observation=Spec({**frames, "joints": joints}), action=Spec(joints)), codec)


def frames_of(directory: Path | None, num_frames: int = 60) -> dict[str, Array]:
    if directory is not None:
        return {name: np.load(directory / f"{name}.npy", mmap_mode="r")[:num_frames].copy() for name in CAMERAS}
    return {name: _scene(num_frames, seed) for seed, name in enumerate(CAMERAS)}


def _scene(num_frames: int, seed: int) -> Array:
    """A texture at several scales that pans by a pixel a frame, with noise as a camera's sensor has."""
    rng = np.random.default_rng(seed)
    height, width = 480, 640 + num_frames
    texture = np.full((height, width, 3), 110.0)
    for scale, strength in ((64, 45), (16, 20), (4, 8)):
        coarse = rng.normal(0, strength, (height // scale + 2, width // scale + 2, 3))
        texture += np.kron(coarse, np.ones((scale, scale, 1)))[:height, :width]
    for axis in (0, 1, 0, 1):  # no lens shows edges as sharp as a pixel
        texture = (np.roll(texture, 1, axis) + texture + np.roll(texture, -1, axis)) / 3
    speed = 1 if seed == len(CAMERAS) - 1 else 0  # the camera at the wrist moves
    frames = []
    for number in range(num_frames):
        frame = texture[:, number * speed : number * speed + 640]
        noise = rng.normal(0, 1.5, (height, 640, 1)) + rng.normal(0, 0.8, (height, 640, 3))
        frames.append(np.clip(frame + noise, 0, 255).astype(np.uint8))
    return np.stack(frames)


@dataclass
class Recording:
    """What it took to record."""

    took_s: list[float]  # each `append`
    cpu_s: float  # producer and writer
    late: int  # ticks that began late
    server_cpu_s: float | None = None


def record(
    *,
    seconds: float = 60.0,
    codec: CodecName = "h264",
    frames: Path | None = None,
    kills: int | None = None,
    lerobot_python: Path | None = None,
    lerobot_seconds: float | None = None,
) -> None:
    """Append steps at 30 Hz and report how long `append` took, beside a process that only copies the frames.

    Args:
        seconds: How long to record.
        codec: How the frames are stored.
        frames: Directory with frames to use instead of the made-up scene.
        kills: Record over the network with a spool, and kill the server so many times.
        lerobot_python: Python of an environment with lerobot, which then records the same frames.
        lerobot_seconds: How long lerobot records in each of its two ways; by default as long as `seconds`.
    """
    pictures = {name: mark(found) for name, found in frames_of(frames).items()}
    spec = spec_of(codec)
    num_steps = int(seconds * HZ)
    beside = [sys.executable, "-m", "benchmarks.cameras", "bare", "--seconds", str(seconds)]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        path = Path(place) / "store"
        with subprocess.Popen(beside, cwd=ROOT, stdout=subprocess.PIPE, text=True) as bare_loop:
            try:
                if kills is None:
                    with Store.open(path) as store:
                        took = _append(store.writer("arm", spec, flush_each_episode=False), pictures, num_steps)
                else:
                    took = _record_remotely(path, spec, pictures, num_steps, kills)
            except BaseException:
                bare_loop.kill()
                raise
            copied = json.loads(bare_loop.communicate()[0])
        report: dict[str, Any] = {
            "codec": codec,
            "steps": num_steps,
            **_found(path, pictures, num_steps),
            "append ms": _percentiles_ms(took.took_s),
            "bare copy in another process, ms": copied,
            "late ticks": took.late,
            "CPU ms a step, producer and writer": round(took.cpu_s / num_steps * 1e3, 1),
        }
        if took.server_cpu_s is not None:
            report["CPU ms a step, server"] = round(took.server_cpu_s / num_steps * 1e3, 1)
        if lerobot_python is not None:
            report["lerobot"] = _lerobot(lerobot_python, Path(place), pictures, "record", lerobot_seconds or seconds)
    print(json.dumps(report, indent=1))


def _found(path: Path, pictures: dict[str, Array], num_steps: int) -> dict[str, Any]:
    """What is in the store: rows, their numbers and, in parts of a long recording, their frames."""
    with Reader(path) as reader:
        (recorded,) = reader.episodes()
        _, stored = reader.stored_rows(recorded.id)
        count = recorded.num_rows
        wanted = np.stack([_seen(pictures, number)["joints"] for number in range(count)])
        quality: dict[str, list[float]] = {name: [] for name in CAMERAS}
        apart = 0
        for first in range(0, count, 100 if count <= 2001 else 1000):
            columns = reader.decode(recorded, stored, first, min(first + 100, count))
            for name in CAMERAS:
                for row, shown in enumerate(columns[f"observation/{name}"], first):
                    wanted_number = place_of(row, len(pictures[name]))
                    apart += number_in(shown) != wanted_number
                    if row % 7 == 0:
                        quality[name].append(psnr(shown, pictures[name][wanted_number]))
    return {
        "rows lost": num_steps + 1 - count,
        "rows with numbers of another": int((stored["observation/joints"] != wanted).any(axis=1).sum()),
        "frames of another": apart,
        "kB a step": round(recorded.num_bytes / count / 1e3, 1),
        "PSNR dB": {name: round(float(np.mean(found)), 2) for name, found in quality.items()},
    }


def _lerobot(python: Path, place: Path, pictures: dict[str, Array], what: str, amount: float) -> dict[str, Any]:
    """What lerobot takes to record or to read the same frames."""
    for name, found in pictures.items():
        np.save(place / f"{name}.npy", found)
    return _run_lerobot(python, what, place, place, amount)


def _run_lerobot(python: Path, what: str, given: Path, place: Path, amount: float) -> dict[str, Any]:
    """The answers of the program that runs in lerobot's environment."""
    out = place / "lerobot"
    out.mkdir()
    program = Path(__file__).with_name("cameras_lerobot.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hf")}
    environment["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    environment.pop("PYTHONPATH", None)
    subprocess.run([python, program, what, given, out, str(amount)], env=environment, check=True)
    answers: dict[str, Any] = json.loads((out / "answers.json").read_text())
    return answers


def _append(writer: Any, pictures: dict[str, Array], num_steps: int) -> Recording:
    took_s, late = [], 0
    writer.begin(task="record")
    cpu_s, start_s = time.process_time(), time.monotonic()
    for number in range(num_steps):
        due_s = start_s + number / HZ
        left_s = due_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        late += left_s < -1 / HZ
        step = Step(
            observation=_seen(pictures, number),
            action=np.zeros(14, np.float32),
            reward=0.0,
            truncated=number == num_steps - 1,
        )
        before_s = time.monotonic()
        writer.append(step)
        took_s.append(time.monotonic() - before_s)
    writer.end(_seen(pictures, num_steps))
    writer.flush()
    return Recording(took_s, time.process_time() - cpu_s, late)


def _seen(pictures: dict[str, Array], number: int) -> dict[str, Any]:
    """The observation of a step."""
    at = place_of(number, len(pictures["front"]))
    joints = np.sin(number / HZ + np.arange(14)).astype(np.float32)
    return {**{name: pictures[name][at] for name in CAMERAS}, "joints": joints}


def hour(store: tyro.conf.Positional[Path], *, minutes: int = 60, episode_s: int = 20) -> None:
    """Make a store of an hour with three cameras: a minute is encoded, and its episodes are stored again and again.

    Args:
        store: Directory of the store, which must not exist.
        minutes: Length of all episodes together.
        episode_s: Length of an episode, in seconds.
    """
    steps = episode_s * HZ
    spent_s = time.process_time()
    with Store.open(store) as opened:
        writer = opened.writer("arm", spec_of("h264"))
        for take in range(60 // episode_s):
            pictures = {name: mark(_scene(NUM_HOUR_FRAMES, 10 * take + seed)) for seed, name in enumerate(CAMERAS)}
            writer.begin(task="pick", instruction="pick up the red block", labels={FPS: str(HZ)}, success=take > 0)
            for number in range(steps + 1):
                seen = _seen(pictures, number)
                if number < steps:
                    ended = {"terminated": take > 0, "truncated": take == 0} if number == steps - 1 else {}
                    writer.append(Step(observation=seen, action=seen["joints"], reward=0.0, **ended))
            writer.end(seen)
        writer.flush()
        with Reader(store) as reader:
            recorded = [record.id for record in reader.episodes()]
        print(
            f"{len(recorded)} episodes of {episode_s} s encoded, {time.process_time() - spent_s:.0f} CPU s", flush=True
        )
        for number in range(len(recorded), minutes * 60 // episode_s):
            trim(opened, recorded[number % len(recorded)], 0, steps - 1)
            if number % 30 == 0:
                print(f"{number} episodes, {time.process_time() - spent_s:.0f} CPU s", flush=True)


def export_hour(
    store: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    *,
    lerobot_python: Path | None = None,
    items: int = 1000,
) -> None:
    """Export the store of an hour to LeRobot's format, and let lerobot read it.

    Args:
        store: Directory of the store that `hour` made.
        out: Directory of the data set, which must not exist.
        lerobot_python: Python of an environment with lerobot, which then reads items in random order.
        items: Number of items that it reads.
    """
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "understudy", "export", str(store), f"lerobot:{out}"], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report: dict[str, Any] = {
        "exported in, s": round(time.monotonic() - start_s),
        "CPU s": round(used.ru_utime + used.ru_stime),
        "memory at most, MB": round(used.ru_maxrss / 1e3),
        "store, MB": round(_num_bytes(store) / 1e6),
        "data set, MB": round(_num_bytes(out) / 1e6),
    }
    if lerobot_python is not None:
        with tempfile.TemporaryDirectory() as place:
            report["lerobot"] = _run_lerobot(lerobot_python, "check", out, Path(place), items)
    print(json.dumps(report, indent=2))


def _num_bytes(directory: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*"))


def bare(*, seconds: float = 60.0) -> None:
    """Copy three frames into memory at 30 Hz and report how long that took: what the machine does to any such loop.

    Args:
        seconds: How long to go on.
    """
    frames = np.ones((3, 480, 640, 3), np.uint8)
    memory = np.zeros((20, *frames.shape), np.uint8)
    memory.fill(0)
    took_s, start_s = [], time.monotonic()
    for number in range(int(seconds * HZ)):
        time.sleep(max(start_s + number / HZ - time.monotonic(), 0.0))
        before_s = time.monotonic()
        memory[number % len(memory)] = frames
        took_s.append(time.monotonic() - before_s)
    print(json.dumps(_percentiles_ms(took_s)))


def _percentiles_ms(times_s: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(times_s, q)) * 1e3, 2) for q in (50, 99, 99.9, 100)}


def _record_remotely(path: Path, spec: StepSpec, pictures: dict[str, Array], num_steps: int, kills: int) -> Recording:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "understudy", "serve", str(path), "--port", str(port)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    over = threading.Event()

    def kill() -> None:
        nonlocal server
        for _ in range(kills):
            if over.wait(num_steps / HZ / (kills + 1)):
                return
            server.kill()
            server.wait()
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with (
            connect(f"127.0.0.1:{port}") as remote,
            remote.writer("arm", spec, spool=path.parent / "spool", config=WAIT) as writer,
        ):
            result = _append(writer, pictures, num_steps)
            assert writer.wait_delivered(120)
    finally:
        over.set()
        killer.join()
        server.terminate()
        server.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # the other process, `bare`, is waited for later
    result.server_cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return result


def _psnr(found: Any, pictures: Array) -> float:
    """The mean over every seventh frame."""
    return float(np.mean([psnr(found[number], pictures[number]) for number in range(0, len(pictures), 7)]))


def sample(*, steps: int = 600, batch: int = 64, batches: int = 20, frames: Path | None = None) -> None:
    """CPU time of a batch of transitions with frames of each codec, and with raw ones.

    Args:
        steps: Length of the store, in steps.
        batch: Transitions in a batch.
        batches: Batches to draw of each store, in turns.
        frames: Directory with frames to use instead of the made-up scene.
    """
    pictures = frames_of(frames)
    codecs: tuple[CodecName, ...] = ("raw", "jpeg", "h264")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        samplers: dict[str, Sampler[Any]] = {}
        for codec in codecs:
            with Store.open(Path(place) / codec) as store:
                writer = store.writer("arm", spec_of(codec))
                writer.begin()
                for number in range(steps):
                    at = number % len(pictures["front"])
                    seen = {**{name: pictures[name][at] for name in CAMERAS}, "joints": np.zeros(14, np.float32)}
                    last = number == steps - 1
                    writer.append(Step(observation=seen, action=np.zeros(14, np.float32), reward=0.0, truncated=last))
                writer.end(seen)
            samplers[codec] = Sampler(Path(place) / codec, EVERYTHING, batch_size=batch, seed=0)
            samplers[codec].follow()
        spent: dict[str, list[float]] = {codec: [] for codec in codecs}
        for _ in range(batches):
            for codec, sampler in samplers.items():
                before_s = time.process_time()
                sampler.sample()
                spent[codec].append(time.process_time() - before_s)
        for sampler in samplers.values():
            sampler.close()
    raw_s = float(np.median(spent["raw"]))
    for codec, times in spent.items():
        median_s = float(np.median(times))
        frame_ms = median_s / (batch * 2 * len(CAMERAS)) * 1e3
        print(f"{codec:5} {median_s * 1e3:8.1f} CPU ms a batch  {frame_ms:6.2f} a frame  {median_s / raw_s:6.2f}x raw")


def resized(
    *,
    steps: int = 1500,
    batch: int = 256,
    batches: int = 60,
    size: int = 128,
    frames: Path | None = None,
    lerobot_python: Path | None = None,
) -> None:
    """CPU time of a batch of two small cameras: of a raw store of that size, and of encoded 480x640 with `resize`.

    Cold is the first transition of each step: its frames are decoded, resized and kept, then it is drawn.

    Args:
        steps: Length of the stores, in steps.
        batch: Transitions in a batch.
        batches: Batches to draw of each store, in turns.
        size: Height and width of the frames of a batch.
        frames: Directory with frames to use instead of the made-up scene.
        lerobot_python: Python of an environment with lerobot, which then records the same frames and reads transitions.
    """
    cameras, small = CAMERAS[::2], Resize((size, size))
    pictures = {name: found for name, found in frames_of(frames).items() if name in cameras}
    smaller = {name: np.stack([resize_frame(frame, small) for frame in found]) for name, found in pictures.items()}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        path = Path(place)
        _write_steps(path / "raw", spec_of("raw", cameras, (size, size)), smaller, steps)
        for codec in ("h264", "jpeg"):
            _write_steps(path / codec, spec_of(codec, cameras), pictures, steps)
        options: dict[str, Any] = {"batch_size": batch, "seed": 0}
        asked: dict[str, Any] = {**options, "resize": small, "frame_cache": FrameCache(num_threads=0)}
        filled_s: dict[str, float] = {}
        with ExitStack() as undo:
            for codec in ("jpeg", "h264"):
                filled_s[codec], made = _fill(path / codec, cameras, small, steps)
                each_s = filled_s[codec] / made
                print(f"{codec}, cold: {1 / each_s:.0f} frames a CPU second, {each_s * 1e3:.2f} ms each")
            samplers: dict[str, Sampler[Any]] = {
                "raw": undo.enter_context(Sampler(path / "raw", EVERYTHING, **options)),
                "h264": undo.enter_context(Sampler(path / "h264", EVERYTHING, **asked)),
                "jpeg": undo.enter_context(Sampler(path / "jpeg", EVERYTHING, **asked)),
            }
            memory = {}
            for name, sampler in samplers.items():
                sampler.follow()
                memory[name] = sampler.make()
            spent: dict[str, list[float]] = {name: [] for name in samplers}
            for number in range(batches + 10):
                for name, sampler in list(samplers.items())[:: 1 if number % 2 else -1]:
                    before_s = time.process_time()
                    sampler.sample(memory[name])
                    if number >= 10:  # each frame was drawn before
                        spent[name].append(time.process_time() - before_s)
        theirs = {} if lerobot_python is None else _lerobot(lerobot_python, path, pictures, "read", steps)
    raw_s = float(np.median(spent["raw"]))
    for name, times in spent.items():
        median_s, lowest_s = float(np.median(times)), min(times)
        print(
            f"{name:5} warm: {median_s * 1e3:6.1f} CPU ms a batch of {batch}, lowest {lowest_s * 1e3:.1f}; "
            f"{median_s / raw_s:.2f}x raw, lowest {lowest_s / min(spent['raw']):.2f}x"
        )
    for name, fill_s in filled_s.items():
        cold_ms = (fill_s / steps + float(np.median(spent[name])) / batch) * 1e3
        beside = "".join(f"; lerobot's {what} {ms}, {ms / cold_ms:.1f}x" for what, ms in theirs.items())
        print(f"{name:5} cold: {cold_ms:6.2f} CPU ms a transition{beside}")


def _write_steps(path: Path, spec: StepSpec, pictures: dict[str, Array], steps: int) -> None:
    """One episode of these frames, back and forth."""
    with Store.open(path) as store:
        writer = store.writer("arm", spec)
        writer.begin()
        for number in range(steps + 1):
            seen: dict[str, Any] = {name: found[place_of(number, len(found))] for name, found in pictures.items()}
            seen["joints"] = np.zeros(14, np.float32)
            if number < steps:
                last = number == steps - 1
                writer.append(Step(observation=seen, action=np.zeros(14, np.float32), reward=0.0, truncated=last))
        writer.end(seen)


def _fill(path: Path, cameras: Sequence[str], small: Resize, steps: int) -> tuple[float, int]:
    """Let a sampler fill the cache in the background; the CPU time of the process, and the frames that were made."""
    before_s = time.process_time()
    with Sampler(path, EVERYTHING, batch_size=1, resize=small, frame_cache=FrameCache(num_threads=2)) as sampler:
        sampler.follow()
        assert sampler.wait_for_frames(600)
    return time.process_time() - before_s, (steps + 1) * len(cameras)


def codecs(*, frames: Path | None = None) -> None:
    """Bytes, CPU time and PSNR of each codec, beside AV1 as LeRobot 0.6 writes it (g 2, crf 30, preset 12).

    Args:
        frames: Directory with frames to use instead of the made-up scene.
    """
    print("codec            camera      kB  encode ms  decode ms   PSNR dB")
    for camera, pictures in frames_of(frames).items():
        for codec in (H264(), H264(crf=23), Jpeg(), Png()):
            groups = [pictures[first : first + codec.gop_size] for first in range(0, len(pictures), codec.gop_size)]
            before_s = time.process_time()
            encoded = [encode_frames(codec, group) for group in groups]
            encode_s, before_s = time.process_time() - before_s, time.process_time()
            decoded = [
                frame
                for group in encoded
                for frame in decode_frames(
                    codec, (480, 640, 3), np.dtype("uint8"), group.packets, group.checksums, range(len(group.packets))
                )
            ]
            decode_s = time.process_time() - before_s
            size = sum(len(packet) for group in encoded for packet in group.packets)
            _row(str(codec), camera, size, encode_s, decode_s, np.stack(decoded), pictures)
        size, encode_s, decode_s, found = _av1(pictures)
        _row("AV1", camera, size, encode_s, decode_s, found, pictures)


def _row(name: str, camera: str, size: int, encode_s: float, decode_s: float, found: Array, pictures: Array) -> None:
    count = len(pictures)
    quality = _psnr(found, pictures)
    print(
        f"{name:16.16} {camera:6} {size / count / 1e3:7.1f} {encode_s / count * 1e3:10.1f} "
        f"{decode_s / count * 1e3:10.1f} {quality:9.2f}"
    )


def _av1(pictures: Array) -> tuple[int, float, float, Array]:
    import av

    os.environ["SVT_LOG"] = "1"  # errors only
    file = io.BytesIO()
    before_s = time.process_time()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libsvtav1", rate=HZ, options={"g": "2", "crf": "30", "preset": "12"})
        stream.width, stream.height, stream.pix_fmt = 640, 480, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode(None))
    encode_s, before_s = time.process_time() - before_s, time.process_time()
    file.seek(0)
    with av.open(file) as container:
        found = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return len(file.getvalue()), encode_s, time.process_time() - before_s, found


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {
            "record": record,
            "bare": bare,
            "sample": sample,
            "resized": resized,
            "codecs": codecs,
            "hour": hour,
            "export-hour": export_hour,
        }
    )
