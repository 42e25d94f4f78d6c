"""The modules of the Wan VAE's engines: one row at a time, pictures as bytes. The maths is in `modules.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode

_HALF_RANGE = 127.5  # levels of a byte from -1 to 0, and from 0 to 1


class DecodeRow(VaeDecode):
    """Decodes the latents of one row's chunk to pictures."""

    def forward(self, latents: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Decode one chunk of one row.

        Parameters
        ----------
        latents : Tensor
            [z, F, h, w] float32, normalised.
        *caches : Tensor
            [t, rows, columns, channels] each, in the weights' dtype; none for FIRST.

        Returns
        -------
        video : Tensor
            [T, H, W, 3] uint8: red, green, blue, rounded to the nearest level.
        *caches : Tensor
            For the next call.
        """
        video, *kept = self.decode(latents.unsqueeze(0), tuple(cache.unsqueeze(0) for cache in caches))
        levels = ((video.float() + 1) * _HALF_RANGE).round()  # [1, 3, T, H, W] in 0..255
        frames = levels.squeeze(0).permute(1, 2, 3, 0).to(torch.uint8).contiguous()
        return (frames, *(cache.squeeze(0) for cache in kept))


class EncodeImage(VaeEncode):
    """Encodes a picture to the first latent frame of a stream."""

    def forward(self, video: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Encode one picture.

        Parameters
        ----------
        video : Tensor
            [H, W, 3] uint8: red, green, blue.
        *caches : Tensor
            None: a picture always starts a stream.

        Returns
        -------
        tuple of Tensor
            [z, 1, h, w] float32, normalised.
        """
        pixels = video.permute(2, 0, 1).float() / _HALF_RANGE - 1
        latents = super().forward(pixels[None, :, None], *caches)[0]
        return (latents.squeeze(0),)
