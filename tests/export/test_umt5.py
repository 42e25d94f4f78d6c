"""The text encoder against transformers', run as pipelines run it; its config; the cleaning of prompts."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seko_export.config.media import TextEncoderConfig
from seko_export.errors import UsageError
from seko_export.media.umt5.encoder import TextEncoder, position_buckets
from seko_export.media.umt5.keys import text_shapes, text_transformers_names
from seko_runtime.video.text import clean_prompt
from tests.export.media_files import transformers_config
from tests.support.tolerances import STEP, relative_error

SMALL = TextEncoderConfig(
    vocab_size=96, dim=48, heads=3, head_dim=32, ffn_dim=80, layers=3, buckets=16, max_distance=64
)
TOKENS = 100  # past max_distance


def some_weights(config: TextEncoderConfig) -> dict[str, Tensor]:
    """Weights that keep activations and scores near 1, by Wan's names."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in text_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_matrix = len(shape) == 2 and "embedding" not in name
        weights[name] = noise * shape[1] ** -0.5 if is_matrix else 1 + noise
        if name.endswith("attn.q.weight"):
            weights[name] *= config.head_dim**-0.5  # T5 has this factor in its weights
    return weights


def some_ids(lengths: tuple[int, ...], tokens: int = TOKENS) -> Tensor:
    """Return [B, T] int64, zeros behind each length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SMALL.vocab_size, (len(lengths), tokens), generator=generator)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    return ids


def encoder(config: TextEncoderConfig = SMALL, dtype: torch.dtype = torch.float32) -> TextEncoder:
    model = TextEncoder(config, dtype).eval().requires_grad_(False)
    model.load_state_dict(some_weights(config))
    return model


def theirs(config: TextEncoderConfig):
    """transformers' encoder with the same weights."""
    from transformers import UMT5EncoderModel

    model = UMT5EncoderModel(transformers_config(config)).eval()
    names = text_transformers_names(config)
    weights = {names[name]: tensor for name, tensor in some_weights(config).items()}
    left = model.load_state_dict(weights, strict=False)
    assert left.missing_keys == ["encoder.embed_tokens.weight"]  # tied to the one that is there
    assert not left.unexpected_keys
    return model.requires_grad_(False)


@pytest.mark.shows("umt5")
def test_it_is_transformers_encoder_with_mask_and_zeros() -> None:
    ids = some_ids((TOKENS, 37, 1))
    mask = (ids != 0).long()
    wanted = theirs(SMALL)(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
    got = encoder()(ids)
    assert relative_error(got, wanted) <= STEP[torch.float32]
    assert not got[1, 37:].any()
    assert not got[2, 1:].any()
    assert got[2, 0].any()


def test_half_precision_keeps_its_dtype() -> None:
    ids = some_ids((60, 7))
    got, whole = encoder(dtype=torch.bfloat16)(ids), encoder()(ids)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, whole) < 0.1  # no bar of its own: only that nothing is off by a factor


def test_padding_changes_nothing() -> None:
    """A prompt in a longer row gives the same embeddings: the mask holds."""
    short, long = encoder()(some_ids((20,), 24)), encoder()(some_ids((20,), 24).new_zeros(1, 90))
    ids = torch.zeros(1, 90, dtype=torch.int64)
    ids[:, :20] = some_ids((20,), 24)[:, :20]
    assert relative_error(encoder()(ids)[:, :20], short[:, :20]) <= STEP[torch.float32]
    assert long.isfinite().all()  # even of no token at all


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 64), (8, 20)])
def test_buckets_are_the_published_formula(buckets: int, distance: int) -> None:
    """Number by number, with Python's own arithmetic."""
    config = TextEncoderConfig(vocab_size=9, layers=1, buckets=buckets, max_distance=distance)
    got = position_buckets(150, config, torch.device("cpu"))
    half, near = buckets // 2, buckets // 4
    for query in (0, 75, 149):
        for key in range(150):
            gap = abs(key - query)
            place = gap
            if gap >= near:
                grown = math.log(gap / near) / math.log(distance / near) * (half - near)
                place = min(near + int(grown + 1e-9), half - 1)
            assert got[query, key] == place + half * (key > query), (query, key)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers must be a whole number from 1"),
        ({"layers": 10**7}, "layers must be a whole number from 1 to 1024, got 10000000"),
        ({"vocab_size": 2**62}, "vocab_size must be a whole number from 1 to 1048576"),
        ({"buckets": 6}, "buckets 6 must be a multiple of 4"),
        ({"max_distance": 8}, "max_distance 8 must be above 8"),
        ({"pad_id": 256_384}, "pad_id 256384 is no token"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TextEncoderConfig(**fields)


@given(
    st.text(
        st.characters(exclude_categories=["Cs"]) | st.sampled_from("&;#ampltx \t\n\u201c\u2019"), max_size=80
    )
)
def test_a_prompt_is_cleaned_as_in_diffusers_pipeline(prompt: str) -> None:
    assert clean_prompt(prompt) == pipeline_wan.prompt_clean(prompt)
