"""The table of a picture's condition by the VAE's encoder alone, frame by frame."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seko_export.families.wan_layout.picture_sizes import MASK_CHANNELS, TABLE_FRAMES
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.modules import VaeEncode
from seko_runtime.video.contract import PICTURE_CHANNELS


@torch.no_grad()
def condition_table(weights: Mapping[str, Tensor], vae: WanVaeConfig, picture: Tensor) -> Tensor:
    """Return the table of one stream: a mask, and the latents of a picture that grey frames follow.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Of `VaeEncode`, by its names.
    vae : WanVaeConfig
        Its dimensions.
    picture : Tensor
        [3, H, W] floating, -1..1.

    Returns
    -------
    Tensor
        [4 + z, 30, h, w] in the dtype of `VaeEncode`'s results: the mask is 1 in latent frame 0.
    """
    dtype = next(iter(weights.values())).dtype
    chunks: list[Tensor] = []
    caches: tuple[Tensor, ...] = ()
    for frame in range(TABLE_FRAMES):
        half = VaeEncode(vae, first=not frame, frames=1, dtype=dtype)
        height, width = picture.shape[1:]
        pixels = torch.zeros(1, PICTURE_CHANNELS, half.video_frames, height, width, dtype=picture.dtype)
        if not frame:
            pixels[:, :, 0] = picture
        latents, *new_caches = torch.func.functional_call(half, dict(weights), (pixels, *caches))
        chunks.append(latents)
        caches = tuple(new_caches)
    latents = torch.cat(chunks, 2)[0]  # [z, 30, h, w]
    mask = torch.zeros(MASK_CHANNELS, *latents.shape[1:], dtype=latents.dtype)
    mask[:, 0] = 1
    return torch.cat((mask, latents))
