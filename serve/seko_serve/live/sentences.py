"""Sentence splitter for a text that is still being written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LONGEST = 400  # letters of a sentence; a longer one is cut at its last pause, or between two words
# A sentence ends with a mark and a blank behind it, with a mark of scripts that have no blanks, or with its line.
_END = re.compile(r"[.!?…;:]+[\"'”’)\]]*\s+|[。！？；]+[」』”’）]*|\s*\n\s*")  # noqa: RUF001 - marks of other scripts
_PAUSE = re.compile(r"[,，、:;–—-]\s*|\s+")  # noqa: RUF001 - marks of other scripts


class Sentences:
    """The text that a session has received and not spoken yet.

    Attributes
    ----------
    letters : int
        Number of letters not spoken yet, in whole sentences and in the unfinished sentence.
    """

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._rest = ""

    @property
    def letters(self) -> int:
        """Number of letters that wait to be spoken."""
        return sum(map(len, self._whole)) + len(self._rest)

    def write(self, text: str, *, last: bool = False) -> None:
        """Append a part of the text. If ``last`` is true, an unfinished sentence at the end counts as a whole
        sentence."""
        self._rest += text
        begin = 0
        for end in _END.finditer(self._rest):
            self._take(self._rest[begin : end.end()])
            begin = end.end()
        self._rest = self._rest[begin:]
        while len(self._rest) > LONGEST:
            self._rest = self._cut(self._rest)
        if last:
            self._take(self._rest)
            self._rest = ""

    def next(self) -> str | None:
        """Remove and return the next whole sentence; None if there is no whole sentence."""
        return self._whole.pop(0) if self._whole else None

    def __bool__(self) -> bool:
        return bool(self._whole)

    def clear(self) -> None:
        """Forget the text that was not spoken yet."""
        self._whole.clear()
        self._rest = ""

    def state(self) -> dict[str, Any]:
        """Return the waiting text as a JSON value, for `load`."""
        return {"whole": list(self._whole), "rest": self._rest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned."""
        self._whole, self._rest = [str(sentence) for sentence in state["whole"]], str(state["rest"])

    def _take(self, sentence: str) -> None:
        while len(sentence) > LONGEST:
            sentence = self._cut(sentence)
        if any(letter.isalnum() for letter in sentence):
            self._whole.append(" ".join(sentence.split()))

    def _cut(self, text: str) -> str:
        """Make a sentence from the beginning of a long text without an end of sentence; return the rest."""
        pauses = [pause.end() for pause in _PAUSE.finditer(text[:LONGEST])]
        at = pauses[-1] if pauses else LONGEST
        self._take(text[:at])
        return text[at:]
