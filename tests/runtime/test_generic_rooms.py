"""The rooms below the workloads know none: no word of video stands in their names, texts and comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import seko_runtime

ROOMS = ("backends", "executor", "format", "parallel", "sessions")
STEMS = ("frame", "ring", "chunk", "prompt", "latent", "picture", "video")
WORDS = {
    *STEMS,
    *(f"{stem}s" for stem in STEMS),
    *(f"decod{end}" for end in ("e", "es", "ed", "er", "ers", "ing")),
}
OF_PYTHON = re.compile(r"\.decode\(|\b(Unicode|JSON)DecodeError\b")  # bytes to text, and what that raises


def words_of(source: str) -> list[tuple[int, str]]:
    """Each word of video in a module's names, strings and comments, with its line; names are split at case and _."""
    words = []
    for number, line in enumerate(source.splitlines(), 1):
        parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", OF_PYTHON.sub(" ", line))
        words += [(number, part) for part in parts if part.lower() in WORDS]
    return words


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_below_the_workloads_says_no_word_of_video(room: str) -> None:
    folder = Path(seko_runtime.__file__).parent / room
    modules = sorted(folder.rglob("*.py"))
    assert modules
    words = {
        f"{path.relative_to(folder.parent)}:{number}": word
        for path in modules
        for number, word in words_of(path.read_text(encoding="utf-8"))
    }
    assert words == {}


def test_words_are_found_in_names_texts_and_comments_and_inside_of_others_not() -> None:
    source = '''class FrameBlocks:\n    """Keeps rings."""\n    CHUNKS_IN_FLIGHT = 4  # a prompt\n'''
    assert [word for _, word in words_of(source)] == ["Frame", "rings", "CHUNKS", "prompt"]
    assert words_of("string = spring.decode('utf-8')\nexcept UnicodeDecodeError:\n") == []
