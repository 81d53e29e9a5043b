"""Unpickler: runs the stack machine of pickles without anything that could run code.

A pickle is a program. Its names are looked up in a short list of functions of values.py, and every other name is
refused; nothing is imported, and no method of a value is called. The items of the list are yielded one by one, so
that a file may be larger than memory: a first pass, which skips the arrays, finds the objects that are used again, and
only those are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from understudy.formats.format import FormatError
from understudy.formats.safe_pickle.opcodes import GET, PUT, Memo, OpcodeReader, last_uses
from understudy.formats.safe_pickle.values import (
    LITERALS,
    MAX_DEPTH,
    NAMES,
    YIELDED,
    Name,
    advice,
    kind_of,
    plain,
    with_state,
)

MAX_OPERATIONS = 50_000  # per item of the list; a HIL-SERL transition takes about 200


def load_items(path: Path) -> Iterator[Any]:
    """Yield the items of the pickled list: dicts, lists, tuples, text, numbers and numpy arrays."""
    try:
        with path.open("rb") as file:
            uses = last_uses(OpcodeReader(file, path, skip=True))
            file.seek(0)
            yield from _Unpickler(OpcodeReader(file, path, skip=False), uses).items()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error}); check the path") from None


class _Unpickler:
    """The stack machine. Its values are plain, or placeholders for names and unfinished arrays."""

    def __init__(self, opcodes: OpcodeReader, uses: dict[int, int]):
        self._opcodes, self._last_uses = opcodes, uses
        self._memo, self._kept = Memo(opcodes), dict[int, Any]()
        self._stack: list[Any] = []
        self._marks: list[int] = []  # positions in the stack

    def items(self) -> Iterator[Any]:
        """Run to the end and yield the items; the list itself stays empty."""
        num_operations = 0
        for code, argument in self._opcodes:
            num_operations += 1
            if num_operations > MAX_OPERATIONS:
                raise self._opcodes.refuse(
                    f"one item takes more than {MAX_OPERATIONS} operations; is this the right file?"
                )
            if self._ready(code):
                num_operations = 0
                yield from self._yield_items(code)
            if code == b".":
                if len(self._stack) != 1 or type(self._stack[0]) is not list:
                    raise self._opcodes.refuse(f"expected a list of transitions, got {kind_of(self._stack[-1:])}")
                return
            self._do(code, argument)

    # ---- yielding items

    def _ready(self, code: bytes) -> bool:
        """Whether items are complete: the list's own opcode is next, or another dict follows one."""
        if not self._stack or type(self._stack[0]) is not list:
            return False
        if self._marks == [1]:
            return code == b"e" or (len(self._stack) > 2 and type(self._stack[-1]) is type(self._stack[-2]) is dict)
        return not self._marks and code == b"a" and len(self._stack) == 2

    def _yield_items(self, code: bytes) -> Iterator[Any]:
        end = len(self._stack) if code in b"ea" else len(self._stack) - 1
        for index in range(1, end):
            item = self._stack[index]
            if item is not YIELDED:
                self._stack[index] = YIELDED
                yield plain(item, self._opcodes)

    # ---- opcodes

    def _do(self, code: bytes, argument: Any) -> None:
        stack = self._stack
        if code in PUT:
            index = self._memo.put(code, argument)
            if index in self._last_uses:
                self._kept[index] = self._top()
        elif code in GET:
            index = self._memo.get(argument)
            if index not in self._kept:
                raise self._opcodes.refuse(
                    f"asks for object {index}, which has gone; does something write to the file?"
                )
            stack.append(self._kept[index])
            if self._last_uses[index] == self._opcodes.position:
                del self._kept[index]
        elif code == b"(":
            if len(self._marks) >= 4 * MAX_DEPTH:
                raise self._opcodes.refuse("containers are nested too deeply; is this the right file?")
            self._marks.append(len(stack))
        elif code in LITERALS:
            stack.append(LITERALS[code](argument, self._opcodes))
        elif code in b"\x80\x95":  # the protocol's number, the length of a frame
            pass
        elif code == b"2":
            stack.append(self._top())
        elif code == b"0":
            self._pop(1)
        else:
            self._build(code, argument)

    def _build(self, code: bytes, argument: Any) -> None:
        stack = self._stack
        if code in b"tld1":
            values = self._since_mark()
            if code != b"1":
                stack.append(tuple(values) if code == b"t" else values if code == b"l" else self._set({}, values))
        elif code in b"\x85\x86\x87":
            stack.append(tuple(self._pop(code[0] - 0x84)))
        elif code in b"ae":
            values = self._since_mark() if code == b"e" else self._pop(1)
            self._top(list).extend(value for value in values if value is not YIELDED)
        elif code in b"us":
            values = self._since_mark() if code == b"u" else self._pop(2)
            self._set(self._top(dict), values)
        elif code == b"c":
            stack.append(self._name(*(line.decode("utf-8", "replace") for line in argument)))
        elif code == b"\x93":
            stack.append(self._name(*self._pop(2)))
        elif code == b"R":
            function, arguments = self._pop(2)
            if not isinstance(function, Name) or type(arguments) is not tuple:
                raise self._opcodes.refuse("calls what is no function; it is damaged")
            stack.append(self._checked(function.make, arguments, function.name))
        elif code == b"b":
            (state,) = self._pop(1)
            stack[-1:] = [self._checked(with_state, (self._top(), state), "the state of an array")]
        else:  # pragma: no cover (every opcode of the opcodes stands above)
            raise self._opcodes.refuse(f"{code!r} is not known")

    def _top(self, kind: type[Any] = object) -> Any:
        if not self._stack or (self._marks and len(self._stack) <= self._marks[-1]):
            raise self._opcodes.refuse("takes a value from an empty stack; it is damaged")
        if not isinstance(self._stack[-1], kind):
            raise self._opcodes.refuse(f"adds to {kind_of(self._stack[-1:])} as if to a {kind.__name__}; it is damaged")
        return self._stack[-1]

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) - (self._marks[-1] if self._marks else 0) < count:
            raise self._opcodes.refuse("takes a value from an empty stack; it is damaged")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise self._opcodes.refuse("ends what was not begun; it is damaged")
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _set(self, target: dict[Any, Any], values: list[Any]) -> dict[Any, Any]:
        if len(values) % 2:
            raise self._opcodes.refuse("a dict has a key without a value; it is damaged")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int | float | bytes | None):
                raise self._opcodes.refuse(f"a dict has {kind_of([key])} as a key; expected text")
            target[key] = value
        return target

    def _name(self, module: Any, name: Any) -> Name:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "?"
        if full not in NAMES:
            raise self._opcodes.refuse(
                f"names {full[:80]!r}, which is not read, because it could run code; {advice(full)}"
            )
        return NAMES[full]

    def _checked(self, make: Callable[..., Any], arguments: tuple[Any, ...], what: str) -> Any:
        try:
            return make(arguments)
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise self._opcodes.refuse(f"{what}: is not one ({error}); it is damaged") from None
