"""Finds the files of a path and reads their transitions in order.

    demo_data/*.pkl                 demonstrations; `infos` mark the steps of a human
    run/buffer/transitions_*.pkl    all online transitions, about 1,000 per file
    run/demo_buffer/*.pkl           the human ones among them, a second time

A run is read from `buffer`; a transition that is also in the file of the same name in `demo_buffer` is a human one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from understudy.core import tree as trees
from understudy.formats.format import FormatError
from understudy.formats.natural_sort import natural
from understudy.formats.safe_pickle import load_items

FIELDS = ("observations", "actions", "next_observations", "rewards", "masks", "dones")
Role = Literal["demonstration", "buffer", "demo_buffer"]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """One HIL-SERL transition, flattened, and where it was read."""

    where: str  # "transitions_1000.pkl#37"
    fields: dict[str, Any]  # "observations/state", "actions", "infos/succeed", ...
    human: bool = False  # it is also in demo_buffer


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a path."""

    root: Path
    paths: tuple[Path, ...]
    role: Role
    human: Mapping[Path, Path] = field(default_factory=dict)  # by file of `buffer`: the file of `demo_buffer`

    def transitions(self) -> Iterator[Transition]:
        for path in self.paths:
            name = path.relative_to(self.root).as_posix()
            matcher = _HumanMatcher(self.human.get(path))
            for index, fields in enumerate(_flat_items(path)):
                yield Transition(where=f"{name}#{index}", fields=fields, human=matcher.match(fields))
            matcher.finish(path)


def find_files(path: Path) -> Files:
    if path.is_file():
        return Files(root=path.parent, paths=(path,), role=_role(path.parent))
    if not path.is_dir():
        raise FormatError(f"{path}: does not exist; give a .pkl file, a directory of them, or a run with buffer/ in it")
    if (path / "buffer").is_dir():
        paths = _sorted(path / "buffer")
        human = {file: path / "demo_buffer" / file.name for file in paths}
        if paths:
            return Files(root=path, paths=paths, role="buffer", human={a: b for a, b in human.items() if b.is_file()})
    paths = _sorted(path)
    if not paths:
        raise FormatError(f"{path}: holds no .pkl files; give the directory in which demo_data or buffer keeps them")
    return Files(root=path, paths=paths, role=_role(path))


def _role(folder: Path) -> Role:
    if folder.name == "demo_buffer":
        return "demo_buffer"
    return "buffer" if folder.name == "buffer" else "demonstration"


def _sorted(folder: Path) -> tuple[Path, ...]:
    """The .pkl files in natural order: transitions_2000 before transitions_10000."""
    return tuple(sorted((path for path in folder.glob("*.pkl") if path.is_file()), key=lambda path: natural(path.name)))


def _flat_items(path: Path) -> Iterator[dict[str, Any]]:
    for index, item in enumerate(load_items(path)):
        if not isinstance(item, dict):
            raise FormatError(f"{path}: item {index}: expected a transition (a dict), got a {type(item).__name__}")
        for name in FIELDS:
            if name not in item:
                got = ", ".join(map(str, list(item)[:10])) or "no fields"
                raise FormatError(
                    f"{path}: transition {index}: has no {name!r}, got {got}; is it a file of transitions?"
                )
        fields: dict[str, Any] = {}
        _flatten(fields, item, "", path)
        yield fields


def _flatten(fields: dict[str, Any], value: Any, prefix: str, path: Path) -> None:
    """Flatten nested dicts. Names with a slash, such as left/tcp_pose of two arms, are treated as paths."""
    if not isinstance(value, dict) or (not value and prefix):
        fields[prefix] = value
        return
    for name, child in value.items():
        if not isinstance(name, str) or not all(name.split(trees.SEPARATOR)):
            if prefix.partition(trees.SEPARATOR)[0] == "infos":
                continue
            raise FormatError(f"{path}: {prefix or 'a transition'}: expected names that are text, got {name!r:.40}")
        full = trees.join(prefix, name)
        if full in fields:
            raise FormatError(f"{path}: {full}: is in a transition twice; rename one")
        _flatten(fields, child, full, path)


class _HumanMatcher:
    """Matches the transitions of a demo_buffer file, in order, with those of the buffer file of the same name."""

    def __init__(self, path: Path | None):
        self._path = path
        self._items = iter(()) if path is None else _flat_items(path)
        self._number, self._next = 0, next(self._items, None)

    def match(self, fields: dict[str, Any]) -> bool:
        if self._next is None or not _same(self._next, fields):
            return False
        self._number, self._next = self._number + 1, next(self._items, None)
        return True

    def finish(self, path: Path) -> None:
        if self._next is not None:
            raise FormatError(
                f"{self._path}: transition {self._number} is not in {path}, or not in this order, so the source is "
                f"unknown; read the directories buffer and demo_buffer separately"
            )


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    names = [
        name for name in a if name.partition(trees.SEPARATOR)[0] in ("actions", "observations", "next_observations")
    ]
    return all(name in b and trees.equal_leaf(a[name], b[name]) for name in names)
