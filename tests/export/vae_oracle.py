"""diffusers' AutoencoderKLWan as the truth for the VAE: small, with random weights, in any precision; holds no test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from scripts.random_vae import vae_diffusers_config
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.keys import vae_diffusers_names
from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode

SMALL = WanVaeConfig(base_dim=8)
SMALL_2_2 = replace(VAE_PRESETS["wan-2.2"], base_dim=8, decoder_base_dim=12)


def diffusers_vae(config: WanVaeConfig) -> AutoencoderKLWan:
    """Return diffusers' class of these dimensions."""
    vae: AutoencoderKLWan = AutoencoderKLWan.from_config(vae_diffusers_config(config))
    return vae


class VaeOracle:
    """The whole clip at once, by diffusers, and our halves with the same weights.

    Parameters
    ----------
    dtype : torch.dtype
        Of weights and results.
    config : WanVaeConfig, optional
        Dimensions.
    """

    def __init__(self, dtype: torch.dtype, config: WanVaeConfig = SMALL) -> None:
        self.dtype, self.config = dtype, config
        self.vae = diffusers_vae(config).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for weight in self.vae.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_kernel = weight.dim() > 3 and weight.shape[1] > 1
            # Kernels keep activations near 1; gains lie around 1, and nothing is zero.
            weight.copy_(noise * weight[0].numel() ** -0.5 if is_kernel else 1 + 0.1 * noise)
        if config.is_residual:  # sums with shortcuts are larger, and the clamp would hide most pixels
            for weight in self.vae.decoder.conv_out.parameters():
                weight.mul_(0.25)
        self.vae.to(dtype)
        for module in self.vae.modules():
            if isinstance(module, nn.Sequential) and isinstance(module[0], nn.Upsample):
                # Theirs goes through float32, which rounds a float64; the plain one copies numbers.
                module[0] = nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact")
        column = (-1, 1, 1, 1)
        self.mean = torch.tensor(config.latents_mean, dtype=dtype).view(column)
        self.std = torch.tensor(config.latents_std, dtype=dtype).view(column)

    def decode(self, latents: Tensor) -> Tensor:
        """Return the video [B, 3, T, H, W] of normalised latents [B, z, F, h, w]."""
        video: Tensor = self.vae.decode(latents * self.std + self.mean).sample
        return video

    def encode(self, video: Tensor) -> Tensor:
        """Return the normalised mean latents [B, z, F, h, w] of a video [B, 3, T, H, W]."""
        mode: Tensor = self.vae.encode(video).latent_dist.mode()
        return (mode - self.mean) / self.std

    def half(self, kind: type[VaeDecode] | type[VaeEncode], *, first: bool, frames: int) -> nn.Module:
        """Return ours with the oracle's weights."""
        return with_weights(kind(self.config, first=first, frames=frames, dtype=self.dtype), self.vae)


def with_weights(half: nn.Module, vae: nn.Module) -> nn.Module:
    """Give our half the weights of diffusers' VAE."""
    names, theirs = vae_diffusers_names(half.config), vae.state_dict()
    ours = {name: theirs[names[name]] for name in half.state_dict() if name in names}
    left = half.load_state_dict(ours, strict=False)
    assert left.missing_keys == ["latents_mean", "latents_std"]
    return half.eval().requires_grad_(False)


def stream(
    oracle: VaeOracle, kind: type[VaeDecode] | type[VaeEncode], x: Tensor, cut: Sequence[int]
) -> Tensor:
    """Return what our half gives for ``x``, called on ``cut`` latent frames after ``cut``, caches handed on."""
    done: list[Tensor] = []
    caches: tuple[Tensor, ...] = ()
    taken = 0
    for call, frames in enumerate(cut):
        half = oracle.half(kind, first=call == 0, frames=frames)
        count = frames if kind is VaeDecode else half.video_frames
        y, *caches = half(x[:, :, taken : taken + count], *caches)
        taken += count
        done.append(y)
    assert taken == x.shape[2]
    return torch.cat(done, dim=2)
