"""GPU check: whether torch computes right on each device, how fast, and what a learner's update takes.

    python -m understudy.training.gpu_estimate.gpu_check OUT     # `understudy doctor --gpu` runs it and reads OUT

It runs in a process of its own, because a fault on a GPU can end the process. Each row is one line of JSON in OUT and
is written as soon as it is known, so what was found before a fault is there. Every check takes a device and also runs
on a CPU, where it is tested.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from understudy.core import UnderstudyError
from understudy.policies.vla.config import VLAConfig
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.launch import launch_function
from understudy.training.distributed.ranks import join
from understudy.training.gpu_estimate.duration import LINK_EFFICIENCY, MEMORY_EFFICIENCY, Assumptions
from understudy.training.gpu_estimate.gpus import GIB, Gpu, device_memory, like
from understudy.training.runs.config import ConfigError

State: TypeAlias = Literal["good", "missing", "careful", "broken"]
Precision: TypeAlias = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")

# The norm of a difference, as a share of the norm of what is right. Inputs are rounded first, so that bfloat16 rounds
# its results alone; TF32 rounds its inputs too and is at some 1e-4.
MATMUL_TOLERANCE: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 1e-2}
ATTENTION_TOLERANCE: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 3e-2}  # of its gradient too
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
FREE_SHARE = 0.9  # of a GPU's memory that is free if nobody else uses it
MORE_MEMORY = 1.1  # an update that takes more than this times its estimate is worth a report
REPORT = "attach this output to a report"
REPEATED = 20  # times that something is done to measure it


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one check, with the fields of a finding of `understudy doctor`."""

    part: str
    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention as a policy asks for it."""

    name: str
    heads: int
    size: int  # numbers of a head
    tokens: int
    mask: Literal["none", "causal", "padding", "dense"]


ATTENTIONS = (  # of the default small VLA with one camera of 128 pixels, and of OpenVLA 7B with eight actions at once
    Attention(name="vla vision", heads=4, size=24, tokens=256, mask="none"),
    Attention(name="vla language", heads=4, size=32, tokens=115, mask="dense"),
    Attention(name="dinov2", heads=16, size=64, tokens=261, mask="none"),
    Attention(name="siglip", heads=16, size=72, tokens=256, mask="none"),
    Attention(name="llama causal", heads=32, size=128, tokens=294, mask="causal"),
    Attention(name="llama padded", heads=32, size=128, tokens=345, mask="padding"),
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much a device is given to do."""

    matmul_size: int = 8192
    copy_bytes: int = GIB
    attentions: tuple[Attention, ...] = ATTENTIONS
    network: VLAConfig | None = None  # None: that of measured_update
    rows: int = 16


def main(out: Path) -> None:
    """Check all GPUs that torch sees, and write a row as soon as it is known."""
    with out.open("w") as file:
        for row in check_gpus():
            print(json.dumps(asdict(row)), file=file, flush=True)


def check_gpus() -> Iterator[Row]:
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield versions()
    if not num:
        yield no_gpu(
            cuda=torch.version.cuda or torch.version.hip,
            driver=driver_version(),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            error=_cuda_error(),
        )
        return
    for index in range(num):
        yield from check_device(torch.device("cuda", index), Load())
    if num > 1:
        yield check_all_reduce(num, "cuda", num_bytes=GIB // 4, gpu=known_gpu(torch.device("cuda", 0)))


def check_device(device: torch.device, load: Load) -> Iterator[Row]:
    """Every check of one device. One that fails is a row, and the next one goes on."""
    gpu = known_gpu(device)
    if device.type == "cuda":
        yield _guarded(device, "memory", partial(check_memory, device))
        yield _guarded(device, "capability", partial(check_capability, device))
    for precision in PRECISIONS:
        yield _guarded(device, f"{precision} matmul", partial(check_matmul, device, precision))
    for attention in load.attentions:
        for precision in PRECISIONS:
            name = _attention_name(attention, precision)
            yield _guarded(device, name, partial(check_attention, device, attention, precision))
    yield _guarded(device, "TFLOP/s", partial(check_tflops, device, load.matmul_size, gpu))
    yield _guarded(device, "GB/s", partial(check_bandwidth, device, load.copy_bytes, gpu))
    for precision in PRECISIONS:
        yield _guarded(device, f"{precision} update", partial(check_update, device, precision, load))


def _guarded(device: torch.device, name: str, check: Callable[[], Row]) -> Row:
    try:
        return check()
    except (RuntimeError, AssertionError, UnderstudyError) as error:  # torch's, also if memory is short
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        remedy = f"look for other processes with `nvidia-smi`, install a newer torch, else {REPORT}"
        return Row(part=str(device), name=name, state="broken", found=found, remedy=remedy)


# ---- what is there


def versions() -> Row:
    """The versions of torch, of what it was built with, and of the driver."""
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    parts = [f"torch {torch.__version__}"]
    if torch.version.hip:
        parts.append(f"ROCm {torch.version.hip}")
    parts.append(f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA")
    if cudnn.is_available():
        parts.append(f"cuDNN {cudnn.version()}")
    if torch.cuda.is_available() and dist.is_nccl_available():
        parts.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
    parts.append(f"driver {driver_version() or 'not found by nvidia-smi'}")
    return Row(part="GPUs", name="versions", state="good", found=", ".join(parts))


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None if nvidia-smi is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else None


def no_gpu(*, cuda: str | None, driver: str | None, visible: str | None, error: str) -> Row:
    """Why torch sees no GPU, as far as can be known, and what to do."""
    found = "torch sees no GPU"
    if cuda is None:
        found += ": it is a build for CPUs alone"
        remedy = f"{sys.executable} -m pip install --force-reinstall torch (on Linux, PyPI has the build for CUDA)"
        if driver is None:
            remedy += "; nvidia-smi finds no driver either: install that first, if there is a GPU"
    elif driver is None:
        found += f", though it was built for {cuda}; nvidia-smi finds no driver"
        remedy = "install NVIDIA's driver; start a container with `docker run --gpus all`"
    elif visible is not None:
        found += f"; the driver is {driver} and CUDA_VISIBLE_DEVICES is {visible!r}"
        remedy = "unset CUDA_VISIBLE_DEVICES, or name GPUs that `nvidia-smi -L` lists"
    else:
        found += f"; the driver is {driver}, and torch was built for CUDA {cuda}"
        remedy = "a driver older than this CUDA is the usual cause: install a newer one, or a torch for an older CUDA"
    return Row(
        part="GPUs", name="devices", state="missing", found=f"{found} ({error})" if error else found, remedy=remedy
    )


def _cuda_error() -> str:
    """What torch says if CUDA is asked for."""
    cuda: Any = torch.cuda
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return ""


def known_gpu(device: torch.device) -> Gpu | None:
    """The row of the table of `understudy plan`; None for a device that is not in it."""
    try:
        return like(*device_memory(device)) if device.type == "cuda" else None
    except ConfigError:
        return None


def check_memory(device: torch.device) -> Row:
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    alone = free + own >= FREE_SHARE * total
    return Row(
        part=str(device),
        name="memory",
        state="good" if alone else "careful",
        found=f"{torch.cuda.get_device_name(device)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free",
        remedy="" if alone else "another process uses this GPU: see `nvidia-smi`",
    )


def check_capability(device: torch.device) -> Row:
    return capability_row(str(device), torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())


def capability_row(part: str, capability: tuple[int, int], built_for: list[str]) -> Row:
    """Whether torch has kernels for a GPU: of the same major version, and a minor that is not higher; and bfloat16."""
    major, minor = capability
    numbers = [int(number) for number in re.findall(r"\bsm_(\d+)", " ".join(built_for))]
    fits = not numbers or any(number // 10 == major and number % 10 <= minor for number in numbers)
    found, remedy = f"{major}.{minor}", ""
    state: State = "good"
    if not fits:
        state, remedy = "careful", "install a torch that is built for this GPU"
        found += f"; this torch has kernels for {', '.join(built_for)}"
    elif major < 8:
        state, remedy = "careful", "use --engine.precision float32: GPUs before 8.0 have no bfloat16 of their own"
    return Row(part=part, name="capability", state=state, found=found, remedy=remedy)


# ---- right numbers


def check_matmul(device: torch.device, precision: Precision) -> Row:
    """A matrix product against the CPU's in float64."""
    dtype = getattr(torch, precision)
    left, right = (_random((512, 512), seed).to(dtype) for seed in (0, 1))
    error = _error((left.to(device) @ right.to(device)).cpu(), left.double() @ right.double())
    return matmul_row(str(device), precision, error)


def matmul_row(part: str, precision: Precision, error: float) -> Row:
    """A float32 product that is as wrong as TF32 is no fault of the GPU: something has asked for TF32."""
    limit = MATMUL_TOLERANCE[precision]
    state: State = "good" if error <= limit else "broken"
    remedy = "" if error <= limit else f"install a newer torch or driver, else {REPORT}"
    if precision == "float32" and limit < error < 1e-2:
        state = "careful"
        remedy = "TF32 rounds so: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE for exact float32"
    found = f"relative error {error:.1e}, at most {limit:g}"
    return Row(part=part, name=f"{precision} matmul", state=state, found=found, remedy=remedy)


def check_attention(device: torch.device, attention: Attention, precision: Precision) -> Row:
    """Each kernel by itself, forward and backward, against the CPU's in float64."""
    works: list[str] = []
    wrong: list[str] = []
    refused: dict[str, str] = {}
    expected = _expected(attention, precision)
    for name, kernel in KERNELS.items():
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = _attend(attention, device, getattr(torch, precision), precision, kernel)
        except RuntimeError as error:
            reasons = [str(one.message) for one in said] or [str(error)]
            refused[name] = next((one for one in reasons if "xpected" in one), reasons[0]).partition(" (Trig")[0]
            continue
        worst = max(_error(one, other) for one, other in zip(found, expected, strict=True))
        if worst <= ATTENTION_TOLERANCE[precision]:
            works.append(name)
        else:
            wrong.append(f"{name} (relative error {worst:.1e})")
    return attention_row(str(device), _attention_name(attention, precision), works, wrong, refused)


def attention_row(part: str, name: str, works: list[str], wrong: list[str], refused: dict[str, str]) -> Row:
    fused = [one for one in works if one != "math"]
    state: State = "good" if fused else "careful"
    remedy = "" if fused else "understudy plan assumes another kernel than math: use a smaller micro batch than it says"
    found = f"attention by {', '.join(works) or 'no kernel'}"
    if wrong:
        found += f"; wrong numbers: {', '.join(wrong)}"
    if not fused:
        found += "".join(f"; {kernel}: {reason[:120]}" for kernel, reason in refused.items())
    if wrong or not works:
        state, remedy = "broken", f"install a newer torch or driver, else {REPORT}"
    return Row(part=part, name=name, state=state, found=found, remedy=remedy)


def _attention_name(attention: Attention, precision: Precision) -> str:
    return f"{attention.name} {precision}"


@cache
def _expected(attention: Attention, precision: Precision) -> list[Tensor]:
    return _attend(attention, torch.device("cpu"), torch.float64, precision, SDPBackend.MATH)


def _attend(
    attention: Attention, device: torch.device, dtype: torch.dtype, rounded: Precision, kernel: SDPBackend
) -> list[Tensor]:
    """The result and the gradients of query, key and value, in float64 on the CPU."""
    rows, tokens = 2, attention.tokens
    shape = (rows, attention.heads, tokens, attention.size)
    given = [_random(shape, seed).to(getattr(torch, rounded)) for seed in range(3)]
    inputs = [one.to(device, dtype).requires_grad_() for one in given]
    mask = None
    if attention.mask == "padding":  # a view of one number for each token, as OpenVLA has it
        visible = torch.arange(tokens, device=device).expand(rows, tokens) < tokens - 8
        mask = visible[:, None, None, :].expand(rows, 1, tokens, tokens)
    elif attention.mask == "dense":
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().repeat(rows, 1, 1, 1)
    query, key, value = inputs
    causal = attention.mask == "causal"
    with sdpa_kernel(kernel):
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        weight = _random(shape, 3).to(device, dtype)
        gradients = torch.autograd.grad((found * weight).sum(), inputs)
    return [one.detach().to("cpu", torch.float64) for one in (found, *gradients)]


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


# ---- speed


def check_tflops(device: torch.device, size: int, gpu: Gpu | None) -> Row:
    reached = {}
    for precision in PRECISIONS:
        left, right = (torch.randn(size, size, device=device).to(getattr(torch, precision)) for _ in range(2))
        reached[precision] = 2 * size**3 / seconds_each(device, partial(torch.matmul, left, right)) / 1e12
    found = f"bfloat16 {reached['bfloat16']:.3g}, float32 {reached['float32']:.3g}"
    expected = None if gpu is None else gpu.tflops
    return speed_row(
        str(device), "TFLOP/s", reached["bfloat16"], expected, Assumptions().efficiency, found, "--speed.tflops"
    )


def check_bandwidth(device: torch.device, num_bytes: int, gpu: Gpu | None) -> Row:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    reached = 2 * num_bytes / seconds_each(device, lambda: target.copy_(source)) / 1e9  # read and written
    expected = None if gpu is None else gpu.bandwidth_gb_s
    found = f"{reached:.0f} from its memory"
    return speed_row(str(device), "GB/s", reached, expected, MEMORY_EFFICIENCY, found, "--speed.bandwidth-gb-s")


def speed_row(
    part: str, name: str, reached: float, expected: float | None, share: float, found: str, option: str
) -> Row:
    """What was reached, beside the table of `understudy plan` and the share of it that plan counts on."""
    if expected is None:
        remedy = f"not in the table of understudy plan: give it {option} {reached:.4g}"
        return Row(part=part, name=name, state="good", found=found, remedy=remedy)
    enough = reached >= share * expected
    return Row(
        part=part,
        name=name,
        state="good" if enough else "careful",
        found=f"{found}; the table says {expected:g}, of which plan counts on {share:.0%}",
        remedy="" if enough else f"see `nvidia-smi -q -d PERFORMANCE,POWER`, or give plan {option} {reached:.4g}",
    )


def seconds_each(device: torch.device, run: Callable[[], Any]) -> float:
    """How long a call takes, on average over some, after a first one."""
    run()
    _wait(device)
    start_s = time.perf_counter()
    for _ in range(REPEATED):
        run()
    _wait(device)
    return (time.perf_counter() - start_s) / REPEATED


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- many GPUs


def check_all_reduce(num: int, device: str, *, num_bytes: int, gpu: Gpu | None) -> Row:
    """All ranks of a real process group, one on each GPU, sum a tensor: over NCCL, or over gloo on the CPU."""
    name = f"all-reduce of {num}"
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        function = f"{__package__}.gpu_check:all_reduce"  # by name: here it may be __main__
        try:
            code = launch_function(num, function, grace_s=5.0, device=device, num_bytes=num_bytes, out=str(out))
            failure = f"rank 0 ended with {code}" if code else ""
        except RanksError as error:
            failure = " ".join(str(error).split())
        found = json.loads(out.read_text()) if out.exists() else {}
    failure = found.get("error", failure)
    if failure:
        remedy = "see `NCCL_DEBUG=INFO understudy doctor --gpu`; try NCCL_P2P_DISABLE=1; a container needs --ipc=host"
        return Row(part="GPUs", name=name, state="broken", found=failure, remedy=remedy)
    if not found["right"]:
        wrong = f"a sum over {found['backend']} is wrong"
        return Row(part="GPUs", name=name, state="broken", found=wrong, remedy=f"try NCCL_P2P_DISABLE=1, else {REPORT}")
    reached = 2 * (num - 1) / num * num_bytes / found["seconds"] / 1e9  # that each rank sends
    expected = None if gpu is None else gpu.link_gb_s
    text = f"right over {found['backend']}, {reached:.2f} GB/s each way"
    return speed_row("GPUs", name, reached, expected, LINK_EFFICIENCY, text, "--speed.link-gb-s")


def all_reduce(device: str, num_bytes: int, out: str) -> None:
    """One rank of `check_all_reduce`; rank 0 writes what it found, or why it failed."""
    try:
        with join(device=device, timeout_s=60.0, join_s=120.0) as ranks:
            value = torch.full((num_bytes // 4,), ranks.rank + 1.0, device=ranks.device)
            dist.all_reduce(value)
            right = bool((value == ranks.size * (ranks.size + 1) / 2).all())
            seconds = seconds_each(ranks.device, lambda: dist.all_reduce(value))
            everywhere = ranks.gather_json(right, name="right")
            found = {"right": all(everywhere), "seconds": seconds, "backend": dist.get_backend()}
    except (RuntimeError, UnderstudyError) as error:
        found = {"error": str(error).strip().partition("\n")[0]}
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    if "error" in found:
        raise RanksError(str(found["error"]))


# ---- a learner's update


def check_update(device: torch.device, precision: Precision, load: Load) -> Row:
    """An update of the small VLA by its own learner, and its peak memory beside that of `understudy plan`."""
    name = f"{precision} update"
    try:
        from understudy.training.gpu_estimate.measured_update import NETWORK, estimated_bytes, measure_update
    except ImportError as error:
        remedy = "pip install 'understudy-robotics[vla]'"
        return Row(part=str(device), name=name, state="missing", found=f"not tried: {error}", remedy=remedy)
    network = load.network or NETWORK
    measured = measure_update(device, precision, network=network, rows=load.rows)
    estimated = estimated_bytes(precision, network=network, rows=load.rows)
    return update_row(str(device), name, measured.peak_bytes, estimated, measured.seconds, measured.metrics["gradient"])


def update_row(part: str, name: str, peak: int, estimated: int, seconds: float, gradient: float) -> Row:
    more = peak > MORE_MEMORY * estimated
    found = f"peak {peak / 1e6:,.1f} MB, understudy plan says {estimated / 1e6:,.1f} ({estimated / peak:.3f} of it); "
    return Row(
        part=part,
        name=name,
        state="careful" if more else "good",
        found=f"{found}{seconds * 1000:,.0f} ms, norm of the gradient {gradient:.3g}",
        remedy=f"plan says too little here: leave memory free, and {REPORT}" if more else "",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
