"""`understudy doctor`: shows what is installed, what is missing, and the command that installs it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

import understudy
from understudy.cli.console import size_text
from understudy.durable.file_system import NETWORK_FILE_SYSTEMS, file_system_type
from understudy.envs.install import has_library, missing_libraries
from understudy.envs.registry import WORLD_REGISTRY, simulators_directory

State: TypeAlias = Literal["good", "missing", "careful", "broken"]

DISTRIBUTION = "understudy-robotics"  # the name on PyPI; `understudy` is another project there

EXTRAS = {
    "train": "training, and `understudy demo`",
    "vla": "vision-language-action policies, OpenVLA, LoRA",
    "remote": "a store over the network: serve, actor, learner",
    "web": "web pages to drive a robot and to watch runs",
    "plot": "figures, and videos of episodes",
    "cameras": "encoded camera frames: H.264, JPEG and PNG",
    "formats": "import and export of RLDS, LeRobot, robomimic, Minari, MCAP and ROS 2 bags",
    "gym": "Gymnasium's environments",
    "robot": "an arm's server, and a simulated arm",
    "spacemouse": "demonstrating with a SpaceMouse",
    "cluster": "training on many machines with Ray",
}
FREE_BYTES = 5 * 10**9
OPEN_FILES = 1024
TORCH_S = 180.0  # its first import compiles thousands of files, perhaps on a busy machine
GPU_S = 600.0  # for all GPUs: each takes seconds, and what it computes on the CPU for comparison some more
GPU_CHECK = "understudy.training.gpu_estimate.gpu_check"
TORCH = (
    "import json, torch; n = torch.cuda.device_count(); "
    "print(json.dumps([torch.__version__, torch.get_num_threads(), [torch.cuda.get_device_name(i) for i in range(n)]]))"
)
MARKS: dict[State, tuple[str, str]] = {
    "good": ("✓", "green"),
    "missing": ("-", "bright_black"),
    "careful": ("!", "yellow"),
    "broken": ("✗", "bold red"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    part: str  # python, extras, worlds, this machine; with --gpu: GPUs, cuda:0
    name: str
    state: State  # missing: optional; careful: works, but may fail later
    found: str
    remedy: str = ""  # a command, or a sentence


def command(*, gpu: bool = False, as_json: Annotated[bool, tyro.conf.arg(name="json")] = False) -> int:
    """Show what is installed, what is missing and how to install it; changes nothing, and uses no network.

    The exit code is 1 if something that is installed is broken; a missing optional part is no error.

    Args:
        gpu: Also test the GPUs that torch sees: numbers, attention kernels, speed, NCCL, and an update of a small
            VLA with its peak memory. Takes about a minute, and needs a gigabyte or two on each GPU.
        as_json: Print JSON instead of tables, for a bug report.
    """
    with _importing_torch() as torch:
        findings = [*_python(), *_torch(torch), *_extras(), *_worlds(), *_machine()]
    if gpu and not any(finding.name == "torch" and finding.state == "broken" for finding in findings):
        findings += _gpus()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    return 1 if any(finding.state == "broken" for finding in findings) else 0


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False)
    for part in dict.fromkeys(finding.part for finding in findings):
        console.print(f"[bold]{part}[/]")
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2, justify="right")
        table.add_column(no_wrap=True, min_width=12)
        table.add_column()
        for finding in (finding for finding in findings if finding.part == part):
            mark, colour = MARKS[finding.state]
            text = Text(finding.found, style="dim" if finding.state == "missing" else "")
            if finding.remedy:
                text.append(f"\n{finding.remedy}", style="cyan")
            table.add_row(Text(mark, style=colour), finding.name, text)
        console.print(table)
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if broken:
        console.print(f"\nbroken: {', '.join(broken)}", style="bold red")
    elif any(finding.name == "train" and finding.state == "good" for finding in findings):
        console.print("\neverything that is installed works; try `understudy demo`", style="green")
    else:
        console.print("\neverything that is installed works", style="green")


# ---- checks


def _python() -> Iterator[Finding]:
    fits = (3, 11) <= sys.version_info[:2] < (3, 15)
    yield Finding(
        part="python",
        name="python",
        state="good" if fits else "careful",
        found=f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}",
        remedy="" if fits else "Understudy is tested with Python 3.11 to 3.14",
    )
    directory = Path(understudy.__file__).parent
    yield Finding(part="python", name="understudy", state="good", found=f"{understudy.__version__} at {directory}")
    packages = ("numpy", "safetensors", "xxhash", "tyro", "rich")
    found = ", ".join(f"{name} {_version(name)}" for name in packages)
    yield Finding(part="python", name="needs", state="good", found=f"{found}, SQLite {sqlite3.sqlite_version}")


class _importing_torch:  # noqa: N801  # read as a verb
    """Imports torch in a subprocess during the other checks; None if it is not installed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> subprocess.Popen[str] | None:
        if importlib.util.find_spec("torch") is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", TORCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        return self._process

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _torch(process: subprocess.Popen[str] | None) -> Iterator[Finding]:
    if process is None:
        return  # reported with the extra `train`
    again = f"{sys.executable} -m pip install --force-reinstall torch"
    try:
        out, error = process.communicate(timeout=TORCH_S)
    except subprocess.TimeoutExpired:
        yield Finding(
            part="python", name="torch", state="broken", found=f"not imported after {TORCH_S:g} s", remedy=again
        )
        return
    if process.returncode != 0:
        last = (error.strip().splitlines() or [f"ended with {process.returncode}"])[-1]
        yield Finding(part="python", name="torch", state="broken", found=f"cannot be imported: {last}", remedy=again)
        return
    version, threads, cards = json.loads(out)
    where = f"CUDA on {', '.join(cards)}" if cards else "no usable GPU: use --device cpu"
    yield Finding(part="python", name="torch", state="good", found=f"{version}, {threads} threads; {where}")


def _extras() -> Iterator[Finding]:
    """Each extra, by the requirements in the package's metadata."""
    needs: dict[str, list[str]] = {}
    for line in metadata.requires(DISTRIBUTION) or ():
        package, marker = re.match(r"[\w.-]+(\[[\w,-]+\])?", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if package and marker:
            needs.setdefault(marker[1], []).append(package[0])

    def packages(extra: str) -> Iterator[str]:
        """Its packages, with those of other extras that it includes, as in understudy-robotics[web]."""
        for name in needs.get(extra, ()):
            others = re.fullmatch(rf"{DISTRIBUTION}\[(.*)\]", name)
            if others:
                for other in others[1].split(","):
                    yield from packages(other)
            else:
                yield name.partition("[")[0]

    for extra, gives in EXTRAS.items():
        versions = {name: _version(name) for name in packages(extra)}
        lacking = [name for name, version in versions.items() if version is None]
        shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
        yield Finding(
            part="extras",
            name=extra,
            state="missing" if lacking or not versions else "good",
            found=f"{gives}; without {', '.join(lacking)}" if lacking else f"{gives} ({shown})",
            remedy=f"pip install 'understudy-robotics[{extra}]'" if lacking else "",
        )


def _worlds() -> Iterator[Finding]:
    for entry in WORLD_REGISTRY.values():
        if not entry.packages:
            lacking = entry.name == "gym" and _version("gymnasium") is None
            yield Finding(
                part="worlds",
                name=entry.name,
                state="missing" if lacking else "good",
                found=entry.about,
                remedy="pip install 'understudy-robotics[gym]'" if lacking else "",
            )
            continue
        libraries = missing_libraries(entry)
        if libraries:
            state: State = "broken" if entry.ready else "missing"
            remedy = f"apt-get install -y {' '.join(entry.debian)}"
            found = f"{entry.about}; the system lacks {', '.join(libraries)}"
        else:
            state, found = ("good", f"{entry.about}, in {entry.venv}") if entry.ready else ("missing", entry.about)
            remedy = "" if entry.ready else f"understudy env setup {entry.name}"
        yield Finding(part="worlds", name=entry.name, state=state, found=found, remedy=remedy)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(part="this machine", name="cores", state="good", found=f"{cores}, {_memory()}")
    yield _disk(Path.cwd())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= OPEN_FILES or soft == resource.RLIM_INFINITY
    yield Finding(
        part="this machine",
        name="open files",
        state="good" if enough else "careful",
        found=f"at most {soft}",
        remedy="" if enough else f"ulimit -n {min(4096, hard) if hard > 0 else 4096}",
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        found = f"{size_text(shutil.disk_usage(shared).total)} in {shared}"
        yield Finding(part="this machine", name="shared", state="good", found=found)
    screen = has_library("libEGL.so.1")
    yield Finding(
        part="this machine",
        name="graphics",
        state="good" if screen else "missing",
        found="EGL renders without a display" if screen else "no EGL; MuJoCo's cameras need it, the toy world does not",
        remedy="" if screen else f"apt-get install -y {' '.join(WORLD_REGISTRY['metaworld'].debian)}",
    )
    directory = simulators_directory()
    if not os.access(directory if directory.exists() else directory.parent, os.W_OK) and directory.parent.exists():
        yield Finding(
            part="this machine",
            name="home",
            state="careful",
            found=f"{directory} cannot be written",
            remedy="export UNDERSTUDY_HOME=/where/simulators/may/go",
        )


def _gpus() -> Iterator[Finding]:
    """The rows of the GPU check, which runs in a process of its own: a fault on a GPU may end that."""
    if importlib.util.find_spec("torch") is None:
        remedy = "pip install 'understudy-robotics[train]'"
        yield Finding(part="GPUs", name="devices", state="missing", found="torch is not installed", remedy=remedy)
        return
    with tempfile.TemporaryDirectory() as place:
        out, said = Path(place) / "rows", Path(place) / "said"
        with said.open("wb") as file:
            try:
                code: int | None = subprocess.run(
                    [sys.executable, "-m", GPU_CHECK, str(out)], stdout=file, stderr=file, timeout=GPU_S, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        if out.exists():
            yield from (Finding(**json.loads(line)) for line in out.read_text().splitlines())
        if code != 0:
            last = (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            ended = f"did not end within {GPU_S:g} s" if code is None else f"ended with {code}"
            yield Finding(
                part="GPUs",
                name="check",
                state="broken",
                found=f"the check {ended} after the last row above: {last}",
                remedy=f"CUDA_LAUNCH_BLOCKING=1 {sys.executable} -m {GPU_CHECK} /dev/stdout",
            )


def _disk(here: Path) -> Finding:
    kind, free = file_system_type(here) or "unknown", shutil.disk_usage(here).free
    found = f"{size_text(free)} free in {here} ({kind})"
    state: State = "good"
    remedy = ""
    if kind in NETWORK_FILE_SYSTEMS:
        state, remedy = "careful", "a store cannot be on a network file system: work on a local disk"
    elif not os.access(here, os.W_OK):
        state, remedy = "careful", "this directory cannot be written: work in another"
    elif free < FREE_BYTES:
        state, remedy = "careful", "a store with cameras grows by some gigabytes an hour: free some space"
    return Finding(part="this machine", name="disk", state=state, found=found, remedy=remedy)


def _memory() -> str:
    try:
        return f"{size_text(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))} of memory"
    except (ValueError, OSError):
        return "memory unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
