"""From command-line options to a build's configuration, with every contradiction refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from seko_export.config import PRESETS, StreamConfig
from seko_export.environment import resolve_target
from seko_export.errors import UsageError
from seko_export.models.sampler import Schedule
from seko_export.pieces import BuildConfig

SAMPLE_PRESET = "tiny"
_SCHEMES = ("bf16", "fp4")


def build_config(
    has_checkpoint: bool,
    preset: str | None,
    kv_scheme: str | None,
    fp4_kv: bool,
    target: str,
    layout: Mapping[str, int | None],
) -> BuildConfig:
    """Return the configuration that the options of `seko-export build` mean.

    Parameters
    ----------
    has_checkpoint : bool
        Whether a checkpoint was named; then the preset must be too, because shapes alone do not tell heads.
    preset : str or None
        Name of a preset.
    kv_scheme : str or None
        ``--kv``.
    fp4_kv : bool
        ``--fp4-kv``.
    target : str
        ``auto``, ``cpu`` or ``sm_NN``.
    layout : mapping of str to int or None
        Fields of `StreamConfig` that replace the preset's where not None.

    Returns
    -------
    BuildConfig

    Raises
    ------
    UsageError
        If a name is unknown or options contradict each other.
    MachineError
        If this machine cannot build for the target.
    """
    if preset is None:
        if has_checkpoint:
            raise UsageError(f"name the checkpoint's model with --preset: one of {', '.join(PRESETS)}")
        preset = SAMPLE_PRESET
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset!r} is not known: expected one of {', '.join(PRESETS)}")
    if fp4_kv and kv_scheme not in (None, "fp4"):
        raise UsageError(f"--fp4-kv contradicts --kv {kv_scheme}: give one of them")
    if kv_scheme not in (None, *_SCHEMES):
        raise UsageError(f"--kv {kv_scheme!r} is not known: expected one of {', '.join(_SCHEMES)}")
    device = resolve_target(target).device
    chosen = PRESETS[preset]
    stream = replace(chosen.stream, **{name: size for name, size in layout.items() if size is not None})
    _check_sink(stream)
    exact = "bf16" if device == "cuda" else "fp32"
    scheme = "fp4" if fp4_kv or kv_scheme == "fp4" else exact
    return BuildConfig(chosen.model, stream, Schedule.warped(), scheme, device)


def _check_sink(stream: StreamConfig) -> None:
    """Refuse a sink larger than the ring: a Wan-derived window, which includes the sink, given as a ring."""
    if stream.sink_frames > stream.ring_frames:
        raise UsageError(
            f"--sink-frames {stream.sink_frames} is larger than --ring-frames {stream.ring_frames}: the ring stands "
            f"behind the sink, so the cache would hold {stream.cache_frames} latent frames and keep most of them "
            "for ever; for a window of N frames that includes the sink (Wan's local_attn_size) give --ring-frames "
            "N minus the sink"
        )
