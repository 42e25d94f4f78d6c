"""Writer of a VoxCPM2 folder of seeded random weights, with a small tokenizer of the same form as the public model's
tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch

from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.checkpoints.key_table import plain_spread
from seko_export.checkpoints.random import RandomFile, write_random_folder
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.keys import FILES, voxcpm2_shapes
from seko_export.families.voxcpm2.recognise import config_json
from seko_export.media.audio_vae.files import BOUNDARIES, audio_vae_shapes
from seko_export.media.audio_vae.files import FILES as VAE_FILES

TOKENIZER_FILE = "tokenizer.json"
# What the random tokenizer knows beside ASCII and bytes: characters, words of two, and a few English pieces.
_CHINESE = "你好世界今天气很说话声音"
_WORDS = ("你好", "世界", "今天", "天气", "说话", "声音")
_ENGLISH = ("he", "ll", "hell", "hello", "wo", "rl", "th", "the", "in", "on")
_MARKS = ("<|audio_start|>", "<|audio_end|>", "<|ref_start|>", "<|ref_end|>")
_FIRST_MARK = 101
_WORD = "▁"


def write_random_voxcpm2(
    path: Path, config: VoxCpm2Config, *, seed: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> None:
    """Write the checkpoint folder of a model: config.json, both files of weights, tokenizer.json.

    The weights of the audio VAE are float32 as in the original. `checkpoints.random.write_random_folder` documents the
    parameters and errors.
    """
    boundaries = torch.tensor(config.vae.rate_boundaries, dtype=torch.int32)
    files = {
        FILES[0]: RandomFile(voxcpm2_shapes(config), dtype),
        VAE_FILES[0]: RandomFile(
            audio_vae_shapes(config.vae), torch.float32, _vae_spread, {BOUNDARIES: boundaries}
        ),
    }
    documents = {CONFIG_FILE: config_json(config), TOKENIZER_FILE: tokenizer_json()}
    write_random_folder(path, files, documents, seed=seed, device=device)


def _vae_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and the deviation of a random weight of the audio VAE. Weights that scale a signal are near 1.

    The lengths of the VAE's weight norms are less than 1: with 1 activations grow to 200, and every sample is -1 or 1.
    """
    if name.endswith("weight_g"):
        return 0.7, 0.07
    if name.endswith(("alpha", "scale_embed.weight")):
        return 1.0, 0.1
    return (0.0, 0.1) if name.endswith("bias_embed.weight") else plain_spread(name, shape)


def tokenizer_json() -> dict[str, object]:
    """Return the content of tokenizer.json, which is Llama's byte-pair encoding over a small vocabulary of 400
    tokens."""
    tokens = ["<unk>", "<s>", "</s>", _WORD, *map(chr, range(33, 127))]
    tokens += [f"<unused{number}>" for number in range(_FIRST_MARK - len(tokens))]
    tokens += [*_MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), *_CHINESE]
    words = (*_WORDS, *(_WORD + word for word in _WORDS[:3]), *_ENGLISH, _WORD + _ENGLISH[3])
    known, merges = set(tokens), []
    for word in words:
        cuts = ((word[:cut], word[cut:]) for cut in range(1, len(word)))
        left, right = next(pair for pair in cuts if known.issuperset(pair))
        merges.append([left, right])
        known.add(word)
    specials = [*range(3), *range(_FIRST_MARK, _FIRST_MARK + len(_MARKS))]
    begin = {"SpecialToken": {"id": tokens[1], "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number in specials
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _WORD},
                {"type": "Replace", "pattern": {"String": " "}, "content": _WORD},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {tokens[1]: {"id": tokens[1], "ids": [1], "tokens": [tokens[1]]}},
        },
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate((*tokens, *words))},
            "merges": merges,
        },
    }


def stored_tensors(config: VoxCpm2Config) -> int:
    """Return the total number of tensors in the two weight files."""
    return len(voxcpm2_shapes(config)) + len(audio_vae_shapes(config.vae))
