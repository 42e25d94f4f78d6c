"""From text and voices to sound, whole, against the original's own `generate_streaming`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from scripts.random_speech import tokenizer_json
from seko_runtime.speech.manifest import SpeechLimits
from seko_runtime.speech.prompts import assemble, pad_voice
from seko_runtime.speech.tokens import SpeechTokenizer
from tests.support.tolerances import relative_error
from tests.voxcpm2.eager_speech import EagerSpeech
from tests.voxcpm2.models import PLAIN, ours
from tests.voxcpm2.oracle import original, original_model, quiet
from tests.voxcpm2.test_truth import FREE_BAR

MODES = {
    "text": (),
    "reference": ("reference",),
    "continued": ("continued",),
    "both": ("reference", "continued"),
}
TEXT, OLD_TEXT = "hello 世界", "你好 the "
PATCH = PLAIN.patch_size * PLAIN.vae.encoder_stride


def voice(seed: int, samples: int) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).standard_normal(samples)
    return (0.3 * drawn).astype(np.float32)


# No whole number of patches, and more than one call of the voice encoder.
VOICES = {"reference": voice(1, 9 * PATCH + 5), "continued": voice(2, 4 * PATCH + 9)}
TOKENS = SpeechTokenizer(json.dumps(tokenizer_json()).encode(), "tokenizer.json", PLAIN.vocab_size)


def said_by_the_original(
    model: Any, voices: tuple[str, ...], count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sound of each patch, and the noise that each began with."""
    package, noises = original(), []
    model.text_tokenizer = lambda text: TOKENS.ids(text).tolist()
    sounds = mock.Mock(load=lambda path, **_: (VOICES[path], PLAIN.vae.sample_rate))
    draw = torch.randn

    def drawn(*sizes: Any, **named: Any) -> Tensor:
        noises.append(draw(*sizes, **named))
        return noises[-1]

    names = {"reference": "reference_wav_path", "continued": "prompt_wav_path"}
    torch.manual_seed(4)
    with (
        quiet(),
        mock.patch.object(package.model, "librosa", sounds),
        mock.patch.object(torch, "randn", drawn),
    ):
        stream = model.generate_streaming(
            TEXT,
            prompt_text=OLD_TEXT if "continued" in voices else "",
            min_len=count,
            max_len=count,
            **{names[kind]: kind for kind in voices},
        )
        return list(stream), noises


def encoded(speech: EagerSpeech, samples: NDArray[np.float32], *, continued: bool) -> NDArray[np.float32]:
    """Return the patches [n, P, C] of a voice: filled up to whole patches, encoded in whole calls."""
    whole = pad_voice(samples, PATCH, continued=continued)
    count = len(whole) // PATCH
    whole = pad_voice(whole, PATCH * speech.layout.voice_patches, continued=False)
    latents = speech.encode(torch.from_numpy(whole))
    return latents.unflatten(0, (-1, PLAIN.patch_size))[:count].numpy()


@pytest.mark.parametrize("mode", MODES)
def test_a_sentence_is_the_originals(mode: str, worst: Callable[[str, float], None]) -> None:
    voices, count = MODES[mode], 6
    model = original_model(PLAIN, seed=11)
    wanted, noises = said_by_the_original(model, voices, count)
    speech = ours(model, PLAIN)
    text = TOKENS.ids((OLD_TEXT if "continued" in voices else "") + TEXT)
    patches = {kind: encoded(speech, VOICES[kind], continued=kind == "continued") for kind in voices}
    prompt = assemble(text, PLAIN.patch_shape, **patches)
    assert len(wanted) == count < SpeechLimits().patches(len(TOKENS.ids(TEXT)))
    speech.prefill(0, asdict(prompt), start=3, tokens=16, length=64)
    for number, (sound, noise) in enumerate(zip(wanted, noises, strict=True)):
        samples = speech.step([0], 64, noise.transpose(1, 2).contiguous())["samples"]
        error = relative_error(samples, sound)
        worst(f"VoxCPM2 sound, {mode}", error)
        assert error <= FREE_BAR, number
