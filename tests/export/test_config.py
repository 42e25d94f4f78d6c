"""Configurations: derived sizes of the presets, and refusals that name what contradicts what."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_export.config.model import HEAD_UNIT, ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.families.wan.presets import PRESETS
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_kernels.formats import NVFP4_BLOCK

MODEL = {"name": "m", "layers": 2, "dim": 256, "heads": 2, "ffn_dim": 512}
STREAM = {"height": 64, "width": 96, "chunk_frames": 3, "sink_frames": 1, "ring_frames": 6}


@pytest.mark.parametrize(
    ("preset", "head_dim", "frame_tokens", "chunk_tokens", "cache_tokens", "latent"),
    [
        ("tiny", 128, 24, 72, 168, (8, 12)),
        ("self-forcing-1.3b", 128, 1560, 4680, 32760, (60, 104)),
        ("wan-14b", 128, 1560, 4680, 32760, (60, 104)),
    ],
)
def test_preset_sizes(preset, head_dim, frame_tokens, chunk_tokens, cache_tokens, latent):
    model, stream = PRESETS[preset].model, PRESETS[preset].stream
    assert model.name == preset
    assert model.head_dim == head_dim
    assert stream.frame_tokens == frame_tokens
    assert stream.chunk_tokens == chunk_tokens
    assert stream.cache_tokens == cache_tokens
    assert (stream.latent_height, stream.latent_width) == latent


@pytest.mark.parametrize(("preset", "per_token"), [("self-forcing-1.3b", 184_320), ("wan-14b", 819_200)])
def test_bf16_cache_bytes_a_token(preset, per_token):
    """K and V of all layers, two bytes a channel; a block of any cache lies in one head."""
    assert HEAD_UNIT == NVFP4_BLOCK
    model = PRESETS[preset].model
    assert 2 * model.layers * model.dim * 2 == per_token


@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 80),
    chunk=st.integers(1, 9),
    sink=st.integers(0, 9),
    spare=st.integers(0, 9),
)
def test_sizes_follow_from_the_layout(rows, columns, chunk, sink, spare):
    stream = StreamConfig(16 * rows, 16 * columns, chunk, sink, chunk + spare)
    assert stream.frame_tokens == rows * columns
    assert stream.chunk_tokens == chunk * rows * columns
    assert stream.cache_tokens == (sink + chunk + spare) * rows * columns


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dim": 250, "heads": 4}, ("dim 250", "heads 4")),
        ({"dim": 48, "heads": 2}, ("head_dim 24", "16")),
        ({"freq_dim": 63}, ("freq_dim 63", "even")),
        ({"norm_eps": 0.0}, ("norm_eps 0.0",)),
        ({"norm_eps": float("nan")}, ("norm_eps nan",)),
        ({"rope_theta": 1.0}, ("rope_theta 1.0",)),
        *(
            ({field: value}, (field, str(value)))
            for field in (
                *("layers", "dim", "heads", "ffn_dim", "in_channels", "out_channels"),
                *("text_dim", "text_tokens", "freq_dim"),
            )
            for value in (0, -2)
        ),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(change, named):
    with pytest.raises(UsageError) as raised:
        ModelConfig(**{**MODEL, **change})
    for words in named:
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"height": 72}, ("height 72", "16")),
        ({"width": 100}, ("width 100", "16")),
        ({"height": 0}, ("height 0", "16")),
        ({"width": -16}, ("width -16", "16")),
        ({"chunk_frames": 0}, ("chunk_frames 0", "at least 1")),
        ({"batch": 0}, ("batch 0", "at least 1")),
        ({"fps": 0}, ("fps 0", "at least 1")),
        ({"sink_frames": -1}, ("sink_frames -1", "at least 0")),
        ({"chunk_frames": 7}, ("chunk of 7", "ring of 6", "--ring-frames")),
    ],
)
def test_a_stream_that_cannot_be_laid_out_is_refused(change, named):
    with pytest.raises(UsageError) as raised:
        StreamConfig(**{**STREAM, **change})
    for words in named:
        assert words in str(raised.value)


def test_configs_are_frozen():
    for config in (ModelConfig(**MODEL), StreamConfig(**STREAM)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.batch = 2


def test_a_vae_fits_by_the_channels_that_a_model_gives():
    """What goes in may have a condition beside the latents."""
    preset = PRESETS["tiny"]
    build = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "fp32", vae=WanVaeConfig()),
        TargetConfig("cpu"),
    )
    beside = dataclasses.replace(build, model=dataclasses.replace(preset.model, in_channels=36))
    assert beside.workload.vae == WanVaeConfig()
    with pytest.raises(UsageError, match="16 latent channels, 'tiny' gives 48"):
        dataclasses.replace(build, model=dataclasses.replace(preset.model, out_channels=48))


@pytest.mark.parametrize(
    ("height", "width", "stride", "offered"),
    [(720, 1280, 16, "704x1280"), (1280, 720, 16, "1280x704"), (90, 100, 8, "80x96"), (5, 64, 8, "16x64")],
)
def test_a_size_that_no_patch_fits_is_refused_with_one_that_does(height, width, stride, offered):
    """720p is no size of the 5B model, 704x1280 is."""
    with pytest.raises(
        UsageError, match=rf"multiple of .* nearest video that fits is {offered} \(height x width\)"
    ):
        StreamConfig(height, width, 3, 1, 6, spatial_stride=stride)
