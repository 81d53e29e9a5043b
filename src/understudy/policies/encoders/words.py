"""Words: instructions as numbers, one for each word. The vocabulary is that of the tasks, and in the policy's file.

Number 0 is padding and 1 is any word that is not known; the known ones follow in alphabetical order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from understudy.policies.protocol import Array, PolicyError

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"\w+")


class Words:
    """A vocabulary. Case and punctuation do not count."""

    def __init__(self, known: Sequence[str], *, max_words: int):
        self.known = tuple(known)
        self.max_words = max_words
        self._numbers = {word: number for number, word in enumerate(self.known, start=2)}
        if len(self._numbers) < len(self.known):
            raise PolicyError("words: expected different words; give each once")
        self._encoded: dict[str, Array] = {}

    @staticmethod
    def of(instructions: Iterable[str], *, max_words: int) -> Words:
        """The vocabulary of some instructions, each of which must fit."""
        texts = list(instructions)
        words = Words(sorted({word for text in texts for word in split(text)}), max_words=max_words)
        words.encode(texts)
        return words

    def __len__(self) -> int:
        return len(self.known) + 2

    def encode(self, instructions: Sequence[str]) -> Array:
        """int64 [B, max_words], padded at the end."""
        rows = [self._row(text) for text in instructions]
        return np.stack(rows) if rows else np.zeros((0, self.max_words), np.int64)

    def _row(self, text: str) -> Array:
        found = self._encoded.get(text)
        if found is None:
            numbers = [self._numbers.get(word, UNKNOWN) for word in split(text)]
            if not 1 <= len(numbers) <= self.max_words:
                raise PolicyError(
                    f"instruction: expected 1 to {self.max_words} words, got {len(numbers)} in {text!r}; "
                    f"shorten it, or train a policy with a higher max_words"
                )
            found = np.full(self.max_words, PADDING, np.int64)
            found[: len(numbers)] = numbers
            self._encoded[text] = found
        return found


def split(text: str) -> list[str]:
    """Its words in lower case."""
    return _WORD.findall(text.lower())
