"""Wan's image-to-video transformer over a whole sequence at once, written from its description; no tests.

The layers are those of `NaiveLingbot` without a camera. A layer's queries attend to the picture's tokens beside the
text, with keys and values of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from tests.truth.naive_lingbot import NaiveLingbot, Window, attend

IMAGE_EPS = 1e-5


class NaiveI2v(NaiveLingbot):
    """One stream's model; arguments and shapes as `NaiveLingbot` has them.

    Parameters
    ----------
    features : Tensor or None
        [N, image width], CLIP's features of all pictures; None for a model without a picture branch.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        heads: int,
        window: Window,
        text: Tensor,
        features: Tensor | None,
    ) -> None:
        super().__init__(weights, heads, window, text)
        self.picture: Tensor | None = None
        if features is None:
            return
        x = features + weights["img_emb.emb_pos"][0] if "img_emb.emb_pos" in weights else features
        x = self.norm("img_emb.proj.0", x)
        x = self.linear("img_emb.proj.1", x)
        x = 0.5 * x * (1 + torch.erf(x / 2**0.5))
        self.picture = self.norm("img_emb.proj.4", self.linear("img_emb.proj.3", x))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply a LayerNorm of the checkpoint."""
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], IMAGE_EPS
        )

    def extra_text(self, at: str, q: Tensor) -> Tensor:
        """Return what a layer's queries [tokens, H, D] see of the picture, [tokens, d]."""
        if self.picture is None:
            return super().extra_text(at, q)
        k = self.normed(f"{at}.cross_attn.k_img", f"{at}.cross_attn.norm_k_img", self.picture)
        return attend(q, k, self.split(self.linear(f"{at}.cross_attn.v_img", self.picture)), None)


def naive_condition(first: Tensor, last: Tensor | None, last_frame: int, frames: int) -> Tensor:
    """Return the condition [4 + z, frames, h, w] of a stream's frames, from what an encoder gives.

    Parameters
    ----------
    first : Tensor
        [z, 30, h, w], latents of the picture and of grey frames.
    last : Tensor or None
        [z, 30, h, w], latents of a last picture, if it ended a clip at each frame.
    last_frame : int
        The frame of the last picture.
    frames : int
        Number of frames.
    """
    rows = []
    for frame in range(frames):
        mask = torch.zeros(4, *first.shape[2:], dtype=first.dtype)
        latents = first[:, min(frame, 29)]
        if frame == 0:
            mask[:] = 1
        if last is not None and frame == last_frame:
            mask[3], latents = 1, last[:, min(frame, 29)]
        rows.append(torch.cat((mask, latents)))
    return torch.stack(rows, 1)
