"""Long help: of a command with hundreds of options, `--help` prints the first of them and a line for each other group.

`--help GROUP` prints the options of one group and `--help-all` those of all, as tyro writes them.
"""

from __future__ import annotations

import codecs
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import TextIO

LONG = 100  # lines of help that are printed whole
ALL = "--help-all"
_TITLE = re.compile(r"╭─+ (\S+) options ─*╮")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def print_long_help(command: Callable[[Sequence[str]], object], prog: str, args: Sequence[str]) -> None:
    """If `args` ask for help, print what they ask for of the help that `command` prints, and exit."""
    own = list(args[: args.index("--")]) if "--" in args else list(args)
    asked = next((at for at, word in enumerate(own) if word in ("-h", "--help", ALL)), None)
    if asked is None:
        return
    printed = _Captured(sys.stdout)
    with redirect_stdout(printed):
        try:
            command([*own[:asked], "--help"])
        except SystemExit as end:
            if end.code:  # what comes before it is wrong, which tyro has said
                raise
    text, group = printed.text, own[asked + 1] if own[asked + 1 :] else ""
    boxes = _boxes(text)
    names = {name.partition(".")[0] for name in boxes}
    if group in names:
        text = "\n".join(box for name, box in boxes.items() if name.partition(".")[0] == group)
    elif own[asked] != ALL and len(text.splitlines()) > LONG and names:
        text = _shortened(text, boxes, prog)
    print(text)
    raise SystemExit(0)


class _Captured(io.TextIOWrapper):
    """Takes text with the colours and frames that `stdout` would get."""

    def __init__(self, stdout: TextIO):
        super().__init__(io.BytesIO(), encoding=codecs.lookup(stdout.encoding or "utf-8").name)
        self.isatty = stdout.isatty  # type: ignore[method-assign]

    @property
    def text(self) -> str:
        self.seek(0)
        return self.read().rstrip("\n")


def _boxes(text: str) -> dict[str, str]:
    """The framed groups of options by name, such as `engine`; not the command's own, and none without frames."""
    boxes: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        plain = _COLOUR.sub("", line)
        if found := _TITLE.match(plain):
            name = found[1]
        if name:
            boxes.setdefault(name, []).append(line)
        if plain.startswith("╰"):
            name = ""
    return {name: "\n".join(lines) for name, lines in boxes.items()}


def _shortened(text: str, boxes: Mapping[str, str], prog: str) -> str:
    """The help with a line for each group."""
    for box in boxes.values():
        text = text.replace(box, "")
    names = list(dict.fromkeys(name.partition(".")[0] for name in boxes))
    width, columns = max(map(len, names)), min(shutil.get_terminal_size().columns, 120)
    more = f"More options: `{prog} --help GROUP` prints those of one group, `{prog} {ALL}` those of all."
    lines = [text.rstrip("\n"), textwrap.fill(more, columns, break_on_hyphens=False)]
    for name in names:
        about = textwrap.shorten(_about(boxes.get(name, "")), columns - width - 4, placeholder=" ...")
        lines.append(f"  {name:<{width}}  {about}".rstrip())
    return "\n".join(lines)


def _about(box: str) -> str:
    """What a group is, from above the line in its frame."""
    lines = [_COLOUR.sub("", line).strip("│ ") for line in box.splitlines()[1:]]
    rule = next((at for at, line in enumerate(lines) if line.startswith("───")), 0)
    return re.split(r"(?<=\.) ", " ".join(lines[:rule]))[0]
