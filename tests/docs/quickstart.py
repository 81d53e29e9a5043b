"""The README's code and commands, run one after the other in the current directory; needs only understudy itself.

`python quickstart.py README.md 200` runs them with the installed `understudy`, as `make release` does with a wheel in
an environment without the tools of the tests; `without-torch` as a third argument leaves out what needs torch.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = "3000"  # of the README's training
ELSEWHERE = ("crash-test", "demo", "watch")  # long, or until Ctrl-C; tests/system runs these
NEED_TORCH = ("evaluate", "report", "resume", "train")


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(readme: str, *, steps: str) -> list[list[str]]:
    """The arguments of each `understudy` command that ends by itself; its training takes `steps` steps."""
    lines = [line.partition("#")[0] for block in blocks(readme, "bash") for line in block.splitlines()]
    found = [shlex.split(line)[1:] for line in lines if line.startswith("understudy ")]
    assert len(found) >= 5
    assert sum(STEPS in args for args in found) == 1
    ours = [args for args in found if args[0] not in ELSEWHERE and "browser" not in args]
    return [[steps if word == STEPS else word for word in args] for args in ours]


def run_code(readme: str) -> None:
    """The four blocks of Python, each by itself, as if copied into a file of its own; the last one against a server."""
    from understudy.replay import Store
    from understudy.service import Server, ServerConfig

    first, write, train, deliver = blocks(readme)
    assert len(_run(first)[0]["batch"]) == 256
    assert f"# {_run(write)[1].strip()}" in write  # what the README says is printed
    assert _run(train)[1].startswith("(256, 128, 128, 3) ")
    with Store.open("served") as store, Server(store, ServerConfig(port=0)) as server:
        names, _ = _run(deliver.replace("127.0.0.1:7447", server.address))
    assert len(names["batch"]) == 256
    assert names["version"] == 1


def run_commands(readme: str, run: Callable[[list[str]], int], *, steps: str, torch: bool = True) -> int:
    """Each command through `run`, which answers with the exit code; returns how many there were."""
    wanted = [args for args in commands(readme, steps=steps) if torch or args[0] not in NEED_TORCH]
    for args in wanted:
        answer = run(args)
        assert answer == 0, f"understudy {shlex.join(args)}: expected 0, got {answer}"
    return len(wanted)


def _run(code: str) -> tuple[dict[str, Any], str]:
    """The names that the code leaves, and what it prints."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), names)
    return names, printed.getvalue()


def main(readme: str, steps: str, without_torch: str = "") -> None:
    understudy = Path(sysconfig.get_path("scripts")) / "understudy"

    def run(args: list[str]) -> int:
        print(f"$ understudy {shlex.join(args)}", flush=True)
        return subprocess.run([understudy, *args], check=False).returncode

    text = Path(readme).read_text()
    run_code(text)
    count = run_commands(text, run, steps=steps, torch=not without_torch)
    left_out = f", without {', '.join(NEED_TORCH)}" if without_torch else ""
    print(f"{len(blocks(text))} blocks of Python and {count} commands ran{left_out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
