"""Numbers of a text as words: what is spoken, from whole texts and from pieces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from seko_runtime.cli.commands import main
from seko_runtime.errors import LibraryMissingError, UsageError
from seko_runtime.speech import normaliser
from seko_runtime.speech.normaliser import normalised
from seko_runtime.speech.sentences import sentences_of

from .test_commands import artifact as artifact  # a fixture
from .test_commands import levels, read_wav
from .texts import said_in_turn

TEXT = 'It costs $12.50 on 3/4/2025. He said "25%".\nDr. Smith walks 5 km'
WORDS = [
    "It costs twelve point five dollars on the fourth of march twenty twenty five.",
    'He said "twenty five percent".',
    "doctor Smith walks five kilometers",
]


@pytest.fixture
def library() -> None:
    pytest.importorskip("wetext", reason="needs seko-runtime[normalize]")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("en", TEXT, WORDS),
        ("zh", "共有12.5%。2025年3月4日到达。", ["共有百分之十二点五。", "二零二五年三月四日到达。"]),
        ("ja", "3人です。", ["三人です。"]),
        ("en", "Nothing to change.", ["Nothing to change."]),
    ],
)
def test_what_is_in_digits_is_written_in_words(language: str, text: str, words: list[str]) -> None:
    assert list(sentences_of("".join(normalised(text, language)))) == words
    assert list(sentences_of(normalised(iter(text), language))) == words  # letter by letter


@pytest.mark.usefixtures("library")
def test_a_sentence_is_there_before_the_next_is_written() -> None:
    def pieces() -> Iterator[str]:
        yield "I have 5.\n\n"
        raise AssertionError("asked for more than the sentence")

    assert next(sentences_of(normalised(pieces(), "en"))) == "I have five."


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("See [1] for 2 more.", "See [one] for two more."),
        ("It costs 5€ today, not 7.", "It costs five€ today, not seven."),
        ("Tel. +49 at 5 km", "Tel. +forty nine at five kilometers"),
        ("한국 5 more", "한국 five more"),
    ],
)
def test_signs_that_the_library_does_not_know_stay(text: str, words: str) -> None:
    assert "".join(normalised(text, "en")).strip() == words


def test_another_language_is_refused() -> None:
    with pytest.raises(UsageError, match="normalize is 'de', expected en, zh, ja"):
        normalised("5", "de")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wetext", None)
    normaliser._library.cache_clear()
    with pytest.raises(LibraryMissingError, match="pip install wetext"):
        normalised("5", "en")


@pytest.mark.usefixtures("library")
def test_the_command_speaks_the_words(artifact: Path, tmp_path: Path) -> None:
    output, text = tmp_path / "out.wav", "I see 5.\n\nzzzz"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    wanted = said_in_turn(["I see five.", "zzzz"], positions=32, seed=3)
    arguments = ["run", str(artifact), "--seed", "3", "-o", str(output), "--normalize", "en"]
    for more in (["--text", text], ["--text-file", str(tmp_path / "text.txt")]):
        assert main([*arguments, *more]) == 0
        np.testing.assert_array_equal(read_wav(str(output)), levels(wanted))
