"""Sentences of a text: where a reader would stop, in many scripts, and the same in any pieces."""

# ruff: noqa: RUF001 - marks of many scripts
from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.speech.sentences import LONGEST, Sentences, sentences_of
from seko_runtime.speech.texts import says_something

CASES: dict[str, list[str]] = {
    "Dr. Smith paid $3.50 to Mr. J. R. Jones at 5 p.m. on Jan. 3. See Fig. 2, e.g. No. 7: done.": [
        "Dr. Smith paid $3.50 to Mr. J. R. Jones at 5 p.m. on Jan. 3. See Fig. 2, e.g. No. 7: done."
    ],
    "(A warm, slow female voice; calm.)Good morning. How are you?": [
        "(A warm, slow female voice; calm.)Good morning.",
        "How are you?",
    ],
    "(I saw him. He ran.) Then he left: for good; so it seems.": [
        "(I saw him. He ran.)",
        "Then he left: for good; so it seems.",
    ],
    "他说：“好。”然后走了。": ["他说：“好。”然后走了。"],
    "「行く。」と言った。「はい！！」": ["「行く。」と言った。「はい！！」"],
    "今日はいい天気ですね。明日は雨です。": ["今日はいい天気ですね。", "明日は雨です。"],
    "我……不知道。你去问问他吧！": ["我……不知道。", "你去问问他吧！"],
    "ما اسمك؟ أنا هنا۔": ["ما اسمك؟", "أنا هنا۔"],
    "यह एक वाक्य है। यह दूसरा है।": ["यह एक वाक्य है।", "यह दूसरा है।"],
    "Am 3. Januar kam Dr. Maier, z. B. um 5 Uhr. Dann ging er.": [
        "Am 3. Januar kam Dr. Maier, z. B. um 5 Uhr.",
        "Dann ging er.",
    ],
    "Он живёт на ул. Ленина. Там хорошо.": ["Он живёт на ул. Ленина.", "Там хорошо."],
    'He said "Go." Then 3.5 hours passed! Now what?': [
        'He said "Go."',
        "Then 3.5 hours passed!",
        "Now what?",
    ],
    "“Go!” he said. Wait... what? It cost $3.50. Then more.": [
        "“Go!” he said.",
        "Wait... what?",
        "It cost $3.50.",
        "Then more.",
    ],
    "Ok. Well, that is all. Yes.": ["Ok. Well, that is all. Yes."],
    "A\nB   C\tD": ["A B C D"],
    "Hard\nwrapped by Dr.\nSmith.\nNext line, and no mark\n\nA paragraph": [
        "Hard wrapped by Dr. Smith.",
        "Next line, and no mark",
        "A paragraph",
    ],
    ":( I am sad. Really I am.": [":( I am sad.", "Really I am."],
    "😄": [],
    " ...\n\n!?": [],
    "a" * 900 + "。": ["a" * 400, "a" * 400, "a" * 100 + "。"],
}


def sentences(pieces: Iterable[str]) -> list[str]:
    text, found = Sentences(), []
    for piece in pieces:
        text.write(piece)
        while (sentence := text.next()) is not None:
            found.append(sentence)
    text.write("", last=True)
    while (sentence := text.next()) is not None:
        found.append(sentence)
    assert text.letters == 0
    return found


@pytest.mark.parametrize("text", CASES)
def test_a_text_has_the_sentences_of_a_reader_whole_and_by_letters(text: str) -> None:
    assert sentences([text]) == CASES[text] == sentences(text)
    if CASES[text]:
        assert list(sentences_of(text)) == CASES[text] == list(sentences_of(iter(text)))


MARKS = (
    "".join(CASES) + ".!?…:;,()[]“”„«»\"'。！？「」『』（）؟۔। \n\n\t  \r\n\u2028\u2029ABCabc123DrMr.Jr.e.g."
)
TEXTS = st.text(st.sampled_from(MARKS), max_size=120) | st.lists(
    st.sampled_from(
        ["word ", "aa", "Dr. ", "end. ", "Next ", "(", ")", "。", "”", "“", "! ", "\n", "\n\n", "... ", "3. "]
    )
).map("".join)


@given(text=st.lists(TEXTS, max_size=12).map("".join), cuts=st.lists(st.integers(0, 1500), max_size=30))
def test_a_text_has_the_same_sentences_in_any_pieces(text: str, cuts: list[int]) -> None:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = sentences([text])
    assert sentences(text[first:last] for first, last in pairwise(at)) == whole
    assert sentences(text) == whole  # letter by letter
    assert all(len(sentence) <= LONGEST and says_something(sentence) for sentence in whole)
    kept = re.sub(r"\W", "", "".join(whole))
    assert kept == re.sub(r"\W", "", text) or not says_something(text)


@given(
    st.lists(
        st.sampled_from(["Dr. ", "word ", "Ok. ", "Now! ", "A. ", "3. ", "well. "]), min_size=1, max_size=30
    )
)
def test_no_sentence_is_a_scrap(words: list[str]) -> None:
    found = sentences(["Some words. ", *words])
    assert all(sum(map(str.isalnum, sentence)) >= 4 for sentence in found)


def test_a_long_text_is_cut_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sentence copies the text that is left: a whole book would take minutes before its first sound."""
    letters: list[int] = []
    write = Sentences.write

    def counted(of: Sentences, text: str, *, last: bool = False) -> None:
        letters.append(of.letters + len(text))
        write(of, text, last=last)

    monkeypatch.setattr(Sentences, "write", counted)
    text = "The disc rolls by, and then it stops — here.\n\n" * 2000
    assert list(sentences_of(text)) == ["The disc rolls by, and then it stops — here."] * 2000
    assert max(letters) < 10_000
