"""Recording and sampling with three cameras of 480x640: what `append` takes, bytes, quality and CPU time.

    python -m benchmarks.cameras record --seconds 60 --codec h264
    python -m benchmarks.cameras record --seconds 60 --codec h264 --kills 2   # over the network, with a spool
    python -m benchmarks.cameras sample
    python -m benchmarks.cameras resized      # batches of 128x128 out of 480x640
    python -m benchmarks.cameras codecs

The frames are a textured scene that pans, with sensor noise; `--frames DIR` takes `front.npy`, `side.npy` and
`wrist.npy` of a directory instead, [frames, 480, 640, 3] uint8.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from understudy.codecs import decode_frames, encode_frames
from understudy.core import H264, ArraySpec, Jpeg, Png, Spec, Step, StepSpec
from understudy.core.cameras import CodecName, encode_cameras
from understudy.core.resize import Resize, resize_frame
from understudy.replay import EVERYTHING, FrameCache, Reader, Sampler, Store
from understudy.service import connect

CAMERAS = ("front", "side", "wrist")
HZ = 30
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
    speed = 1 if seed == len(CAMERAS) - 1 else 0  # the camera at the wrist moves
    frames = []
    for number in range(num_frames):
        frame = texture[:, number * speed : number * speed + 640]
        noise = rng.normal(0, 1.5, (height, 640, 1)) + rng.normal(0, 0.8, (height, 640, 3))
        frames.append(np.clip(frame + noise, 0, 255).astype(np.uint8))
    return np.stack(frames)


def record(
    *, seconds: float = 60.0, codec: CodecName = "h264", frames: Path | None = None, kills: int | None = None
) -> None:
    """Append steps at 30 Hz and report how long `append` took, beside a process that only copies the frames.

    Args:
        seconds: How long to record.
        codec: How the frames are stored.
        frames: Directory with frames to use instead of the made-up scene.
        kills: Record over the network with a spool, and kill the server so many times.
    """
    pictures = frames_of(frames)
    spec = spec_of(codec)
    num_steps = int(seconds * HZ)
    beside = [sys.executable, "-m", "benchmarks.cameras", "bare", "--seconds", str(seconds)]
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as place,
        subprocess.Popen(beside, stdout=subprocess.PIPE, text=True) as bare_loop,
    ):
        path = Path(place) / "store"
        if kills is None:
            with Store.open(path) as store:
                took_s, cpu_s, late = _append(store.writer("arm", spec, flush_each_episode=False), pictures, num_steps)
        else:
            took_s, cpu_s, late = _record_remotely(path, spec, pictures, num_steps, kills)
        with Reader(path) as reader:
            (recorded,) = reader.episodes()
            _, columns = reader.rows(recorded.id) if num_steps <= 2000 else (None, {})
        lost = num_steps + 1 - recorded.num_rows
        report: dict[str, Any] = {
            "codec": codec,
            "steps": num_steps,
            "rows lost": lost,
            "append ms": _percentiles_ms(took_s),
            "bare copy in another process, ms": json.loads(bare_loop.communicate()[0]),
            "late ticks": late,
            "kB a step": round(recorded.num_bytes / recorded.num_rows / 1e3, 1),
            "CPU ms a step, producer and writer": round(cpu_s / num_steps * 1e3, 1),
        }
        if columns:
            report["PSNR dB"] = {
                name: round(_psnr(columns[f"observation/{name}"], pictures[name]), 2) for name in CAMERAS
            }
    print(json.dumps(report, indent=1))


def _append(writer: Any, pictures: dict[str, Array], num_steps: int) -> tuple[list[float], float, int]:
    """How long each `append` took, the CPU time of the process, and the ticks that began late."""
    took_s, late = [], 0
    writer.begin(task="record")
    cpu_s, start_s = time.process_time(), time.monotonic()
    count = len(pictures["front"])

    def seen(number: int) -> dict[str, Any]:
        at = number % (2 * count)
        at = at if at < count else 2 * count - 1 - at  # back and forth, without a jump
        return {**{name: pictures[name][at] for name in CAMERAS}, "joints": np.full(14, number, np.float32)}

    for number in range(num_steps):
        due_s = start_s + number / HZ
        left_s = due_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        late += left_s < -1 / HZ
        step = Step(
            observation=seen(number),
            action=np.zeros(14, np.float32),
            reward=0.0,
            truncated=number == num_steps - 1,
        )
        before_s = time.monotonic()
        writer.append(step)
        took_s.append(time.monotonic() - before_s)
    writer.end(seen(num_steps))
    writer.flush()
    return took_s, time.process_time() - cpu_s, late


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


def _record_remotely(
    path: Path, spec: StepSpec, pictures: dict[str, Array], num_steps: int, kills: int
) -> tuple[list[float], float, int]:
    port = 7460
    command = [sys.executable, "-m", "understudy", "serve", str(path), "--port", str(port)]
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
        with connect(f"127.0.0.1:{port}") as remote, remote.writer("arm", spec, spool=path.parent / "spool") as writer:
            result = _append(writer, pictures, num_steps)
            assert writer.wait_delivered(120)
    finally:
        over.set()
        killer.join()
        server.terminate()
        server.wait()
    return result


def _psnr(found: Any, pictures: Array) -> float:
    count = len(pictures)
    order = [*range(count), *reversed(range(count))]
    errors = [
        np.mean((found[row].astype(np.float32) - pictures[order[row % (2 * count)]]) ** 2)
        for row in range(0, len(found), 7)
    ]
    return float(np.mean([10 * np.log10(255**2 / max(error, 1e-9)) for error in errors]))


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
    *, steps: int = 1500, batch: int = 256, batches: int = 60, size: int = 128, frames: Path | None = None
) -> None:
    """CPU time of a batch of two small cameras: of a raw store of that size, and of encoded 480x640 with `resize`.

    Args:
        steps: Length of the stores, in steps.
        batch: Transitions in a batch.
        batches: Batches to draw of each store, in turns.
        size: Height and width of the frames of a batch.
        frames: Directory with frames to use instead of the made-up scene.
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
        with ExitStack() as undo:
            for codec in ("jpeg", "h264"):
                spent_s, made = _fill(path / codec, cameras, small, steps)
                print(f"{codec}, cold: {made / spent_s:.0f} frames a CPU second, {spent_s / made * 1e3:.2f} ms each")
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
    raw_s = float(np.median(spent["raw"]))
    for name, times in spent.items():
        median_s, lowest_s = float(np.median(times)), min(times)
        print(
            f"{name:5} warm: {median_s * 1e3:6.1f} CPU ms a batch of {batch}, lowest {lowest_s * 1e3:.1f}; "
            f"{median_s / raw_s:.2f}x raw, lowest {lowest_s / min(spent['raw']):.2f}x"
        )


def _write_steps(path: Path, spec: StepSpec, pictures: dict[str, Array], steps: int) -> None:
    """One episode of these frames, back and forth."""
    with Store.open(path) as store:
        writer = store.writer("arm", spec)
        writer.begin()
        for number in range(steps + 1):
            at = number % (2 * len(next(iter(pictures.values()))))
            seen: dict[str, Any] = {name: found[min(at, 2 * len(found) - 1 - at)] for name, found in pictures.items()}
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
        {"record": record, "bare": bare, "sample": sample, "resized": resized, "codecs": codecs}
    )
