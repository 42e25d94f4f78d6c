"""The VAE's encoding at full size on one GPU: engines, captured, against diffusers eager. One row a figure and call.

    python scripts/bench/vae_encode.py --work /tmp/seko --rows docs/benchmarks/h200.jsonl

Random weights of the published size: they cost what trained ones do. The engines are those of an image-to-video build,
which turn a picture into its condition: the first call encodes the picture, each later one four grey frames behind it.
diffusers encodes such clips whole; without it our own eager modules do so, one latent a call. The engine's time holds
what a session does with it: the copies of the caches. Latents are compared first: no time is written of engines that
are not as near to float32 as `compared` asks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rows import append_row
from table import OWN_MODULES
from torch import Tensor
from vae import CASES, build_config
from vae_engines import (
    EngineSession,
    Reference,
    build,
    clip_times,
    diffusers_vae,
    forget,
    random_weights,
    rms,
    timed,
)

from scripts.bench.built import add_prepare
from seko_export.config.video import VideoBuild
from seko_export.families.wan_i2v.presets import I2V, PRESETS
from seko_export.media.wan_vae.config import WAN_2_1, WAN_2_2
from seko_export.media.wan_vae.modules import VaeEncode, latent_statistics
from seko_runtime.video.contract import PICTURE_CHANNELS, PICTURE_LEVELS

FIGURE, BAR = "vae_encode_vs_eager", 0.35
DIFFERENCE = "vae_encode_difference"
ENCODERS = ("vae_encode_first", "vae_encode_grey")
CALLS = dict(zip(ENCODERS, ("first call: 1 frame", "later call: 4 frames"), strict=True))  # as rows name them
LATER = 4  # later calls, for the difference and for eager's time
ROUNDING = 1e-5  # of the latents' spread: by this much sums in float32 may differ with their order
LATENTS = dict(zip(ENCODERS, ("buffer:picture.first", "buffer:picture.later[{layer}]"), strict=True))


class EncodeSession(EngineSession):
    """The engines of a picture's condition with the buffers of one row; parameters of `EngineSession`."""

    def __init__(
        self, config: VideoBuild, weights: Mapping[str, Tensor], work: Path, *, eager: bool = False
    ) -> None:
        super().__init__(config, weights, work, ENCODERS, eager=eager)

    def encode(self, picture: Tensor, later: int) -> Tensor:
        """Return the latents [z, 1 + later, h, w] float32 of a picture [H, W, 3], levels 0 to 255, and of grey frames
        behind it."""
        self.buffers[f"buffer:{PICTURE_LEVELS}"].copy_(picture)
        first, grey = ENCODERS
        parts = []
        for name in (first, *[grey] * later):
            self.runs[name]()
            parts.append(self.buffers[LATENTS[name]].clone())
        return torch.cat(parts, dim=1)


def main() -> None:
    """Build the engines, compare their latents, time them and the reference, append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engines")
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--vae", choices=sorted({*CASES} - {WAN_2_2}), default=WAN_2_1)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--repeats", type=int, default=20, help="calls to time")
    parser.add_argument("--eager", action="store_true", help="engines uncompiled: to try the script")
    add_prepare(parser)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    config = encode_config(options.height, options.width, options.vae)
    build_s = {} if options.eager else build(config, options.work, ENCODERS)
    if options.prepare:
        return
    with torch.no_grad():
        measure(config, options, build_s)


def encode_config(height: int, width: int, name: str) -> VideoBuild:
    """Return the build of an image-to-video model with the VAE of this name, one of `CASES`, for this machine."""
    config, _ = build_config(height, width, name)
    return replace(config, model=PRESETS[I2V].model)


def measure(config: VideoBuild, options: argparse.Namespace, build_s: Mapping[str, float]) -> None:
    """Compare latents, then time engines and reference with cuDNN's heuristics and with its search."""
    vae, stream = config.workload.vae, config.workload.stream
    assert vae is not None
    weights = random_weights(vae) | latent_statistics(vae, torch.float32)
    shape = described_encoding(config, options.vae)
    picture = some_picture(stream.height, stream.width).to(config.target.device)
    clip = clip_of(picture, LATER)
    latents = EncodeSession(config, weights, options.work, eager=options.eager).encode(picture, LATER)
    forget()
    compared(config, weights, clip, latents, options.rows, shape)
    for searched in (False, True):
        torch.backends.cudnn.benchmark = searched
        session = EncodeSession(config, weights, options.work, eager=options.eager)
        session.encode(picture, 1)
        engine = [timed(session.runs[name], options.repeats) for name in ENCODERS]
        engine_peak = session.peak_bytes()
        del session
        forget()
        reference = eager_encoder(config, weights, config.target.dtype)
        *eager, eager_peak = clip_times(reference.run, clip, 1, LATER, max(2, options.repeats // 4))
        name = reference.name
        del reference
        forget()
        for call, engine_ms, eager_ms in zip(ENCODERS, engine, eager, strict=True):
            append_row(
                options.rows,
                FIGURE,
                f"{shape}, {CALLS[call]}{', cudnn.benchmark' if searched else ''}",
                engine_ms / eager_ms,
                "engine / eager, a call",
                None if searched or OWN_MODULES in name else BAR,
                reference=name,
                engine_ms=engine_ms,
                eager_ms=eager_ms,
                engine_peak_bytes=engine_peak,
                eager_peak_bytes=eager_peak,
                engines="uncompiled" if options.eager else "aoti",
                build_s=build_s,
            )
    torch.backends.cudnn.benchmark = False


def compared(
    config: VideoBuild,
    weights: Mapping[str, Tensor],
    clip: Tensor,
    latents: Tensor,
    rows: Path,
    shape: str,
) -> None:
    """Append how far the engines' latents [z, 1 + n, h, w] are from the reference in float32, beside the reference in
    their dtype.

    Raises
    ------
    SystemExit
        If the first or the later calls have more than twice the error of the same-dtype reference (FlashAttention's
        rule) and more than float32 sums in two orders have.
    """
    settings = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    # the truth is in whole float32; times are taken with torch's own settings
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    truth = eager_encoder(config, weights, torch.float32)
    wanted, name = truth.run(clip)[0].double(), truth.name
    del truth
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = settings
    forget()
    same = eager_encoder(config, weights, config.target.dtype).run(clip)[0].double()
    forget()
    wrong = []
    for call, part in zip(ENCODERS, (slice(0, 1), slice(1, None)), strict=True):
        error = rms(latents[:, part].double(), wanted[:, part])
        allowed = rms(same[:, part], wanted[:, part])
        spread = float(wanted[:, part].std())
        bar = 2 * max(allowed, ROUNDING * spread)
        append_row(
            rows,
            DIFFERENCE,
            f"{shape}, {CALLS[call]}",
            error,
            "of normalised latents, rms against float32",
            bar,
            reference=name,
            same_dtype_eager=allowed,
            spread=spread,
        )
        if not error <= bar:
            wrong.append(f"{CALLS[call]}: {error:.3g}, expected at most {bar:.3g}")
    if wrong:
        raise SystemExit(f"the engines' latents are not the reference's, so no time is written: {wrong}")


def eager_encoder(config: VideoBuild, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Reference:
    """Return diffusers' encoder with these weights, or ours called as diffusers calls its own: of video
    [1, 3, 1 + 4n, H, W] float32 in -1..1 to latents [1, z, 1 + n, h, w] float32, normalised."""
    vae, device = config.workload.vae, config.target.device
    assert vae is not None
    named_model = diffusers_vae(vae, weights)
    if named_model is None:
        return Reference(f"{OWN_MODULES}, eager, one latent a call", own_encoder(config, weights, dtype))
    name, model = named_model
    model.to(device, dtype)
    statistics = latent_statistics(vae, torch.float32)
    mean, std = (statistics[n].to(device).view(-1, 1, 1, 1) for n in ("latents_mean", "latents_std"))
    return Reference(
        name, lambda clip: (model.encode(clip.to(dtype)).latent_dist.mode().float() - mean) / std
    )


def own_encoder(
    config: VideoBuild, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return our modules with torch's convolutions as an encoder of whole clips, one latent a call."""
    vae = config.workload.vae
    assert vae is not None
    halves = {}
    for first in (True, False):
        half = VaeEncode(vae, first=first, frames=1, dtype=dtype).eval().requires_grad_(False)
        half.load_state_dict({n: weights[n].to(own.dtype) for n, own in half.state_dict().items()})
        halves[first] = half.to(config.target.device)

    def encode(clip: Tensor) -> Tensor:
        parts: list[Tensor] = []
        caches: list[Tensor] = []
        later = (clip.shape[2] - 1) // vae.temporal_stride
        for frames in clip.split([1, *[vae.temporal_stride] * later], dim=2):
            latents, *caches = halves[not parts](frames, *caches)
            parts.append(latents)
        return torch.cat(parts, dim=2)

    return encode


def described_encoding(config: VideoBuild, name: str) -> str:
    """Return what encodes, for a row."""
    stream = config.workload.stream
    return f"{CASES[name].title}, {stream.height}x{stream.width}, {config.workload.kv_scheme}"


def some_picture(height: int, width: int) -> Tensor:
    """Return a picture [height, width, 3] float32 with levels 0 to 255."""
    shape = (height, width, PICTURE_CHANNELS)
    return 255 * torch.rand(shape, generator=torch.Generator().manual_seed(2))


def clip_of(picture: Tensor, later: int) -> Tensor:
    """Return [1, 3, 1 + 4 * later, H, W] float32 in -1..1: a picture [H, W, 3], and grey frames behind it."""
    first = (picture / 127.5 - 1).permute(2, 0, 1)[None, :, None]
    return torch.cat((first, torch.zeros_like(first).expand(-1, -1, 4 * later, -1, -1)), dim=2)


if __name__ == "__main__":
    main()
