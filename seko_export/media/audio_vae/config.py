"""Dimensions of an AudioVAE V2."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from seko_export.errors import UsageError


@dataclass(frozen=True)
class AudioVaeConfig:
    """Dimensions of an AudioVAE V2 with depthwise convolutions and without noise blocks. The decoder is conditioned on
    the sample rate by a scale and a bias for each channel.

    Parameters
    ----------
    encoder_dim : int
        Number of channels after the encoder's first convolution; each encoder block doubles the number of channels.
    encoder_rates : tuple of int
        Stride of each encoder block; the product of all strides is the number of samples of a latent at
        ``sample_rate``.
    latent_dim : int
        Number of channels of a latent.
    decoder_dim : int
        Number of channels before the decoder's first block; each decoder block halves the number of channels.
    decoder_rates : tuple of int
        Stride of each decoder block; the product of all strides is the number of samples of a latent at
        ``out_sample_rate``.
    sample_rate, out_sample_rate : int
        Samples a second of the sound that the encoder takes, and of the sound that the decoder makes.
    rate_boundaries : tuple of int
        Sample rates at which the condition of the decoder changes, ascending.

    Raises
    ------
    UsageError
        If two dimensions of the VAE contradict each other.
    """

    encoder_dim: int = 128
    encoder_rates: tuple[int, ...] = (2, 5, 8, 8)
    latent_dim: int = 64
    decoder_dim: int = 2048
    decoder_rates: tuple[int, ...] = (8, 6, 5, 2, 2, 2)
    sample_rate: int = 16_000
    out_sample_rate: int = 48_000
    rate_boundaries: tuple[int, ...] = (20_000, 30_000, 40_000)

    def __post_init__(self) -> None:
        sizes = (self.encoder_dim, self.latent_dim, self.decoder_dim, self.sample_rate, self.out_sample_rate)
        if min((*sizes, *self.encoder_rates, *self.decoder_rates, *self.rate_boundaries)) < 1:
            raise UsageError("a size of the audio VAE is below 1")
        if not self.encoder_rates or not self.decoder_rates:
            raise UsageError("the audio VAE has no blocks: encoder_rates or decoder_rates is empty")
        halvings = 2 ** len(self.decoder_rates)
        if self.decoder_dim % halvings:
            raise UsageError(
                f"the audio VAE's decoder_dim {self.decoder_dim} is no multiple of {halvings}: each of its "
                f"{len(self.decoder_rates)} blocks halves the channels"
            )
        if list(self.rate_boundaries) != sorted(set(self.rate_boundaries)):
            raise UsageError(f"the audio VAE's rate boundaries {self.rate_boundaries} must rise")

    @property
    def encoder_stride(self) -> int:
        """Number of samples at ``sample_rate`` that one latent stands for."""
        return math.prod(self.encoder_rates)

    @property
    def decoder_stride(self) -> int:
        """Number of samples at ``out_sample_rate`` to which one latent is decoded."""
        return math.prod(self.decoder_rates)

    @property
    def encoder_widths(self) -> tuple[int, ...]:
        """Numbers of channels before each encoder block, then after the last block."""
        return tuple(self.encoder_dim * 2**block for block in range(len(self.encoder_rates) + 1))

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        """Numbers of channels before each decoder block, then after the last block."""
        return tuple(self.decoder_dim // 2**block for block in range(len(self.decoder_rates) + 1))

    @property
    def rate_condition(self) -> int:
        """Index of the row of the condition tables that belongs to ``out_sample_rate``."""
        return bisect_left(self.rate_boundaries, self.out_sample_rate)
