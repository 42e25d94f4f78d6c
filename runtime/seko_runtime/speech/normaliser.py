"""Numbers, dates, amounts and units of a text as words, by the library wetext, which the package `voxcpm` uses too."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from seko_runtime.errors import LibraryMissingError, UsageError
from seko_runtime.speech.sentences import sentences_of

LANGUAGES = ("en", "zh", "ja")
_ESCAPED = re.compile(r'\\(["\\])')  # how the library leaves marks of a sentence that it changed
# What is changed of a sentence that cannot be as a whole: runs of words between other signs; of such runs, each word.
_PARTS = (
    re.compile(r"[^\W_]+(?:[ ,.:;!?'-]+[^\W_]+)*"),
    re.compile(r"[^\W_]+(?:[,.:'-][^\W_]+)*"),
)
_LOCK = threading.Lock()  # the library says nothing of threads


def normalised(pieces: str | Iterable[str], language: str, name: str = "the text") -> Iterator[str]:
    """Return the sentences of a text with what is written in digits as words, each with an empty line behind it: for
    `SpeechSession.speak`, or joined. Signs and words that the library does not know in this language stay as they are.

    Parameters
    ----------
    pieces : str or iterable of str
        The text, whole or in pieces.
    language : str
        The text's language, one of `LANGUAGES`.
    name : str
        The text's name in error messages, which do not quote it.

    Raises
    ------
    UsageError
        If the language is another one, which is raised at once; of `sentences_of`.
    LibraryMissingError
        If wetext is not installed, at once.
    """
    if language not in LANGUAGES:
        raise UsageError(f"normalize is {str(language)[:40]!r}, expected {', '.join(LANGUAGES)}")
    library = _library(language)
    return (f"{_changed(library, sentence)}\n\n" for sentence in sentences_of(pieces, name))


def _changed(library: Any, text: str, parts: Sequence[re.Pattern[str]] = _PARTS) -> str:
    try:
        with _LOCK:
            changed = str(library.normalize(text))
    except AssertionError:  # for a sign that its automata lack, at this place or at all
        return parts[0].sub(lambda part: _changed(library, part[0], parts[1:]), text) if parts else text
    return _ESCAPED.sub(r"\1", changed)


@cache
def _library(language: str) -> Any:
    try:
        import wetext
    except ImportError:
        raise LibraryMissingError(
            "numbers as words need the library wetext, which is not installed; pip install wetext, or leave "
            "normalize out"
        ) from None
    return wetext.Normalizer(lang=language, operator="tn", remove_erhua=language == "zh")
