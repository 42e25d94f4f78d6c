"""Sentences to ids: cleaning, padding, cutting with the end mark, and errors where the library or the file is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace

import ftfy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.errors import ArtifactError, EnvironmentLacksError, UsageError
from seko_runtime.video.text import _PLAIN, PromptIds, clean_prompt, prompt_words

from . import toy_whole
from .toy_whole import TABLE, tokenizer_json


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("  a\t red \n\n disc ", "a red disc"),
        ("a &amp;amp; b", "a & b"),
        ("&lt;b&gt;", "<b>"),
        ("a\u00a0b\u3000c", "a b c"),
        ("\u201ca\u201d \u2018b\u2019", "\"a\" 'b'"),
        ("sch\u00c3\u00b6n", "sch\u00f6n"),
        ("\u4e00\uff0c\u4e8c", "\u4e00,\u4e8c"),
        ("", ""),
    ],
)
def test_cleaning(prompt: str, cleaned: str) -> None:
    assert clean_prompt(prompt) == cleaned


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_a_cleaned_prompt_has_single_spaces_and_no_ends(prompt: str) -> None:
    cleaned = clean_prompt(prompt)
    assert cleaned == " ".join(cleaned.split())


@given(st.from_regex(_PLAIN, fullmatch=True))
def test_ftfy_is_asked_only_where_it_may_change_a_prompt(prompt: str) -> None:
    assert ftfy.fix_text(prompt).split() == prompt.split()


def test_without_ftfy_plain_prompts_are_taken_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert clean_prompt(' it\'s\n80 % "red" ') == 'it\'s 80 % "red"'
    for prompt in ("a \u201cred\u201d disc", "a &amp; b"):
        with pytest.raises(EnvironmentLacksError, match="pip install ftfy"):
            clean_prompt(prompt)


def test_ids_are_padded_cut_and_end_in_the_end_mark() -> None:
    pytest.importorskip("tokenizers")
    ids = PromptIds(TABLE, memoryview(tokenizer_json()))
    words = toy_whole.WORDS
    assert ids.ids("a red disc").tolist() == [[words.index(w) for w in ("a", "red", "disc")] + [2, 0]]
    long = "a red disc bounces drifts a blue ring"
    assert ids.ids(long).tolist() == [[words.index(w) for w in ("a", "red", "disc", "bounces")] + [2]]
    assert ids.ids("a red whale").tolist() == [[3, 4, 1, 2, 0]]
    for prompt in ("a red disc", long, ""):
        assert ids.ids(prompt).tolist() == toy_whole.WordIds().ids(prompt).tolist()


def test_a_prompt_that_may_not_be_cut_is_refused_with_both_numbers() -> None:
    pytest.importorskip("tokenizers")
    ids = PromptIds(replace(TABLE, truncate=False), tokenizer_json())
    with pytest.raises(UsageError, match="the prompt has 9 tokens, this artifact takes 5"):
        ids.ids("a red disc bounces drifts a blue ring")


@pytest.mark.parametrize("document", [b"", b"{}", b"\xff\xff", b"[1]", tokenizer_json()[:-20]])
def test_a_file_that_is_no_tokenizer(document: bytes) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ArtifactError, match=r"text/tokenizer.json is no file of tokenizers") as caught:
        PromptIds(TABLE, document).ids("a")
    assert caught.value.exit_code == 4


def test_an_id_beyond_the_text_encoders_table_never_reaches_it() -> None:
    """A lookup beyond a table ends a CUDA process's context, and reads whatever lies there on others."""
    pytest.importorskip("tokenizers")
    known = PromptIds(TABLE, tokenizer_json(), len(toy_whole.WORDS))
    assert known.ids("a red drifts").tolist() == [[3, 4, 11, 2, 0]]
    fewer = PromptIds(TABLE, tokenizer_json(), len(toy_whole.WORDS) - 1)
    assert fewer.ids("a red disc").tolist() == [[3, 4, 7, 2, 0]]
    with pytest.raises(ArtifactError, match="gives the id 11, the text encoder knows ids below 11"):
        fewer.ids("a red drifts")


def test_a_tokenizer_that_fails_at_a_word_is_the_artifacts_fault() -> None:
    pytest.importorskip("tokenizers")
    document = tokenizer_json().replace(b'"unk_token": "?"', b'"unk_token": "none of its words"')
    with pytest.raises(ArtifactError, match="cannot cut a text into ids") as caught:
        PromptIds(TABLE, document).ids("a whale")
    assert caught.value.exit_code == 4


def test_a_tokenizer_at_which_the_library_panics_is_the_artifacts_fault() -> None:
    """Its panic is no `Exception`: it would end the process that serves everybody."""
    pytest.importorskip("tokenizers")
    document = tokenizer_json().replace(b'{"id": "A", "type_id": 0}', b'{"id": "B", "type_id": 0}', 1)
    with pytest.raises(ArtifactError, match="PanicException"):
        PromptIds(TABLE, document).ids("a red disc")


def test_an_interrupt_in_the_library_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def encode(self, _: str) -> None:
            raise KeyboardInterrupt

    ids = PromptIds(TABLE, tokenizer_json())
    monkeypatch.setattr(ids, "_tokenizer", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        ids.ids("a red disc")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentLacksError, match="pip install tokenizers") as caught:
        PromptIds(TABLE, tokenizer_json()).ids("a")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("may_be_empty", [True, False])
@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (" ", "the prompt has no letter that can be seen"),
        ("\n\t\u3000", "the prompt has no letter that can be seen"),
        ("\u200b", "the prompt has no letter that can be seen"),
        ("&nbsp;", "the prompt has no letter that can be seen"),
        ("\0", "letter 1 of the prompt is NUL"),
        ("a red\0disc", "letter 6 of the prompt is NUL"),
    ],
)
def test_a_prompt_without_words_is_refused(prompt: str, why: str, may_be_empty: bool) -> None:
    with pytest.raises(UsageError, match=why):
        prompt_words(prompt, may_be_empty=may_be_empty)


def test_an_empty_prompt_is_taken_where_a_picture_says_what_to_show() -> None:
    assert prompt_words("", may_be_empty=True) == ""
    with pytest.raises(UsageError, match="the prompt is empty; write what the video is to show"):
        prompt_words("", may_be_empty=False)


@pytest.mark.parametrize("prompt", ["a", " a ", "!", "\u7ea2", "\U0001f600", "e\u0301"])
def test_a_prompt_with_words_is_cleaned_alone(prompt: str) -> None:
    assert prompt_words(prompt, may_be_empty=False) == clean_prompt(prompt)
