"""Dimensions of a Wan 2.1 VAE, of any width."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from seko_export.config.media import VaeConfig
from seko_export.errors import UsageError

# Mean and standard deviation of each latent channel over the training set. Source: the Wan 2.1 release.
# fmt: off
LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
# fmt: on


@dataclass(frozen=True)
class WanVaeConfig(VaeConfig):
    """Dimensions of a Wan 2.1 VAE.

    Parameters
    ----------
    base_dim : int
        Channels at full resolution.
    z_dim : int
        Latent channels.
    dim_mult : tuple of int
        Channels of each level as multiples of ``base_dim``, from full resolution down; each level halves height and
        width.
    num_res_blocks : int
        Residual blocks per level in the encoder; the decoder has one more.
    temporal_downsample : tuple of bool
        Whether each step between levels also halves the number of frames.
    latents_mean, latents_std : tuple of float
        Statistics of each latent channel. A diffusion model's latents are (z - mean) / std.

    Raises
    ------
    UsageError
        If two of them contradict each other.
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

    def __post_init__(self) -> None:
        for field in ("base_dim", "z_dim", "num_res_blocks"):
            if getattr(self, field) < 1:
                raise UsageError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not self.dim_mult or min(self.dim_mult) < 1:
            raise UsageError(f"dim_mult must be factors of at least 1, got {self.dim_mult}")
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise UsageError(
                f"temporal_downsample has {len(self.temporal_downsample)} steps, expected "
                f"{len(self.dim_mult) - 1}: one between each two of the {len(self.dim_mult)} levels of dim_mult"
            )
        odd = [level for level in self.level_dims[1:] if level % 2]
        if odd:
            raise UsageError(f"a level has {odd[0]} channels, an odd number; upsampling halves them")
        for field in ("latents_mean", "latents_std"):
            numbers = getattr(self, field)
            if len(numbers) != self.z_dim or not all(map(math.isfinite, numbers)):
                raise UsageError(
                    f"{field} must be {self.z_dim} finite numbers, one a latent channel, got {numbers}"
                )
        if min(self.latents_std) <= 0:
            raise UsageError(f"latents_std must be above 0, got {min(self.latents_std)}")

    @property
    def title(self) -> str:
        """Name of the VAE in words."""
        return f"Wan 2.1 VAE of base_dim {self.base_dim}"

    @property
    def latent_channels(self) -> int:
        """Channels of a latent cell."""
        return self.z_dim

    @property
    def level_dims(self) -> tuple[int, ...]:
        """Channels of each level, from full resolution down."""
        return tuple(self.base_dim * factor for factor in self.dim_mult)

    @property
    def spatial_stride(self) -> int:
        """Pixels along one side of a latent cell."""
        return int(2 ** len(self.temporal_downsample))

    @property
    def temporal_stride(self) -> int:
        """Video frames per latent frame, except the first latent frame."""
        return int(2 ** sum(self.temporal_downsample))


VAE_PRESETS: dict[str, WanVaeConfig] = {"wan-2.1": WanVaeConfig(), "lightvae": WanVaeConfig(base_dim=24)}
