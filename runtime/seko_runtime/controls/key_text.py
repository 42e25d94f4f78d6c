"""Keys as a text: ``w-10,iw-15,none-5`` holds w for 10 steps, i and w for 15, and none for 5."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from seko_runtime.arguments import iterates, shown
from seko_runtime.controls.base import INPUTS, ControlOption
from seko_runtime.errors import UsageError

CODE = re.compile(r"[A-Z][A-Za-z0-9]{1,31}")  # `KeyboardEvent.code` of any key
KEYS_OPTION = ControlOption(
    "--keys",
    "KEYS",
    "steer with the artifact's keys, such as w a s d i j k l: w-10,iw-15,none-5 holds w for 10 video frames, then i "
    "and w for 15, then none for 5",
    INPUTS,
)
NONE = "none"
MAX_STEPS = 1_000_000  # most steps that a text may name
_FULL_WIDTH_COMMA = "\N{FULLWIDTH COMMA}"
_PART = re.compile(rf"({NONE}|[A-Za-z0-9]+)-([0-9]{{1,7}})", re.ASCII | re.IGNORECASE)


def held_keys(keys: object, names: Collection[str], *, letters: bool) -> list[str]:
    """Return those of some held keys that ``names`` has; other keys of a keyboard do nothing.

    Parameters
    ----------
    keys : object
        What is called held keys: a collection of names, and of `KeyboardEvent.code`s of other keys.
    names : collection of str
        The names of the keys that do something.
    letters : bool
        Whether a text is taken as the list of its letters.

    Raises
    ------
    UsageError
        If it is no such collection, or a key has another name.
    """
    no_list = Mapping | bytes | bytearray if letters else Mapping | str | bytes | bytearray
    if not isinstance(keys, Collection) or not iterates(keys) or isinstance(keys, no_list):
        raise UsageError(f"keys are {shown(keys)}, expected some of {', '.join(names)}, as a list")
    for key in keys:
        if not (isinstance(key, str) and (key in names or CODE.fullmatch(key))):
            raise UsageError(f"key {shown(key)} is not known, expected one of {', '.join(names)}")
    return [key for key in keys if key in names]


def key_letters(codes: Mapping[str, str]) -> dict[str, str]:
    """Return what each letter means, of keys that are named by `KeyboardEvent.code`, such as ``KeyW``."""
    return {
        code.removeprefix("Key").removeprefix("Digit").lower(): meaning
        for code, meaning in codes.items()
        if len(code.removeprefix("Key").removeprefix("Digit")) == 1
    }


def key_steps(text: object, letters: Mapping[str, str]) -> list[frozenset[str]]:
    """Return what is held in each step, as ``letters`` means it. As in the tool of lingbot-world's authors, letters may
    be upper case, blanks are ignored, and commas may be full-width.

    Raises
    ------
    UsageError
        If a part of the text has another form, or there are too many steps.
    """
    if not isinstance(text, str):
        raise UsageError(f"keys are {shown(text)}, expected a text such as w-10,iw-15,none-5")
    steps: list[frozenset[str]] = []
    for part in "".join(text.replace(_FULL_WIDTH_COMMA, ",").split()).split(","):
        match = _PART.fullmatch(part)
        held = "" if match is None or match[1].lower() == NONE else match[1].lower()
        if match is None or not int(match[2]) or set(held) - set(letters):
            raise UsageError(
                f"keys {part[:40]!r}: expected keys of {''.join(letters)}, or {NONE}, a dash and a number of steps, as "
                "in w-10,iw-15,none-5"
            )
        if len(steps) + int(match[2]) > MAX_STEPS:
            raise UsageError(f"keys for more than {MAX_STEPS} steps: give fewer")
        steps += [frozenset(letters[key] for key in held)] * int(match[2])
    return steps
