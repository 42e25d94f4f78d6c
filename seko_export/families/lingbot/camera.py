"""The modules of the camera input. Camera poses are converted to rays, rays to tokens, and tokens to a scale and a
shift in every layer.

Shapes use the letters that `layers.causal_dit` defines; H and W are the video's height and width in pixels. Camera rays
are computed in float32, matmuls in the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH
from seko_export.config.video import VideoBuild
from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.lingbot.model import CELL, CONTROLS, TOKEN_PIXELS

TOKENS, SCALE, SHIFT = "camera_tokens", "camera_scale", "camera_shift"


class CameraTokens(Ranked):
    """The module that turns the camera rays of a chunk into tokens, which are the same for all layers and passes.

    Attributes
    ----------
    split : RankSplit or None
        How ranks (GPUs) share a chunk. Each rank computes its own tokens.
    """

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        d, dtype = config.model.dim, config.target.dtype
        self.height, self.width = config.workload.stream.height, config.workload.stream.width
        self.patch_embedding_wancamctrl = nn.Linear(CONTROLS["cam"] * TOKEN_PIXELS, d, dtype=dtype)
        self.c2ws_hidden_states_layer1 = nn.Linear(d, d, dtype=dtype)
        self.c2ws_hidden_states_layer2 = nn.Linear(d, d, dtype=dtype)

    def forward(self, conditioning: Mapping[str, Tensor], rank: Tensor | None = None) -> Tensor:
        """Return the camera's tokens [B, T, d] from poses [B, F, 3, 4] and intrinsics [B, F, 4], as `rays` takes them.
        With `split`, return the tokens [B, T/R, d] of the rank with number ``rank`` [1] int64.
        """
        ray_tokens = as_tokens(rays(conditioning[POSES], conditioning[INTRINSICS], self.height, self.width))
        if self.split is not None and rank is not None:
            ray_tokens = self.split.own_tokens(ray_tokens, rank)
        tokens: Tensor = self.patch_embedding_wancamctrl(
            ray_tokens.to(self.patch_embedding_wancamctrl.weight.dtype)
        )
        inner = self.c2ws_hidden_states_layer2(F.silu(self.c2ws_hidden_states_layer1(tokens)))
        result: Tensor = tokens + inner
        return result


class ScaleShift(nn.Module):
    """The module that computes one layer's scale and shift from the camera's tokens."""

    groups = ("conditioning",)
    fp8_linears = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        d = model.dim
        self.cam_injector_layer1 = nn.Linear(d, d, dtype=dtype)
        self.cam_injector_layer2 = nn.Linear(d, d, dtype=dtype)
        self.cam_scale_layer = nn.Linear(d, d, dtype=dtype)
        self.cam_shift_layer = nn.Linear(d, d, dtype=dtype)

    def forward(self, conditioning: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return scale and shift of one layer, [B, T, d] each, from the camera's tokens [B, T, d]."""
        tokens = conditioning[TOKENS]
        inner = tokens + self.cam_injector_layer2(F.silu(self.cam_injector_layer1(tokens)))
        return self.cam_scale_layer(inner), self.cam_shift_layer(inner)


class KeptCamera(nn.Module):
    """The module that applies a layer's scale and shift to the hidden state, for a build in which scale and shift are
    computed once a chunk. The module `KeptCamera` has no weights."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        del model, dtype

    def forward(self, hidden: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the next hidden state [B, T, d], scaled and shifted in float32."""
        return scaled(hidden, conditioning[SCALE], conditioning[SHIFT])


class CameraInLayer(ScaleShift):
    """The module that computes a layer's scale and shift from the camera's tokens in every pass and applies them."""

    def forward(self, hidden: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return the next hidden state [B, T, d], scaled and shifted in float32."""
        return scaled(hidden, *super().forward(conditioning))


def scaled(hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return ``hidden * (1 + scale) + shift`` in the dtype of ``hidden``, computed in float32."""
    return (hidden.float() * (1 + scale.float()) + shift.float()).to(hidden.dtype)


def rays(poses: Tensor, intrinsics: Tensor, height: int, width: int) -> Tensor:
    """Return the camera ray of each pixel: origin, then direction of length 1.

    Parameters
    ----------
    poses : Tensor
        Rotation and translation of each latent frame's camera relative to the camera of the frame before, float32 [B,
        F, 3, 4].
    intrinsics : Tensor
        Camera intrinsics, float32 [B, F, 4]: focal lengths along x and y and centre x and y, in pixels of the video.
    height, width : int
        Height H and width W of the video in pixels.

    Returns
    -------
    Tensor
        Rays, float32 [B, F, 6, H, W]; x points right, y down, z forward.
    """
    fx, fy, cx, cy = intrinsics[..., None].unbind(-2)  # each [B, F, 1]
    x = (torch.arange(width, device=poses.device) + 0.5 - cx) / fx  # [B, F, W]
    y = (torch.arange(height, device=poses.device) + 0.5 - cy) / fy  # [B, F, H]
    x, y = torch.broadcast_tensors(x[..., None, :], y[..., :, None])  # [B, F, H, W]
    forward = torch.stack((x, y, torch.ones_like(x)), 2)  # [B, F, 3, H, W]
    forward = forward / forward.square().sum(2, keepdim=True).sqrt()
    turned = (poses[..., :3].mT.unsqueeze(-1).unsqueeze(-1) * forward.unsqueeze(3)).sum(2)
    origin = poses[..., 3, None, None].expand_as(turned)
    return torch.cat((origin, turned), 2)


def as_tokens(pixels: Tensor) -> Tensor:
    """Return [B, T, C*256], the 16 x 16 pixels of each token, from [B, F, C, H, W].

    Pixels are unshuffled to cells of 8 x 8 first, then cells to patches of 2 x 2. The numbers of a token are ordered
    (channel, row in the cell, column in the cell, row in the patch, column in the patch).
    """
    batch, frames, channels, height, width = pixels.shape
    side = CELL * PATCH
    x = pixels.reshape(batch, frames, channels, height // side, PATCH, CELL, width // side, PATCH, CELL)
    return x.permute(0, 1, 3, 6, 2, 5, 8, 4, 7).flatten(4).flatten(1, 3)
