"""Builds the shim, and loads it before torch.

It is a development tool: torch's headers that it uses are no stable interface. It was written for torch 2.13, and a
torch that has changed them makes `load` say so.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")
WRITTEN_FOR = "2.13"


def problem() -> str | None:
    """Why the shim cannot be used here; None if it can."""
    if sys.platform != "linux":
        return f"the shim needs Linux, and this is {sys.platform}"
    if shutil.which("c++") is None:
        return "the shim needs a C++ compiler (c++); on Debian: apt-get install g++"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "the shim needs a build of torch without CUDA, and this one has it: docs/quickstart.md, CPU build"
    return None


def load() -> None:
    """Make torch, which must not be imported yet, believe that it was built for CUDA."""
    assert "torch" not in sys.modules, "call it before the first import of torch"
    if (why := problem()) is not None:
        raise RuntimeError(why)
    torch = _torch()
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_built(torch)), ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _built(torch: Path) -> Path:
    """The library, compiled once for each version of torch and of the source."""
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(f"{version} {torch}\n{SOURCE.read_text()}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"understudy-fake-cuda-{os.getuid()}" / f"shim-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(mode=0o700, exist_ok=True)
    new = library.with_suffix(f".{os.getpid()}")
    flags = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w", f"-I{torch / 'include'}"]
    flags += [
        f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-L{torch / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    ]
    made = subprocess.run(["c++", str(SOURCE), "-o", str(new), *flags], check=False, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(
            f"{SOURCE}: written for torch {WRITTEN_FOR}, does not compile with {version}; adapt it:\n{made.stderr}"
        )
    new.rename(library)
    return library
