"""Conditions: SQL with which a user chooses episodes, checked before the catalog on disk is asked.

A condition is one expression. It is compiled against empty tables in memory: what fails there is a mistake in the
condition, and never a fault of the disk or of the catalog. While it runs, a Guard holds the connection to reading, and
that of a view to a bounded number of SQLite's steps. The condition of a view may come from another machine: it may read
the attributes of an episode and call FUNCTIONS, and nothing else.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

from understudy.core import StoreError
from understudy.core.suggestion import did_you_mean
from understudy.processes import forks

SqlValue: TypeAlias = int | float | str | bytes | None
SqlRow: TypeAlias = tuple[Any, ...]  # the SQL decides the types

# The functions that a view may call: none of them loops, or makes a large value of small ones.
FUNCTIONS = frozenset(["abs", "coalesce", "glob", "ifnull", "instr", "json_extract", "length", "like", "lower", "max"])
FUNCTIONS |= {"min", "nullif", "round", "substr", "trim", "upper", "->", "->>"}
TABLES = frozenset(["episodes", "spans", "segments", "commits", "edits"])  # that a condition may read
STEPS_PER_EPISODE = 1000  # of SQLite's virtual machine; a condition of ten comparisons takes about fifty
MIN_STEPS = 10_000_000  # for a few episodes as well; a tenth of a second
_STEPS_PER_TICK = 100_000

MAX_SHOWN = 300  # letters of a condition in an error
_CLOSING = "\n)"  # ends a comment first, so that it cannot take the bracket away
_WORD = re.compile(r"'(?:[^']|'')*'|[A-Za-z_][A-Za-z_0-9]*")
_MARK = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]"""  # in quotes
    r"""|--[^\n]*|/\*.*?\*/"""  # comments
    r"""|['"`\[]|/\*|[();]""",  # a quote or comment that does not end; what is left counts
    re.DOTALL,
)


def check_condition(condition: str, schema: str, *, num_values: int = 0, of_view: bool = False) -> None:
    """Refuse a condition that is not one SQL expression on the table `episodes` of a schema, with `num_values`
    question marks; with `of_view`, also one that does more than a view may.
    """
    problem = _problem(condition, schema, num_values, of_view)
    if problem is not None:
        raise StoreError(f"condition {shown(condition)}: {problem}")


def shown(condition: str) -> str:
    """A condition in quotes, as an error shows it; a long one is cut."""
    return repr(condition if len(condition) <= MAX_SHOWN else f"{condition[:MAX_SHOWN]}...")


@lru_cache(maxsize=1000)
def _problem(condition: str, schema: str, num_values: int, of_view: bool) -> str | None:
    with forks.unforked, closing(sqlite3.connect(":memory:")) as db:
        db.executescript(schema)
        columns = [row[1] for row in db.execute("pragma table_info(episodes)")]
        listed = f"the columns are {', '.join(columns)}"
        unfinished = _open_end(condition)
        if unfinished is not None:
            return f"expected one expression, got {unfinished}; {listed}"
        error = _compile_error(db, condition, num_values)
        if error is None:
            return _forbidden(db, condition, num_values) if of_view else None
        for word in _unknown_words(condition, columns):
            # The word is the mistake if the condition is right with a column in its place.
            repaired = re.sub(rf"\b{word}\b", columns[0], condition)
            if _compile_error(db, repaired, num_values) is None:
                advice = did_you_mean(word.lower(), columns, f"put text in single quotes; {listed}", cutoff=0.75)
                return f"there is no column {word!r}; {advice}"
        return f"{str(error).replace(_CLOSING, '')}; {listed}"


def _open_end(condition: str) -> str | None:
    """What would reach beyond a condition that stands in parentheses, with a line break after it; None if nothing."""
    depth = 0
    for found in _MARK.finditer(condition):
        mark = found[0]
        if mark in ("'", '"', "`", "[", "/*"):
            return f"a {mark} without its end"
        if mark == ";":
            return "a ;"
        depth += {"(": 1, ")": -1}.get(mark, 0)
        if depth < 0:
            return "a ) without its ("
    return "a ( without its )" if depth else None


def _compile_error(db: sqlite3.Connection, condition: str, num_values: int) -> Exception | None:
    values: Sequence[SqlValue] = [None] * num_values
    try:
        db.execute(f"explain select 1 from episodes where ({condition}{_CLOSING}", values)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # a ValueError: no UTF-8, or the character 0
        return error
    return None


def _forbidden(db: sqlite3.Connection, condition: str, num_values: int) -> str | None:
    """What a condition does that a view must not; None if it is harmless."""
    guard = Guard(db)
    with guard.held(of_view=True, num_episodes=0):
        if _compile_error(db, condition, num_values) is None:
            return None
    return (
        f"{guard.refused or 'something in it'} is not allowed; the condition of a view may read attributes of episodes "
        f"and call {', '.join(sorted(FUNCTIONS))}"
    )


def _unknown_words(condition: str, columns: Sequence[str]) -> list[str]:
    """The names in a condition, text in quotes left out, that are no columns: SQL's own words among them."""
    words = dict.fromkeys(match[0] for match in _WORD.finditer(condition))
    return [word for word in words if not word.startswith("'") and word.lower() not in columns]


def guard_problem(error: Exception) -> str | None:
    """What is wrong with a condition that a Guard has stopped; None if it was not the guard."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_INTERRUPT:
        return f"it took more than {STEPS_PER_EPISODE} steps of SQLite for an episode; make it simpler"
    if code == sqlite3.SQLITE_AUTH:
        return f"it does more than read episodes ({error}); leave that out"
    return None


class Guard:
    """Holds a connection to reading the tables of episodes, for a bounded number of steps.

    SQLite asks the authorizer when it compiles a statement, and counts steps while it runs one. Only what the thread
    compiles that holds the guard is refused.
    """

    def __init__(self, db: sqlite3.Connection):
        self._db = db
        self._holder: int | None = None
        self._of_view = False
        self._num_selects = 0
        self._ticks_left = 0
        self.refused: str | None = None  # what the last statement wanted and did not get
        db.set_authorizer(self._authorize)

    @contextmanager
    def held(self, *, of_view: bool, num_episodes: int) -> Iterator[None]:
        """Run one statement with a user's condition in it; with `of_view`, it is stopped when it takes too long."""
        self._of_view, self._num_selects, self.refused = of_view, 0, None
        self._ticks_left = (MIN_STEPS + STEPS_PER_EPISODE * num_episodes) // _STEPS_PER_TICK
        if of_view:
            self._db.set_progress_handler(self._tick, _STEPS_PER_TICK)
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            if of_view:
                self._db.set_progress_handler(None, 0)

    def _tick(self) -> int:
        self._ticks_left -= 1
        return int(self._ticks_left < 0)

    def _authorize(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        if self._holder != threading.get_ident() or self._allows(action, first, second):
            return sqlite3.SQLITE_OK
        self.refused = self.refused or second or first or "a select"
        return sqlite3.SQLITE_DENY

    def _allows(self, action: int, first: str | None, second: str | None) -> bool:
        if action == sqlite3.SQLITE_SELECT:
            self._num_selects += 1
            return self._num_selects == 1 or not self._of_view  # the first is ours
        if action == sqlite3.SQLITE_READ:
            return first == "episodes" if self._of_view else first in TABLES
        if action == sqlite3.SQLITE_FUNCTION:
            return second in FUNCTIONS if self._of_view else second != "load_extension"
        return False
