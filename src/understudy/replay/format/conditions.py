"""Conditions: SQL with which a user chooses episodes, checked before the catalog on disk is asked.

A condition is compiled against empty tables in memory. What fails there is a mistake in the condition, and never a
fault of the disk or of the catalog.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any, TypeAlias

from understudy.core import StoreError

SqlValue: TypeAlias = int | float | str | bytes | None
SqlRow: TypeAlias = tuple[Any, ...]  # the SQL decides the types

MAX_SHOWN = 300  # letters of a condition in an error
_CLOSING = "\n)"  # ends a comment first, so that it cannot take the bracket away
_WORD = re.compile(r"'(?:[^']|'')*'|[A-Za-z_][A-Za-z_0-9]*")


def check_condition(condition: str, schema: str, *, num_values: int = 0) -> None:
    """Refuse a condition that is not SQL on the table `episodes` of a schema, with `num_values` question marks."""
    problem = _problem(condition, schema, num_values)
    if problem is not None:
        raise StoreError(f"condition {shown(condition)}: {problem}")


def shown(condition: str) -> str:
    """A condition in quotes, as an error shows it; a long one is cut."""
    return repr(condition if len(condition) <= MAX_SHOWN else f"{condition[:MAX_SHOWN]}...")


@lru_cache(maxsize=1000)
def _problem(condition: str, schema: str, num_values: int) -> str | None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(schema)
        columns = [row[1] for row in db.execute("pragma table_info(episodes)")]
        error = _compile_error(db, condition, num_values)
        if error is None:
            return None
        listed = f"the columns are {', '.join(columns)}"
        for word in _unknown_words(condition, columns):
            # The word is the mistake if the condition is right with a column in its place.
            repaired = re.sub(rf"\b{word}\b", columns[0], condition)
            if _compile_error(db, repaired, num_values) is None:
                near = difflib.get_close_matches(word.lower(), columns, 1, cutoff=0.75)
                advice = f"did you mean {near[0]!r}?" if near else f"put text in single quotes; {listed}"
                return f"there is no column {word!r}; {advice}"
        return f"{str(error).replace(_CLOSING, '')}; {listed}"


def _compile_error(db: sqlite3.Connection, condition: str, num_values: int) -> Exception | None:
    values: Sequence[SqlValue] = [None] * num_values
    try:
        db.execute(f"explain select 1 from episodes where ({condition}{_CLOSING}", values)
    except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
        return error
    return None


def _unknown_words(condition: str, columns: Sequence[str]) -> list[str]:
    """The names in a condition, text in quotes left out, that are no columns: SQL's own words among them."""
    words = dict.fromkeys(match[0] for match in _WORD.finditer(condition))
    return [word for word in words if not word.startswith("'") and word.lower() not in columns]
