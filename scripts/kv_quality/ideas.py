"""Which cache formats are compared: the lossy schemes of seko_kernels, and the ideas on trial by name."""

from __future__ import annotations

from dataclasses import replace

from scripts.kv_quality.roundings import (
    Rounding,
    e2m1,
    e4m3,
    int4_channels,
    int4_frames,
    int4_normed,
    int8_tokens,
    mixed,
    mxfp4,
    read_as_e4m3,
)
from scripts.kv_quality.trial_formats import TrialKv
from seko_export.config.video import VideoBuild
from seko_kernels.formats import NUMBER_FORMATS
from seko_kernels.kv_formats import KvFormat
from seko_kernels.kv_schemes import kv_format

# Run as streams beside the schemes unless the command names others.
STREAMED = (
    "fp8",
    "fp4",
)


def schemes(config: VideoBuild) -> list[KvFormat]:
    """Return every way to store numbers that seko_kernels has and the model's heads can be cut for."""
    fitting = (name for name, form in NUMBER_FORMATS.items() if config.model.head_dim % form.unit == 0)
    return [_shipped(name, config) for name in fitting]


def ideas(config: VideoBuild) -> list[KvFormat]:
    """Return the ideas of the issue and of the literature, each against ``fp4``: the first format, after RoPE."""
    model, stream = config.model, config.workload.stream
    sizes = (
        model.heads,
        model.head_dim,
        config.target.dtype,
        stream.sink_frames * stream.frame_tokens,
        stream.cache_tokens,
    )

    def trial(stored: str, k: Rounding, v: Rounding, *tricks: str) -> TrialKv:
        return TrialKv(stored, *sizes, k, v, tricks)

    def fp4(*tricks: str) -> TrialKv:
        return trial("fp4", e2m1(16), e2m1(16), *tricks)

    def better(*tricks: str) -> TrialKv:
        return trial("fp4-4/6", e2m1(16, four_over_six=True), e2m1(16, four_over_six=True), *tricks)

    wide, frames, groups = min(32, model.head_dim), int4_frames(stream.frame_tokens), int4_channels(16)
    tokens, again = int8_tokens(model.head_dim), read_as_e4m3(e2m1(16))
    coarse = int4_channels(wide)
    normed, past = int4_normed(model.heads, model.head_dim), ("before-rope", "k-mean")
    int4 = trial("int4 in groups of 16", groups, groups)
    return [
        trial("fp8", e4m3(), e4m3()),
        trial("int8 a scale per token", tokens, tokens),
        fp4(),
        better(),
        fp4("k-mean"),
        fp4("turning-mean"),
        better("turning-mean"),
        fp4("before-rope"),
        fp4("before-rope", "k-mean"),
        better("before-rope", "k-mean"),
        better("before-rope", "k-mean", "v-mean"),
        better("before-rope", "k-mean", "sink-exact"),
        fp4("hadamard"),
        trial("fp4 read as e4m3", again, again),
        trial("fp4 in blocks of 32", e2m1(wide), e2m1(wide)),
        trial("fp4 a scale per head", e2m1(model.head_dim), e2m1(model.head_dim)),
        trial("mxfp4", mxfp4(wide), mxfp4(wide)),
        int4,
        replace(int4, tricks=("before-rope", "k-mean")),
        trial("int4 mixed, in groups of 32", mixed(coarse), mixed(coarse), *past),
        trial("int4 over one norm a token", normed, normed, *past),
        trial("int4 mixed, over one norm a token", mixed(normed), mixed(normed), *past),
        trial("int4 k per channel and frame", frames, groups),
        trial("int4 k per channel and frame", frames, groups, "before-rope"),
        trial("k-fp8 v-fp4", e4m3(), e2m1(16)),
        trial("k-fp4 v-fp8", e2m1(16), e4m3()),
        fp4("sink-exact"),
    ]


def find(names: list[str], config: VideoBuild) -> list[KvFormat]:
    """Return the formats of these names; the device's exact scheme is one, too.

    Raises
    ------
    ValueError
        If there is no such name.
    """
    there = [_shipped(config.exact_scheme, config), *schemes(config), *ideas(config)]
    known = {form.name: form for form in there}
    odd = [name for name in names if name not in known]
    if odd:
        raise ValueError(f"no format {odd[0]!r}; there are {', '.join(map(repr, known))}")
    return [known[name] for name in names]


def _shipped(scheme: str, config: VideoBuild) -> KvFormat:
    return kv_format(scheme, config.model.heads, config.model.head_dim, config.target.dtype)
