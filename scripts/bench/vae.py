"""The VAE's decoding at full size on one GPU: engines, captured, against diffusers eager. One row a figure.

Random weights of the published size: they cost what trained ones do. Decoded are chunks of latents, as a stream brings
them: three, or four of Wan 2.2. diffusers takes one latent a call, which is how it decodes any
clip; without it our own eager modules do the same. The engine's time holds what a session does with it: the copies of
the caches and frames as bytes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from scripts.bench.rows import append_row
from scripts.bench.table import OWN_MODULES
from scripts.bench.vae_engines import (
    DECODERS,
    DecodeSession,
    Reference,
    build,
    clip_times,
    diffusers_vae,
    forget,
    random_weights,
    rms,
    timed,
)
from scripts.random_vae import SIZES
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan.presets import PRESETS
from seko_export.host.environment import local_gpu_arch, resolve_target
from seko_export.media.wan_vae.config import WAN_2_1, WAN_2_2, WanVaeConfig
from seko_export.media.wan_vae.modules import VaeDecode, latent_statistics
from seko_kernels.tuned_conv import has_fp8_convolutions

CHUNKS = 3  # decoded for the difference and, but for the first one, for eager's time


@dataclass(frozen=True)
class Case:
    """A case to measure: a model's latents, the size of a chunk in latent frames and pixels, and the name of the row.

    Parameters
    ----------
    preset : str
        Preset of the model.
    latents : int
        Latent frames of one call.
    height, width : int
        Size of the picture in pixels.
    figure, fp8_figure : str
        Names of the rows, without and with fp8 convolutions.
    bar, fp8_bar : float
        Their goals: largest allowed ratios to the time of the eager VAE.
    title : str
        Name of the VAE in rows.
    """

    preset: str
    latents: int
    height: int
    width: int
    figure: str
    bar: float
    fp8_figure: str
    fp8_bar: float
    title: str


CASES = {
    WAN_2_1: Case(
        preset="self-forcing-1.3b",
        latents=3,
        height=480,
        width=832,
        figure="vae_vs_eager",
        bar=0.28,
        fp8_figure="vae_fp8_vs_eager",
        fp8_bar=0.21,
        title="Wan VAE, base_dim 96",
    ),
    WAN_2_2: Case(
        preset="wan-5b",
        latents=4,
        height=704,
        width=1280,
        figure="vae22_vs_eager",
        bar=0.45,
        fp8_figure="vae22_fp8_vs_eager",
        fp8_bar=0.45,
        title="Wan 2.2 VAE",
    ),
}


def run(options: argparse.Namespace) -> None:
    """Build the two engines, run them and the reference, append the rows."""
    config, vae = build_config(options.height, options.width, options.vae, fp8=options.fp8)
    build_s = build(config, options.work)
    if options.prepare:
        return
    weights = random_weights(vae) | latent_statistics(vae, torch.float32)
    latents = some_latents(config, CHUNKS).to(config.target.device)
    with torch.no_grad():
        compare(config, weights, latents, options, described(config, options.vae), build_s)


def case_of(name: str) -> Case:
    """Return the case of a VAE; that of a trial's, whose name ends in ``-tiny``, is the full one's."""
    return CASES[name.removesuffix("-tiny")]


def config_of(name: str) -> WanVaeConfig:
    """Return the VAE of a name."""
    config = SIZES[name]
    assert isinstance(config, WanVaeConfig), name
    return config


def build_config(
    height: int | None, width: int | None, name: str, ranks: int = 1, *, fp8: bool = False
) -> tuple[VideoBuild, WanVaeConfig]:
    """Return a build with the VAE of this name, for this machine, and its VAE."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case, vae = case_of(name), replace(config_of(name), fp8=fp8)
    if fp8 and not has_fp8_convolutions(resolve_target("auto").arch, vae.fp8_channels):
        raise SystemExit(
            f"no fp8 convolution of {name} was measured on this GPU: run python -m scripts.bench vae_kernels"
        )
    stream = StreamConfig(
        height or case.height,
        width or case.width,
        chunk_frames=case.latents,
        sink_frames=0,
        ring_frames=21,
        spatial_stride=vae.spatial_stride,
        fps=PRESETS[case.preset].stream.fps,
    )
    scheme = "bf16" if device == "cuda" else "fp32"
    model = PRESETS[case.preset].model
    return VideoBuild(
        model,
        VideoConfig(stream, Schedule.warped(), scheme, vae=vae),
        TargetConfig(device, ranks=ranks, convolutions=local_gpu_arch() or ""),
    ), vae


def described(config: VideoBuild, name: str) -> str:
    """Return what is decoded, for a row."""
    stream, case = config.workload.stream, case_of(name)
    return (
        f"{case.title}, {stream.height}x{stream.width}, {case.latents} latents, {config.workload.kv_scheme}"
        f"{', fp8 convolutions' if in_fp8(config) else ''}"
    )


def wan_vae(config: VideoBuild) -> WanVaeConfig:
    """Return a build's VAE."""
    assert isinstance(config.workload.vae, WanVaeConfig)
    return config.workload.vae


def in_fp8(config: VideoBuild) -> bool:
    """Return whether the decoder has fp8 convolutions."""
    return wan_vae(config).computes_fp8


def compare(
    config: VideoBuild,
    weights: dict[str, Tensor],
    latents: Tensor,
    options: argparse.Namespace,
    shape: str,
    build_s: dict[str, float],
) -> None:
    """Time engines and reference; then compare pictures."""
    case = CASES[options.vae]
    figure, bar = (case.fp8_figure, case.fp8_bar) if options.fp8 else (case.figure, case.bar)
    session = DecodeSession(config, weights, options.work)
    chunks = latents.split(config.workload.stream.chunk_frames, dim=2)
    pictures = torch.cat([session.decode(chunk).clone() for chunk in chunks]).cpu()
    engine = {kind: timed(session.runs[kind], options.repeats) for kind in DECODERS}
    engine_peak = session.peak_bytes()
    del session
    forget()

    reference = eager_reference(config, weights, config.target.dtype)
    eager, eager_peak = eager_times(reference, latents, max(2, options.repeats // 4))
    name = reference.name
    del reference
    forget()
    video_ms = 1000 * 4 * config.workload.stream.chunk_frames / config.workload.stream.fps
    append_row(
        options.rows,
        figure,
        shape,
        engine["vae_decode"] / eager["vae_decode"],
        "engine / eager, a steady chunk",
        None if OWN_MODULES in name else bar,
        reference=name,
        engine_ms=engine["vae_decode"],
        eager_ms=eager["vae_decode"],
        first_engine_ms=engine["vae_decode_first"],
        first_eager_ms=eager["vae_decode_first"],
        real_time_factor=video_ms / engine["vae_decode"],
        engine_peak_bytes=engine_peak,
        eager_peak_bytes=eager_peak,
        build_s=build_s,
    )
    differences(config, weights, latents, pictures, options.rows, shape)


def differences(
    config: VideoBuild,
    weights: dict[str, Tensor],
    latents: Tensor,
    pictures: Tensor,
    rows: Path,
    shape: str,
) -> None:
    """Append how far the engines' pictures are from the reference in float32, beside the reference in their dtype."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = (
        False  # the truth is in whole float32
    )
    truth = eager_reference(config, weights, torch.float32)
    wanted = levels(truth.run(latents))
    name = truth.name
    del truth
    forget()
    same = eager_reference(config, weights, config.target.dtype)
    beside = levels(same.run(latents))
    del same
    forget()
    error, allowed = rms(pictures.double(), wanted), rms(beside, wanted)
    # FlashAttention's rule: twice the error of the same-dtype reference; pictures are rounded to levels beside.
    append_row(
        rows,
        "vae_difference",
        shape,
        error,
        "levels of 255, rms against float32",
        None if in_fp8(config) else 2 * allowed + 1 / math.sqrt(12),
        reference=name,
        same_dtype_eager=allowed,
        engine_against_same_dtype=rms(pictures.double(), beside),
        contrast=float(wanted.std()),
    )
    if in_fp8(config):
        psnr = 20 * math.log10(255 / rms(pictures.double(), beside))
        append_row(rows, "vae_fp8_psnr", shape, psnr, "dB against eager bf16", None, reference=name)


def eager_reference(config: VideoBuild, weights: dict[str, Tensor], dtype: torch.dtype) -> Reference:
    """Return diffusers' decoder with these weights, or ours called as diffusers calls its own: of latents
    [1, z, F, h, w] float32, normalised, to video [1, 3, T, H, W] in -1..1."""
    vae, device = wan_vae(config), config.target.device
    statistics = {n: t.to(device).view(-1, 1, 1, 1) for n, t in latent_statistics(vae, torch.float32).items()}

    def unnormalised(latents: Tensor) -> Tensor:
        return (latents * statistics["latents_std"] + statistics["latents_mean"]).to(dtype)

    named_model = diffusers_vae(vae, weights)
    if named_model is None:
        return Reference(f"{OWN_MODULES}, eager, one latent a call", own_decoder(config, weights, dtype))
    name, model = named_model
    model.to(device, dtype)
    return Reference(name, lambda latents: model.decode(unnormalised(latents)).sample)


def own_decoder(
    config: VideoBuild, weights: dict[str, Tensor], dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return our modules with torch's convolutions as a decoder of whole clips, one latent a call."""
    vae = wan_vae(config)
    halves: dict[bool, nn.Module] = {}
    for first in (True, False):
        half = VaeDecode(vae, first=first, frames=1, dtype=dtype).eval().requires_grad_(False)
        half.load_state_dict({n: weights[n].to(half.state_dict()[n].dtype) for n in half.state_dict()})
        halves[first] = half.to(config.target.device)

    def decode(latents: Tensor) -> Tensor:
        parts: list[Tensor] = []
        caches: list[Tensor] = []
        for latent in latents.split(1, dim=2):
            video, *caches = halves[not parts](latent, *caches)
            parts.append(video)
        return torch.cat(parts, dim=2)

    return decode


def eager_times(reference: Reference, latents: Tensor, repeats: int) -> tuple[dict[str, float], int]:
    """Return milliseconds of a first and of a steady chunk, and the most that was allocated; see `clip_times`."""
    chunk = latents.shape[2] // CHUNKS
    first, steady, peak = clip_times(reference.run, latents, chunk, CHUNKS - 1, repeats)
    return dict(zip(DECODERS, (first, steady), strict=True)), peak


def some_latents(config: VideoBuild, chunks: int) -> Tensor:
    """Return [1, z, chunks*F, h, w] float32."""
    s = config.workload.stream
    shape = (1, config.model.in_channels, chunks * s.chunk_frames, s.latent_height, s.latent_width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def levels(video: Tensor) -> Tensor:
    """Return [T, H, W, 3] float64 in 0..255, not rounded, on the CPU, of [1, 3, T, H, W] in -1..1."""
    return ((video[0].float().clamp(-1, 1) + 1) * 127.5).permute(1, 2, 3, 0).cpu().double()
