"""Dimensions of a VAE of Wan 2.1 or Wan 2.2, of any width."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from seko_export.config.media import VaeConfig
from seko_export.errors import UsageError
from seko_runtime.video.contract import PICTURE_CHANNELS

# Mean and standard deviation of each latent channel over the training set. Sources: the releases of Wan 2.1 and 2.2.
# fmt: off
LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
LATENTS_MEAN_2_2 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
LATENTS_STD_2_2 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on
MOST_ACTIVATION_BYTES = 4 << 30
"""Limit in bytes for the decoder's largest activation. A chunk above the limit is decoded in parts of at least one
latent frame. About five activations of this size are in memory at once."""
# Bounds of sizes, far above every published VAE: a config.json may say anything.
_MOST_CHANNELS, _MOST_LEVELS = 2**14, 8
_MOST = {
    "base_dim": _MOST_CHANNELS,
    "z_dim": _MOST_CHANNELS,
    "num_res_blocks": 64,
    "decoder_base_dim": _MOST_CHANNELS,
    "patch_size": 64,
}


@dataclass(frozen=True)
class WanVaeConfig(VaeConfig):
    """Dimensions of a VAE of Wan 2.1, by default, or of Wan 2.2.

    Parameters
    ----------
    base_dim : int
        Number of channels at the largest resolution.
    z_dim : int
        Number of channels of a latent.
    dim_mult : tuple of int
        Numbers of channels of the levels as multiples of ``base_dim``, from full resolution down; each level halves
        height and width.
    num_res_blocks : int
        Number of residual blocks per level in the encoder. Each level of the decoder has one more block.
    temporal_downsample : tuple of bool
        Whether each step between two levels also halves the number of frames.
    latents_mean, latents_std : tuple of float
        Mean and standard deviation of each latent channel. A diffusion model's latents are (z - mean) / std.
    decoder_base_dim : int, optional
        The ``base_dim`` of the decoder. If None, the decoder has the ``base_dim`` of the encoder.
    is_residual : bool
        Whether every level has a shortcut around it (Wan 2.2, ``levels.py``). Upsampling keeps the number of channels
        in Wan 2.2, and halves the number in Wan 2.1.
    patch_size : int
        Side, in pixels, of the square that one position at the VAE's largest resolution stands for: 2 in Wan 2.2.
    fp8 : bool
        Whether the decoder multiplies e4m3 numbers in those convolutions for which e4m3 tile sizes were measured on the
        GPU. The build sets ``fp8``; no checkpoint states it.

    Raises
    ------
    UsageError
        If two dimensions of the VAE contradict each other.
    """

    kind: ClassVar[str] = "wan_vae"
    shares_rows: ClassVar[bool] = True
    encodes_on: ClassVar[bool] = True

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = LATENTS_MEAN
    latents_std: tuple[float, ...] = LATENTS_STD
    decoder_base_dim: int | None = None
    is_residual: bool = False
    patch_size: int = 1
    fp8: bool = False

    def __post_init__(self) -> None:
        for field, most in _MOST.items():
            size = getattr(self, field)
            if field == "decoder_base_dim" and size is None:
                continue
            if type(size) is not int or not 1 <= size <= most:
                raise UsageError(f"{field} must be a whole number of 1 to {most}, got {size!r:.60}")
        if type(self.is_residual) is not bool:
            raise UsageError(f"is_residual must be true or false, got {self.is_residual!r:.60}")
        if not 1 <= len(self.dim_mult) <= _MOST_LEVELS or not all(
            type(factor) is int and 1 <= factor <= _MOST_CHANNELS for factor in self.dim_mult
        ):
            raise UsageError(
                f"dim_mult must be 1 to {_MOST_LEVELS} factors of 1 to {_MOST_CHANNELS}, got {self.dim_mult!r:.90}"
            )
        if max(*self.level_dims, *self.decoder_level_dims) > _MOST_CHANNELS:
            raise UsageError(
                f"a level has more than {_MOST_CHANNELS} channels: base_dim {self.base_dim}, decoder_base_dim "
                f"{self.decoder_base_dim}, dim_mult {self.dim_mult}"
            )
        if not all(type(halves) is bool for halves in self.temporal_downsample):
            raise UsageError(
                f"temporal_downsample must be true or false, got {self.temporal_downsample!r:.100}"
            )
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise UsageError(
                f"temporal_downsample has {len(self.temporal_downsample)} steps, expected "
                f"{len(self.dim_mult) - 1}: one between each two of the {len(self.dim_mult)} levels of dim_mult"
            )
        if self.is_residual:
            self._check_shortcuts()
        elif odd := [level for level in self.decoder_level_dims[1:] if level % 2]:
            raise UsageError(f"a level has {odd[0]} channels, an odd number; upsampling halves them")
        for field in ("latents_mean", "latents_std"):
            numbers = getattr(self, field)
            if len(numbers) != self.z_dim or not all(map(math.isfinite, numbers)):
                raise UsageError(
                    f"{field} must be {self.z_dim} finite numbers, one a latent channel, got {numbers!r:.200}"
                )
        if min(self.latents_std) <= 0:
            raise UsageError(f"latents_std must be above 0, got {min(self.latents_std)}")

    def _check_shortcuts(self) -> None:
        """Refuse widths between which a shortcut would average or repeat a fraction of a number."""
        down, up = self.level_dims, self.decoder_level_dims[::-1]
        cells = [
            4 * (1 + temporal) for temporal in self.temporal_downsample
        ]  # numbers of a channel in a cell
        shortcuts = [
            *zip((self.base_dim, *down), down, (*cells, 1), strict=False),
            *zip(up, (up[0], *up), cells[::-1], strict=False),
        ]
        for below, above, cell in shortcuts:  # channels on the side of more pixels, and of fewer
            if below * cell % above:
                raise UsageError(
                    f"dim_mult {self.dim_mult} has levels of {below} and {above} channels, between which no shortcut "
                    f"with {cell} numbers of a channel in a cell is possible"
                )

    @property
    def title(self) -> str:
        """Name of the VAE in words."""
        convolutions = ", fp8 convolutions" if self.fp8 else ""
        return f"Wan {'2.2' if self.is_residual else '2.1'} VAE of base_dim {self.base_dim}{convolutions}"

    @property
    def encodes_video(self) -> bool:
        """Whether the VAE can encode a video chunk by chunk."""
        return True

    @property
    def computes_fp8(self) -> bool:
        """Whether the decoder multiplies fp8 numbers in those convolutions for which fp8 tile sizes were measured on
        the GPU."""
        return self.fp8

    def with_fp8(self) -> WanVaeConfig:
        """Return this VAE with fp8 in its decoder."""
        return replace(self, fp8=True)

    @property
    def fp8_channels(self) -> frozenset[int]:
        """Numbers of channels of the decoder's levels, whose residual blocks can multiply fp8 numbers."""
        return frozenset(self.decoder_level_dims)

    @property
    def latent_channels(self) -> int:
        """Number of channels of a latent."""
        return self.z_dim

    @property
    def level_dims(self) -> tuple[int, ...]:
        """Numbers of channels of the encoder's levels, from the largest resolution down."""
        return tuple(self.base_dim * factor for factor in self.dim_mult)

    @property
    def decoder_level_dims(self) -> tuple[int, ...]:
        """Numbers of channels of the decoder's levels, from the largest resolution down."""
        return tuple((self.decoder_base_dim or self.base_dim) * factor for factor in self.dim_mult)

    @property
    def patch_channels(self) -> int:
        """Number of values in a square of pixels."""
        return PICTURE_CHANNELS * self.patch_size**2

    @property
    def spatial_stride(self) -> int:
        """Number of pixels along one side of a latent cell."""
        return int(self.patch_size * 2 ** len(self.temporal_downsample))

    @property
    def temporal_stride(self) -> int:
        """Number of video frames to which a latent frame is decoded; the first latent frame of a stream is decoded to
        one."""
        return int(2 ** sum(self.temporal_downsample))

    def decode_parts(self, frames: int, rows: int, columns: int, itemsize: int) -> int:
        """Return the smallest number of equal parts with which no activation exceeds `MOST_ACTIVATION_BYTES`. If there
        is no such number, return the number of latent frames."""
        numbers, largest = rows * columns, 0  # of a channel, for each latent frame
        for dim, temporal in zip(self.decoder_level_dims[::-1], self.temporal_downsample[::-1], strict=False):
            numbers *= 4 * (1 + temporal)
            largest = max(largest, dim * numbers * itemsize)
        most = max(1, MOST_ACTIVATION_BYTES // max(1, largest))
        return next(
            parts for parts in range(1, frames + 1) if frames % parts == 0 and frames // parts <= most
        )


WAN_2_1, WAN_2_2 = "wan-2.1", "wan-2.2"
VAE_PRESETS: dict[str, WanVaeConfig] = {
    WAN_2_1: WanVaeConfig(),
    "lightvae": WanVaeConfig(base_dim=24),
    WAN_2_2: WanVaeConfig(
        base_dim=160,
        z_dim=48,
        latents_mean=LATENTS_MEAN_2_2,
        latents_std=LATENTS_STD_2_2,
        decoder_base_dim=256,
        is_residual=True,
        patch_size=2,
    ),
}
