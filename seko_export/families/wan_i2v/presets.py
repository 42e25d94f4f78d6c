"""Presets of Wan's image-to-video models, and tiny ones for tests."""

from __future__ import annotations

from dataclasses import replace

from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.video import FOR_TESTS, Preset
from seko_export.families.wan_i2v.model import WanI2vModel
from seko_export.families.wan_layout.recognise import USUAL_STREAM

I2V, FLF2V, A14B = "wan-i2v-14b", "wan-flf2v-14b", "wan-i2v-a14b"
TINY, TINY_LAST = "i2v-tiny", "flf2v-tiny"
_UNVERIFIED = (
    "a good video: the published weights were not trained for chunks, and no file was opened; weights that were "
    "trained so, with these keys, have streams and times of their own"
)
_NEEDS = "its CLIP file for --image-encoder, and a VAE that encodes"
_14B = WanI2vModel(name=I2V, layers=40, dim=5120, heads=40, ffn_dim=13824)
_TINY = WanI2vModel(
    name=TINY,
    layers=2,
    dim=128,
    heads=2,
    ffn_dim=192,
    text_dim=48,
    text_tokens=8,
    freq_dim=64,
    image_dim=32,
    image_tokens=5,
)
_TINY_STREAM = StreamConfig(height=32, width=48, chunk_frames=2, sink_frames=1, ring_frames=4)

# Of models with the same sizes, the first is taken where neither the file's name nor its config.json tells them apart.
PRESETS: dict[str, Preset] = {
    I2V: Preset(
        _14B,
        USUAL_STREAM,
        Schedule.warped(shift=3.0),
        source="Wan-AI/Wan2.1-I2V-14B-480P (Apache-2.0), and -720P, whose authors take shift 5; code Wan-Video/Wan2.1",
        needs=_NEEDS,
        unverified=_UNVERIFIED,
    ),
    FLF2V: Preset(
        replace(_14B, name=FLF2V, pictures=2),
        USUAL_STREAM,
        Schedule.warped(shift=5.0),
        source="Wan-AI/Wan2.1-FLF2V-14B-720P (Apache-2.0); code Wan-Video/Wan2.1",
        needs=_NEEDS,
        unverified=_UNVERIFIED,
    ),
    A14B: Preset(
        replace(_14B, name=A14B, image_dim=0),
        USUAL_STREAM,
        Schedule.warped(shift=5.0),
        source="one expert of Wan-AI/Wan2.2-I2V-A14B (Apache-2.0), high_noise_model or low_noise_model",
        needs="a VAE of Wan 2.1 that encodes",
        unverified=_UNVERIFIED,
    ),
    TINY: Preset(_TINY, _TINY_STREAM, source=FOR_TESTS),
    TINY_LAST: Preset(
        replace(_TINY, name=TINY_LAST, pictures=2),
        _TINY_STREAM,
        source=FOR_TESTS,
    ),
}
