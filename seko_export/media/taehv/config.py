"""Dimensions of a tiny decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from seko_export.config.media import VaeConfig
from seko_export.errors import UsageError

STAGES = 3  # of which each doubles rows and columns, and the last two the frames
BLOCKS = 3  # of a stage; each keeps its last input
TINY_WIDTHS, SUPER_WIDTHS = (256, 128, 64, 64), (512, 256, 128, 64)


@dataclass(frozen=True)
class TaehvConfig(VaeConfig):
    """Dimensions of a tiny decoder, TAEHV or LightTAE.

    Parameters
    ----------
    z_dim : int
        Number of channels of a latent.
    widths : tuple of int
        Number of channels of each stage of the decoder, from the latents up, and then of the last convolution.
    patch_size : int
        Side, in pixels, of the square that the last convolution makes for each of its output positions.
    is_super : bool
        Whether the blocks are the larger blocks of TAEHV's super variant.
    encoder_width : int
        Number of channels of the encoder in the file, which encodes video and no single pictures; 0 without one.
    latents_mean, latents_std : tuple of float
        Statistics of each latent channel, if the decoder takes unnormalised latents z, as LightTAE does. A diffusion
        model's latents are (z - mean) / std. Empty: the decoder takes the diffusion model's latents, as TAEHV does.

    Raises
    ------
    UsageError
        If a size is below 1, or two sizes contradict each other.
    """

    kind: ClassVar[str] = "taehv"
    encodes: ClassVar[bool] = False

    z_dim: int = 16
    widths: tuple[int, ...] = TINY_WIDTHS
    patch_size: int = 1
    is_super: bool = False
    encoder_width: int = 0
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if min(self.z_dim, self.patch_size, *self.widths) < 1 or self.encoder_width < 0:
            raise UsageError("a size of the tiny decoder is below 1")
        if len(self.widths) != STAGES + 1:
            raise UsageError(f"a tiny decoder has {STAGES + 1} widths, got {self.widths}")
        for statistic in (self.latents_mean, self.latents_std):
            if len(statistic) not in (0, self.z_dim):
                raise UsageError(f"expected {self.z_dim} statistics of the latents, got {len(statistic)}")

    @property
    def title(self) -> str:
        """Name of the decoder in words."""
        family, scale = ("LightTAE", "unnormalised") if self.latents_std else ("TAEHV", "normalised")
        variant = ", super" if self.is_super else ""
        return f"tiny decoder ({family}{variant}) of {self.z_dim} latent channels, {scale}"

    @property
    def encodes_video(self) -> bool:
        """Whether the file has an encoder, for video."""
        return self.encoder_width > 0

    @property
    def latent_channels(self) -> int:
        """Number of channels of a latent cell."""
        return self.z_dim

    @property
    def spatial_stride(self) -> int:
        """Number of pixels along one side of a latent cell."""
        return int(self.patch_size * 2**STAGES)

    @property
    def temporal_stride(self) -> int:
        """Number of video frames per latent frame, except for the first latent frame."""
        return 4
