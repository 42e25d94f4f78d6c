"""Prompts and token ids of speech against the original's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from scripts.random_speech import tokenizer_json
from seko_export.families.voxcpm2.presets import PRESETS, TINY
from seko_runtime.errors import ArtifactError, UsageError
from seko_runtime.speech.manifest import SpeechLimits
from seko_runtime.speech.prompts import assemble, pad_voice
from seko_runtime.speech.texts import joined, says_something, spoken_text
from seko_runtime.speech.tokens import SpeechTokenizer
from seko_runtime.speech.voice import Voice
from tests.voxcpm2.oracle import original, original_model, quiet

CONFIG = PRESETS[TINY]
MODES = {
    "text": (),
    "reference": ("reference",),
    "continued": ("continued",),
    "both": ("reference", "continued"),
}
DOCUMENT = json.dumps(tokenizer_json()).encode()


def voice(seed: int, count: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((count, *CONFIG.patch_shape)).astype(np.float32)


VOICES = {"reference": voice(1, 3), "continued": voice(2, 5)}


@pytest.fixture(scope="module")
def arguments_of() -> Any:
    """What the original hands to its loop in each mode, with voices that are encoded already."""
    model = original_model(CONFIG)
    words = {"an old text": [7, 8], "a new text": [9, 10, 11], "an old texta new text": [7, 8, 9, 10, 11]}
    model.text_tokenizer = words.__getitem__
    model._encode_wav = lambda path, **_: torch.from_numpy(VOICES[path])
    seen: list[tuple[Tensor, ...]] = []

    def loop(*arguments: Tensor, **named: Any) -> Any:
        seen.append((*arguments, torch.tensor(named["max_len"])))
        yield torch.zeros(1, *reversed(CONFIG.patch_shape)), torch.zeros(1), 0

    model._inference = loop

    def arguments(*voices: str) -> tuple[Tensor, ...]:
        named = {"reference": "reference_wav_path", "continued": "prompt_wav_path"}
        with quiet():
            model.generate(
                "a new text",
                prompt_text="an old text" if "continued" in voices else "",
                **{named[kind]: kind for kind in voices},
            )
        return seen[-1]

    return arguments


@pytest.mark.parametrize("mode", MODES)
def test_each_kind_of_prompt_is_the_originals(mode: str, arguments_of: Any) -> None:
    ids, text_mask, patches, is_audio, limit = arguments_of(*MODES[mode])
    text = [7, 8, 9, 10, 11] if "continued" in MODES[mode] else [9, 10, 11]
    prompt = assemble(np.array(text), CONFIG.patch_shape, **{kind: VOICES[kind] for kind in MODES[mode]})
    assert np.array_equal(prompt.ids, ids[0])
    assert np.array_equal(prompt.is_audio, is_audio[0].bool())
    assert np.array_equal(prompt.is_audio, ~text_mask[0].bool())
    assert np.array_equal(prompt.patches, patches[0])
    assert SpeechLimits().patches(3) == limit == 28
    assert (prompt.ids.dtype, prompt.is_audio.dtype, prompt.patches.dtype) == (np.int64, np.bool_, np.float32)
    context = VOICES["continued"][-3:] if "continued" in MODES[mode] else VOICES["continued"][:0]
    assert np.array_equal(prompt.context, context)


def test_a_long_text_has_the_originals_limit() -> None:
    assert [SpeechLimits().patches(count) for count in (1, 331, 332, 5000)] == [16, 1996, 2000, 2000]
    assert SpeechLimits(most_patches=100).patches(50) == 100


def test_voices_are_filled_up_to_whole_patches() -> None:
    """A reference behind its end; a voice that goes on before its begin, so that speech ends where it is continued."""
    samples = np.arange(1, 6, dtype=np.float32)
    assert pad_voice(samples, 4, continued=False).tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert pad_voice(samples, 4, continued=True).tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert pad_voice(samples, 5, continued=True) is not None
    assert len(pad_voice(samples, 5, continued=True)) == 5


def test_what_makes_no_prompt_is_refused() -> None:
    none, some = np.array([], np.int64), np.array([3])
    with pytest.raises(UsageError, match="with at least one token"):
        assemble(none, CONFIG.patch_shape)
    with pytest.raises(UsageError, match=r"reference has patches of shape \[2, 4, 9\]"):
        assemble(some, CONFIG.patch_shape, reference=np.zeros((2, 4, 9), np.float32))
    with pytest.raises(UsageError, match="continued voice has patches"):
        assemble(some, CONFIG.patch_shape, continued=np.zeros((0, 4, 8), np.float32))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The original's tokenizer, from the same file."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_bytes(DOCUMENT)
    loaded = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    return original().utils.mask_multichar_chinese_tokens(loaded)


OURS = SpeechTokenizer(DOCUMENT, "tokenizer.json", CONFIG.vocab_size)
LETTERS = st.sampled_from([*"你好世界今天气很说话声音龙", *"hello world the", " ", "é", "🎉", "<", "1"])
PARTS = st.lists(
    st.sampled_from(["你好", "世界", "今天天气", "hello", " ", "说话声音", "\n", "。"]) | LETTERS
)


@given(PARTS.map("".join))
def test_token_ids_are_the_originals(theirs: Any, text: str) -> None:
    assert OURS.ids(text).tolist() == theirs(text)


def test_chinese_words_are_split_and_there_is_no_begin_mark() -> None:
    vocabulary = tokenizer_json()["model"]["vocab"]  # type: ignore[index]
    names = {number: token for token, number in vocabulary.items()}
    said = [names[number] for number in OURS.ids("你好 世界hello")]
    # the word's mark goes with the split, as in the original
    assert said == ["你", "好", "世", "界", "hello"]
    assert "你好" in vocabulary
    assert len(OURS.ids("")) == 0


def test_a_text_that_is_none_and_files_of_others_are_refused() -> None:
    with pytest.raises(UsageError, match="a int, expected a string"):
        OURS.ids(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="65537 characters"):
        OURS.ids("a" * 65537)
    with pytest.raises(ArtifactError, match="rebuild the artifact"):
        SpeechTokenizer(DOCUMENT, "tokenizer.json", 20).ids("hello")
    with pytest.raises(ArtifactError, match="is no file of tokenizers"):
        SpeechTokenizer(b"{}", "tokenizer.json").ids("hello")


SENTENCES = ("a new text", "then more")


@pytest.mark.parametrize("mode", MODES)
def test_a_sentence_continues_the_one_before_as_the_original_merges_it(mode: str) -> None:
    """`merge_prompt_cache`, which the package offers to keep a voice, with the generated patches of a sentence."""
    model, kinds, seen = original_model(CONFIG), MODES[mode], list[tuple[Tensor, ...]]()
    model.text_tokenizer = lambda text: [ord(letter) % 40 for letter in text]
    model._encode_wav = lambda path, **_: torch.from_numpy(VOICES[path])

    def loop(*arguments: Tensor, **_: Any) -> Any:
        seen.append(arguments)
        yield torch.zeros(1, *reversed(CONFIG.patch_shape)), torch.zeros(1), 0

    model._inference = loop
    said = voice(3, 4)
    named = {"reference": "reference_wav_path", "continued": "prompt_wav_path"}
    with quiet():
        cache = (
            model.build_prompt_cache(
                prompt_text="an old text" if "continued" in kinds else None,
                **{named[kind]: kind for kind in kinds},
            )
            if kinds
            else None
        )
        blank = " " if "continued" in kinds else ""
        merged = model.merge_prompt_cache(cache, blank + SENTENCES[0], torch.from_numpy(said))
        model.generate_with_prompt_cache(f" {SENTENCES[1]}", merged)
    ids, _, patches, is_audio = seen[-1]
    own = Voice(**{kind: VOICES[kind] for kind in kinds}, text="an old text" if "continued" in kinds else "")
    before = own.then(SENTENCES[0], said)
    prompt = assemble(
        np.array(model.text_tokenizer(joined(before.text, SENTENCES[1]))),
        CONFIG.patch_shape,
        reference=before.reference,
        continued=before.continued,
    )
    assert np.array_equal(prompt.ids, ids[0])
    assert np.array_equal(prompt.is_audio, is_audio[0].bool())
    assert np.array_equal(prompt.patches, patches[0])


@given(st.text(st.sampled_from("abc \n\t\r\x0b\x1c\x85\xa0\u2028\u3000"), max_size=20))
def test_white_space_is_read_as_in_the_original(text: str) -> None:
    core = importlib.import_module(f"{original().model.__name__.split('.')[0]}.core")
    seen: list[str] = []

    class Model:
        def _generate_with_prompt_cache(self, target_text: str, **_: Any) -> Any:
            seen.append(target_text)
            yield torch.zeros(1, 1), None, None

    package = core.VoxCPM.__new__(core.VoxCPM)
    package.tts_model, package.text_normalizer, package.denoiser = Model(), None, None
    if not says_something(text):
        with pytest.raises(UsageError, match="nothing to say"):
            spoken_text(text)
        return
    package.generate(text)
    assert spoken_text(text) == seen[-1]
