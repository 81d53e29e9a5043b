"""GPUs: what their makers publish of them, and how a machine is named on the command line.

8xA100-80GB    eight of a known kind
A100-80GB      one
8x80GB         eight of another kind, of which the memory is known; options say how fast they are
here           those that torch sees on this machine
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from understudy.core.suggestion import did_you_mean
from understudy.training.runs.config import ConfigError

if TYPE_CHECKING:
    import torch

GIB = 2**30
HERE = "here"
PER_NODE = 8  # GPUs that one machine has at most; those of others are behind the network


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU. Speeds are the highest of its data sheet, dense, without sparsity."""

    name: str
    memory: int  # bytes
    tflops: float  # bfloat16, accumulated in float32
    bandwidth_gb_s: float  # of its memory
    link_gb_s: float  # to the other GPUs of its machine, in one direction: NVLink, or PCIe
    source: str


def _gpu(name: str, gib: float, tflops: float, bandwidth: float, link: float, source: str) -> Gpu:
    return Gpu(name=name, memory=int(gib * GIB), tflops=tflops, bandwidth_gb_s=bandwidth, link_gb_s=link, source=source)


_SHEET = "as NVIDIA publishes them"
KNOWN: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40GB", 40, 312, 1555, 300, f"{_SHEET} (SXM)"),
        _gpu("A100-80GB", 80, 312, 2039, 300, f"{_SHEET} (SXM)"),
        _gpu("A800-80GB", 80, 312, 2039, 200, "as of the A100, with a slower NVLink"),
        _gpu("H100-80GB", 80, 989, 3350, 450, f"{_SHEET} (SXM)"),
        _gpu("H800-80GB", 80, 989, 3350, 200, "as of the H100, with a slower NVLink"),
        _gpu("H200-141GB", 131, 989, 4800, 450, f"{_SHEET} (141 GB are 131 GiB)"),
        _gpu("H20-96GB", 89, 148, 4000, 450, "press reports; NVIDIA published no data sheet (96 GB are 89 GiB)"),
        _gpu("B200-180GB", 167, 2250, 7700, 900, f"{_SHEET} of a DGX B200 (180 GB are 167 GiB)"),
        _gpu("L40S-48GB", 48, 362, 864, 32, _SHEET),
        _gpu("L4-24GB", 24, 121, 300, 32, _SHEET),
        _gpu("A6000-48GB", 48, 155, 768, 32, _SHEET),
        _gpu("RTX4090-24GB", 24, 165, 1008, 32, _SHEET),
        _gpu("RTX3090-24GB", 24, 71, 936, 32, _SHEET),
    )
}


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of a run: as many as it has ranks."""

    num: int
    gpu: Gpu

    def __str__(self) -> str:
        return f"{self.num}x{self.gpu.name}"


@dataclass(frozen=True, kw_only=True)
class GpuSpeed:
    """What is known of a GPU that is not in the table, or is to replace what the table says."""

    tflops: float | None = None
    """Trillions of bfloat16 operations a second, dense, as in the data sheet."""
    bandwidth_gb_s: float | None = None
    """Gigabytes a second from the GPU's memory."""
    link_gb_s: float | None = None
    """Gigabytes a second to the other GPUs of the machine, in one direction."""

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if not value > 0:
                raise ConfigError(f"{name}: expected more than 0, got {value}")

    def given(self) -> dict[str, float]:
        names = ("tflops", "bandwidth_gb_s", "link_gb_s")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def parse_gpus(text: str, speed: GpuSpeed | None = None) -> Gpus:
    """The GPUs that a text such as 8xA100-80GB names; raises ConfigError that names the nearest known kind."""
    given: dict[str, Any] = {} if speed is None else speed.given()
    if text == HERE:
        found = gpus_here()
        return replace(found, gpu=replace(found.gpu, **given)) if given else found
    parts = re.fullmatch(r"(?:(\d+)x)?(.+)", text.strip(), re.IGNORECASE)
    if parts is None or parts[1] == "0":
        raise ConfigError(f"gpus: expected NUMBERxKIND such as 8xA100-80GB, got {text!r}")
    num, name = int(parts[1] or 1), parts[2]
    memory = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB)", name, re.IGNORECASE)
    if memory:
        return Gpus(num=num, gpu=_own(float(memory[1]), given))
    by_name = {known.lower(): gpu for known, gpu in KNOWN.items()}
    gpu = by_name.get(name.lower().replace(" ", ""))
    if gpu is None:
        advice = did_you_mean(name.upper(), KNOWN, f"known are {', '.join(KNOWN)}", cutoff=0.5)
        raise ConfigError(
            f"gpus: {name!r} is not in the table; {advice} For another say its memory, such as {num}x48GB, and "
            f"--speed.tflops, --speed.bandwidth-gb-s and --speed.link-gb-s"
        )
    return Gpus(num=num, gpu=replace(gpu, **given) if given else gpu)


def _own(gib: float, given: dict[str, float]) -> Gpu:
    missing = {"tflops", "bandwidth_gb_s", "link_gb_s"} - given.keys()
    if missing:
        options = ", ".join(f"--speed.{name.replace('_', '-')}" for name in sorted(missing))
        raise ConfigError(f"gpus: a GPU of {gib:g} GB is not one of the table; give {options} from its data sheet")
    return _gpu(f"{gib:g}GB", gib, given["tflops"], given["bandwidth_gb_s"], given["link_gb_s"], "as given")


def gpus_here() -> Gpus:
    """Those that torch sees; raises ConfigError if it sees none."""
    import torch

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num:
        raise ConfigError("gpus: torch sees no GPU on this machine; name those of another, such as --gpus 8xA100-80GB")
    return Gpus(num=num, gpu=like(*device_memory(torch.device("cuda", 0))))


def device_memory(device: torch.device) -> tuple[str, int]:
    """The name that torch has for a GPU, and its bytes."""
    import torch

    return torch.cuda.get_device_name(device), int(torch.cuda.get_device_properties(device).total_memory)


def like(name: str, memory: int) -> Gpu:
    """The GPU that torch calls so, with the speeds of the table; raises ConfigError for one that is not there."""
    words = name.upper().replace("RTX ", "RTX")
    near = [
        gpu
        for gpu in KNOWN.values()
        if re.search(rf"\b{gpu.name.partition('-')[0]}\b", words) and abs(gpu.memory - memory) < 0.15 * gpu.memory
    ]
    if not near:
        raise ConfigError(
            f"gpus: {name!r} with {memory / GIB:.0f} GiB is not in the table; name it by its memory, such as "
            f"--gpus 1x{memory / GIB:.0f}GB, with --speed.tflops, --speed.bandwidth-gb-s and --speed.link-gb-s"
        )
    return replace(near[0], memory=memory)
