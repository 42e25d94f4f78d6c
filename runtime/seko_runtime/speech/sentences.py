"""The sentences of a text that may still be being written: each is one prompt of the model.

A text gives the same sentences whole and in any pieces: whether it ends at a place depends on the text alone, so an end
counts only when enough of the text behind it is there. The rules need no language. They prefer a prompt of two
sentences to a prompt that ends within one, because a voice falls at the end of a prompt.
"""

# ruff: noqa: RUF001 - marks and words of many scripts
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from seko_runtime.errors import UsageError
from seko_runtime.speech.texts import NOTHING_TO_SAY, checked_text, says_something

LONGEST = 400  # letters of a sentence; a longer one is cut at its last pause, or between two words
LEAST = 4  # letters and digits of a sentence; a shorter one is spoken with its neighbour
_BRACKET = 160  # letters between brackets or quotation marks within which no sentence ends
_CLOSERS = 8  # marks that may close a sentence behind its end
_TAIL = 32  # letters behind an end that are looked at for a word
_LOOK = _BRACKET + _CLOSERS + _TAIL  # letters behind an end on which it depends
_PART = 4096  # letters of a long piece that are cut at a time: each sentence copies what is left of them

# Marks that end a sentence if a blank follows: those of scripts with capital letters.
_SPACED = frozenset(".!?…‥‽")
# Sentence_Terminal of Unicode 15 without those and without historic scripts: they end a sentence wherever they stand.
_FREE = frozenset("。！？｡．؟۔।॥։۝܀܁܂߹࠷࠹࠽࠾။၊።፧፨᙮᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᰻᰼᱾᱿⸮꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫។៕៚")
_ENDS = _SPACED | _FREE
_PAIRS = {
    "(": ")", "[": "]", "{": "}", "（": "）", "［": "］", "【": "】", "〔": "〕", "「": "」", "『": "』", "《": "》",
    "〈": "〉", "“": "”", "«": "»", "‹": "›", "„": "“”",
}  # fmt: skip
_CLOSING = frozenset("".join(_PAIRS.values())) | frozenset("\"'’")
_OPENING = frozenset(_PAIRS) | frozenset("\"'‘¿¡")
_MARKS = re.compile(f"[{''.join(_ENDS)}]|\n\n")
_OPENED = re.compile("[" + re.escape("".join(_PAIRS)) + "]")
_PAUSE = re.compile(r"[,，、;；:：،؛–—-]\s*|\s+")
_SPACE = re.compile(r"\s+")
_LINE_ENDS = re.compile(r"[\n\x85\u2028]|\u2029")
# Behind these a dot ends no sentence. Single letters, and words with a dot inside, need no list.
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms mx dr prof st mt sr jr rev hon gen col capt cpt lt sgt maj cmdr gov sen rep pres messrs mme mlle mgr
    fig figs vol vols ch sec eq eqs ref refs pp ed eds par cf al vs viz etc approx dept est inc
    ltd corp co bros jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri ave blvd rd hwy
    nr abs bd str bzw usw ca evtl ggf inkl exkl geb gest hr fr hl sog vgl bspw zzgl jh jan okt dez mrz
    sra srta ud uds dra pag núm avda prov sig dott ing avv ecc
    ул им стр рис гл тыс млн млрд руб коп проф акад напр др пр
    """.split()  # noqa: SIM905 - as lines it can be read
)
_BEFORE_NUMBERS = frozenset(("no", "nos", "art", "app", "tab"))


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

    @property
    def says_something(self) -> bool:
        """Whether the text that waits has a letter or a digit."""
        return bool(self._whole) or says_something(self._rest)

    def write(self, text: str, *, last: bool = False) -> None:
        """Append a part of the text. If ``last`` is true, an unfinished sentence at the end counts as a whole
        sentence."""
        self._rest = _SPACE.sub(_collapsed, self._rest + text).lstrip()
        while (end := _next_end(self._rest, last=last)) is not None:
            self._take(self._rest[:end])
            self._rest = self._rest[end:].lstrip()
        if last:
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
        if says_something(sentence):
            self._whole.append(_SPACE.sub(" ", sentence).strip())


def sentences_of(pieces: str | Iterable[str], name: str = "the text") -> Iterator[str]:
    """Yield the sentences of a text that comes whole or in pieces, each as soon as it is known to be whole.

    Raises
    ------
    UsageError
        If a piece is no text (see `checked_text`), or the whole text has nothing to say.
    """
    sentences, said = Sentences(), False
    for piece in (pieces,) if isinstance(pieces, str) else pieces:
        text = checked_text(piece, name)
        for first in range(0, len(text), _PART):
            sentences.write(text[first : first + _PART])
            while (sentence := sentences.next()) is not None:
                yield sentence
                said = True
    sentences.write("", last=True)
    while (sentence := sentences.next()) is not None:
        yield sentence
        said = True
    if not said:
        raise UsageError(f"{name} has {NOTHING_TO_SAY}; give a sentence with words")


def _collapsed(space: re.Match[str]) -> str:
    """Return a run of white space as a blank, as the end of a line, or as the end of a paragraph."""
    lines = sum(2 if end == "\u2029" else 1 for end in _LINE_ENDS.findall(space[0]))
    return ("\n\n" if lines > 1 else "\n") if lines else " "


def _next_end(text: str, *, last: bool) -> int | None:
    """Return the number of letters of the first sentence of a text, without the white space behind it; None if more of
    the text must come first. If ``last`` is true, nothing more comes."""
    if not text:
        return None
    window = text[: LONGEST + _LOOK]
    whole = last and len(window) == len(text)  # whether nothing follows the window
    view = _View(window, whole)
    for mark in _MARKS.finditer(window, 0, LONGEST - _CLOSERS):
        end = view.end_at(mark.start())
        if end is None:
            return None
        if end:
            return end
    if len(window) < LONGEST + _LOOK and not whole:
        return None
    if len(text) <= LONGEST:
        return len(text)
    pauses = [
        pause.end() for pause in _PAUSE.finditer(window[:LONGEST]) if _words(window[: pause.end()]) >= LEAST
    ]
    return pauses[-1] if pauses else LONGEST


class _View:
    """The part of a text in which an end of its first sentence is looked for."""

    def __init__(self, text: str, whole: bool) -> None:
        self._text, self._whole = text, whole

    def end_at(self, place: int) -> int | None:
        """Return the end of the first sentence if the mark or the paragraph's end at ``place`` ends it, 0 if it does
        not, and None if that depends on letters that have not come."""
        text, size = self._text, len(self._text)
        if text[place] == "\n":
            return place if _words(text[:place]) >= LEAST else 0
        end = place + 1
        while end < size and text[end] in _CLOSING and end - place <= _CLOSERS:
            end += 1
        if end == size:
            return 0 if self._whole else None  # at the end of the text there is nothing to cut
        follower = text[end]
        closed = end > place + 1
        if follower in _ENDS or (text[place] in _SPACED and not follower.isspace()):
            return 0
        if (closed and not follower.isspace() and follower not in _OPENING) or _words(text[:end]) < LEAST:
            return 0
        line_ends = follower == "\n"
        if end + 1 == size and not self._whole and not line_ends:
            return None
        beyond = "" if line_ends else text[end + 1 : end + 2]
        if text[place] == "." and _is_abbreviation(text[:place], beyond):
            return 0
        inside = self._in_brackets(end)
        if inside or inside is None:
            return 0 if inside else None
        return end if line_ends else self._soft_end(place, end, closed=closed)

    def _soft_end(self, place: int, end: int, *, closed: bool) -> int | None:
        """Go on with `end_at` for an end within a line, which needs a word behind it."""
        text = self._text
        begin = end + text[end].isspace()
        if begin == len(text):
            return 0 if self._whole else None
        if text[place] in _SPACED and text[begin].islower() and (closed or text[place] not in "!?‽"):
            return 0
        if _words(text[begin : begin + _TAIL]) >= LEAST or len(text) >= begin + _TAIL:
            return end
        return 0 if self._whole else None

    def _in_brackets(self, end: int) -> bool | None:
        """Return whether brackets or quotation marks are open at a place; None if a bracket may still be closed."""
        if _OPENED.search(self._text, 0, end) is None:
            return False
        unknown = False
        for opened, closed in _brackets(self._text):
            if opened < end <= (closed or 0):
                return True
            pending = closed is None and opened < end and len(self._text) <= opened + _BRACKET
            unknown |= pending and not self._whole
        return None if unknown else False


def _brackets(text: str) -> list[tuple[int, int | None]]:
    """Return the places of brackets and quotation marks that open, and where each is closed; None for one that is not
    closed within the same paragraph and `_BRACKET` letters."""
    pairs: list[tuple[int, int | None]] = []
    open_: list[tuple[int, str]] = []  # places, and what closes them
    for place, letter in enumerate(text):
        match = next((at for at in range(len(open_) - 1, -1, -1) if letter in open_[at][1]), None)
        if match is not None:
            opened, _ = open_[match]
            if place - opened <= _BRACKET:
                pairs.append((opened, place))
            del open_[match:]
        elif letter in _PAIRS:
            open_.append((place, _PAIRS[letter]))
        elif text.startswith("\n\n", place):
            open_.clear()
    return pairs + [(opened, None) for opened, _ in open_]


def _is_abbreviation(before: str, follower: str) -> bool:
    """Return whether a dot behind a text belongs to the text's last word, such as an initial or an ordinal."""
    word = re.split(r"[\s(\[{“„\"'«$€£]", before[-40:])[-1]
    if word.replace(".", "").replace(",", "").isdigit():
        return len(word) <= 2
    if len(word) == 1 or "." in word[1:] or word.lower() in _ABBREVIATIONS:
        return True
    return word.lower() in _BEFORE_NUMBERS and follower.isdigit()


def _words(text: str) -> int:
    """Return the number of letters and digits of a text."""
    return sum(letter.isalnum() for letter in text)
