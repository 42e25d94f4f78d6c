"""Checks of texts that are to be spoken, and the white space in them as the model was trained with it."""

from __future__ import annotations

import re
import unicodedata

from seko_runtime.arguments import shown
from seko_runtime.errors import UsageError

NOTHING_TO_SAY = "nothing to say: it has no letter and no digit"
_SPACE = re.compile(r"\s+")


def checked_text(text: object, name: str) -> str:
    """Return a text that a tokenizer takes; the text may be empty.

    Raises
    ------
    UsageError
        If it is no string, or has a zero character or half of a surrogate pair; ``name`` is the argument's name in the
        message, which does not quote the text.
    """
    if not isinstance(text, str):
        raise UsageError(f"{name} is {shown(text)}, expected a text")
    for place, letter in enumerate(text):
        if letter == "\0" or "\ud800" <= letter <= "\udfff":
            what = "a zero character" if letter == "\0" else "half of a surrogate pair"
            raise UsageError(f"{name} has {what} at place {place}, expected letters; leave it out")
    return text


def spoken_text(text: object, name: str = "the text") -> str:
    """Return a text as the model reads it, with one blank for each run of white space, as in the package `voxcpm`.

    Raises
    ------
    UsageError
        As of `checked_text`, and if the text has nothing to say.
    """
    checked = checked_text(text, name)
    if not says_something(checked):
        raise UsageError(f"{name} has {NOTHING_TO_SAY}; give a sentence with words")
    return _SPACE.sub(" ", checked)


def says_something(text: str) -> bool:
    """Return whether a text has a letter or a digit; a text without any, such as one of emojis, is not spoken."""
    return any(letter.isalnum() for letter in text)


def joined(before: str, text: str) -> str:
    """Return two sentences as one text, with a blank between them unless their scripts have no blanks there."""
    if not before or before[-1].isspace() or text[:1].isspace() or _is_wide(before[-1]) or _is_wide(text[:1]):
        return before + text
    return f"{before} {text}"


def _is_wide(letter: str) -> bool:
    return bool(letter) and unicodedata.east_asian_width(letter) in "WF"
