"""The modules of the Wan VAE's engines, which decode or encode one row at a time, with pictures as bytes. The module
`modules` has the maths of the decoder and the encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from seko_export.media.row_split import RowSplit
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode
from seko_runtime.video.contract import PICTURE_CHANNELS

_HALF_RANGE = 127.5  # levels of a byte between -1 and 0, and between 0 and 1


class DecodeRow(VaeDecode):
    """The module that decodes the latents of one row's chunk to pictures."""

    def forward(self, latents: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Decode one chunk of one row.

        Parameters
        ----------
        latents : Tensor
            Latents, [z, F, h, w] float32, normalised.
        *caches : Tensor
            Caches of the previous call, [t, rows, columns, channels] each, in the weights' dtype; none for the first
            chunk.

        Returns
        -------
        video : Tensor
            Video frames, [T, H, W, 3] uint8: red, green, blue, rounded to the nearest level.
        *caches : Tensor
            The caches for the next call.
        """
        return self._pictures(latents, caches)

    def _pictures(
        self, latents: Tensor, caches: tuple[Tensor, ...], split: RowSplit | None = None
    ) -> tuple[Tensor, ...]:
        video, *new_caches = self.decode(
            latents.unsqueeze(0), tuple(cache.unsqueeze(0) for cache in caches), split
        )
        levels = ((video.float() + 1) * _HALF_RANGE).round()  # [1, 3, T, H, W] in 0..255
        frames = levels.squeeze(0).permute(1, 2, 3, 0).to(torch.uint8).contiguous()
        return (frames, *(cache.squeeze(0) for cache in new_caches))


class DecodeShare(DecodeRow):
    """The module that decodes one session's chunk to one rank's pixel rows of the pictures; ``ranks`` ranks (GPUs)
    together decode whole pictures.
    """

    def __init__(
        self, config: WanVaeConfig, *, first: bool, frames: int, dtype: torch.dtype, ranks: int
    ) -> None:
        super().__init__(config, first=first, frames=frames, dtype=dtype)
        self.ranks = ranks

    def forward(self, latents: Tensor, rank: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Decode one chunk of one row.

        Parameters
        ----------
        latents : Tensor
            Latents of the whole picture, [z, F, h, w] float32, normalised.
        rank : Tensor
            Number of this rank, [1] int64.
        *caches : Tensor
            Caches of the previous call, [t, rows, columns, channels] each, in the weights' dtype, with one rank's rows;
            none for the first chunk.

        Returns
        -------
        video : Tensor
            The rank's pixel rows of the video frames, [T, H/R, W, 3] uint8.
        *caches : Tensor
            The caches for the next call.
        """
        return self._pictures(latents, caches, self.rows_of(rank))

    def rows_of(self, rank: Tensor) -> RowSplit:
        """Return the `RowSplit` of a rank; tests without processes replace this method."""
        return RowSplit(self.ranks, rank)


class EncodeImage(VaeEncode):
    """The module that encodes a picture to the first latent frame of a stream."""

    def forward(self, video: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Encode one picture to latents.

        Parameters
        ----------
        video : Tensor
            The picture, [H, W, 3] uint8: red, green, blue.
        *caches : Tensor
            Must be empty: a picture always starts a stream.

        Returns
        -------
        tuple of Tensor
            Latents of the picture, [z, 1, h, w] float32, normalised.
        """
        pixels = video.permute(2, 0, 1).float() / _HALF_RANGE - 1
        latents = super().forward(pixels[None, :, None], *caches)[0]
        return (latents.squeeze(0),)


class EncodePicture(VaeEncode):
    """The module that encodes a picture to a latent frame, and returns the caches with which `EncodeGrey` continues."""

    def forward(self, video: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Return the latents [z, 1, h, w] float32 of a picture [H, W, 3] float32, and the caches of `EncodeGrey`.

        The picture's levels are 0 to 255, or outside this range after a bicubic resize, as in the original code.
        """
        pixels = video.permute(2, 0, 1) / _HALF_RANGE - 1
        return tuple(output.squeeze(0) for output in super().forward(pixels[None, :, None], *caches))


class EncodeGrey(VaeEncode):
    """The module that encodes the grey frames of one latent frame after a picture."""

    def __init__(self, vae: WanVaeConfig, height: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(vae, first=False, frames=1, dtype=dtype)
        self.height, self.width = height, width

    def forward(self, *caches: Tensor) -> tuple[Tensor, ...]:
        """Return the latents [z, 1, h, w] float32 and the next caches, from the caches of the previous call."""
        grey = torch.zeros(
            1, PICTURE_CHANNELS, self.video_frames, self.height, self.width, device=caches[0].device
        )
        return tuple(
            tensor.squeeze(0) for tensor in super().forward(grey, *(tensor.unsqueeze(0) for tensor in caches))
        )


class EncodeLast(VaeEncode):
    """The module that encodes the latent frame with which a stream ends: three grey frames, then a picture."""

    def forward(self, video: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Return the latents [z, 1, h, w] float32 of a picture [H, W, 3] float32, from the caches of the previous call.
        The picture has levels of 0 to 255; see `EncodePicture.forward`.
        """
        pixels = video.permute(2, 0, 1)[:, None] / _HALF_RANGE - 1  # [3, 1, H, W]
        grey = torch.zeros_like(pixels).expand(-1, self.video_frames - 1, -1, -1)
        clip = torch.cat((grey, pixels), 1)[None]
        latents = super().forward(clip, *(cache.unsqueeze(0) for cache in caches))[0]
        return (latents.squeeze(0),)


class EncodeChunk(VaeEncode):
    """The module that encodes the video frames of one row's chunk."""

    def forward(self, video: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Encode one chunk of one row.

        Parameters
        ----------
        video : Tensor
            Video frames, [T, H, W, 3] uint8: red, green, blue. The first chunk of a stream has fewer frames, which are
            the last ones of ``video``.
        *caches : Tensor
            Caches of the previous call, [t, rows, columns, channels] each, in the weights' dtype; none for the first
            chunk.

        Returns
        -------
        latents : Tensor
            Latents, [z, F, h, w] float32, normalised.
        *caches : Tensor
            The caches for the next call.
        """
        pixels = video[-self.video_frames :].permute(3, 0, 1, 2).float() / _HALF_RANGE - 1  # [3, T, H, W]
        encoded = super().forward(pixels[None], *(cache.unsqueeze(0) for cache in caches))
        return tuple(output.squeeze(0) for output in encoded)


class EncodeRawChunk(EncodeChunk):
    """The module that encodes the video frames of one row's chunk to latents that are not normalised."""

    normalises = False
