"""Options in the words of Hydra: `data.n_samples=8 +trainer.note=null algo.tasks=[a,b]`."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from understudy.core import UnderstudyError

_CONSTANTS = {"true": True, "false": False, "null": None}


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """The value of each option by its path; of an option that is given twice, the last value."""
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("~"):
            found.pop(word[1:].partition("=")[0], None)
            continue
        name, equals, text = word.lstrip("+").partition("=")
        if not equals or not name:
            raise UnderstudyError(f"{word}: expected an option of Hydra as NAME=VALUE; correct it in the script")
        found[name] = parse_value(text)
    return found


def parse_value(text: str) -> Any:
    """A value as Hydra reads it: a number, true, false, null, a list in brackets, or text with or without quotes."""
    text = text.strip()
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [parse_value(part) for part in inner.split(",")] if inner else []
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    try:
        number = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return number if isinstance(number, int | float) else text


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as options by their paths."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        found |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found
