"""Which cache formats are compared: the lossy schemes of seko_kernels, and the ideas on trial by name."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.kv_quality.trial_formats import (
    Rounding,
    TrialKv,
    e2m1,
    e4m3,
    int4_channels,
    int4_frames,
    int8_tokens,
    mxfp4,
    read_as_e4m3,
)
from seko_export.pieces import BuildConfig
from seko_kernels.kv_formats import EXACT_SCHEMES, SCHEMES, KvFormat, kv_format

# Run as streams beside the schemes unless the command names others.
STREAMED = ("fp8", "fp4-4/6", "fp4 chunk-exact", "fp4-4/6 chunk-exact")


@dataclass(frozen=True)
class Contender:
    """A format, and where its keys are rounded.

    Parameters
    ----------
    form : KvFormat
        The format.
    before_rope : bool
        Keys are rounded before RoPE and rotated on reading. The exported step stores rotated keys, so such a
        contender is measured on captured activations alone.
    window_mean : bool
        The mean taken off is the window's own instead of the calibrated one: what no writer can know, a bound.
    """

    form: KvFormat
    before_rope: bool = False
    window_mean: bool = False

    @property
    def name(self) -> str:
        """The format's name and what is done around it."""
        return self.form.name + " before-rope" * self.before_rope + " (window's own mean)" * self.window_mean

    @property
    def streams(self) -> bool:
        """Whether the exported step can run with it."""
        return not (self.before_rope or self.window_mean)


def schemes(config: BuildConfig) -> list[Contender]:
    """Return every lossy scheme that seko_kernels has."""
    lossy = (name for name in SCHEMES if name not in EXACT_SCHEMES)
    return [Contender(_shipped(name, config)) for name in lossy]


def ideas(config: BuildConfig) -> list[Contender]:
    """Return the ideas of the issue and of the literature, each against the plain fp4 of the schemes."""
    model, stream = config.model, config.stream
    sizes = (
        model.heads,
        model.head_dim,
        config.dtype,
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
    after = [
        trial("fp8", e4m3(), e4m3()),
        trial("int8 a scale per token", tokens, tokens),
        better(),
        fp4("k-mean"),
        fp4("k-mean", "v-mean"),
        fp4("hadamard"),
        fp4("sorted"),
        fp4("smooth"),
        fp4("sorted", "smooth"),
        better("k-mean", "sorted"),
        trial("fp4 read as e4m3", again, again),
        trial("fp4 in blocks of 32", e2m1(wide), e2m1(wide)),
        trial("fp4 a scale per head", e2m1(model.head_dim), e2m1(model.head_dim)),
        trial("mxfp4", mxfp4(wide), mxfp4(wide)),
        trial("int4 in groups of 16", groups, groups),
        trial("int4 k per channel and frame", frames, groups),
        trial("k-fp8 v-fp4", e4m3(), e2m1(16)),
        trial("k-fp4 v-fp8", e2m1(16), e4m3()),
        fp4("sink-exact"),
        fp4("chunk-exact"),
        fp4("sink-exact", "chunk-exact"),
        better("chunk-exact"),
        better("k-mean", "v-mean", "chunk-exact"),
        better("sorted", "chunk-exact"),
        trial("int8 a scale per token", tokens, tokens, "chunk-exact"),
        trial("int4 in groups of 16", groups, groups, "chunk-exact"),
    ]
    before = [
        fp4(),
        fp4("k-mean"),
        better("k-mean"),
        trial("int4 k per channel and frame", frames, groups),
        trial("int4 in groups of 16", groups, groups, "k-mean"),
        better("k-mean", "chunk-exact"),
    ]
    mean = fp4("k-mean")
    bounds = [Contender(mean, window_mean=True), Contender(mean, before_rope=True, window_mean=True)]
    return [*map(Contender, after), *(Contender(form, before_rope=True) for form in before), *bounds]


def find(names: list[str], config: BuildConfig) -> list[Contender]:
    """Return the contenders of these names that can run as streams; the device's exact scheme is one, too.

    Raises
    ------
    ValueError
        If there is no such name, or the exported step cannot run with it.
    """
    known = {
        c.name: c
        for c in [Contender(_shipped(config.exact_scheme, config)), *schemes(config), *ideas(config)]
    }
    odd = [name for name in names if name not in known or not known[name].streams]
    if odd:
        there = ", ".join(repr(name) for name, c in known.items() if c.streams)
        raise ValueError(f"no stream can be run with {odd[0]!r}; there are {there}")
    return [known[name] for name in names]


def _shipped(scheme: str, config: BuildConfig) -> KvFormat:
    return kv_format(scheme, config.model.heads, config.model.head_dim, config.dtype)
