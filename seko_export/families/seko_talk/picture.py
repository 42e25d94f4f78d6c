"""The modules of the portrait: the reference frame before the stream, and its CLIP features beside the text.

The CLIP features are an input that the caller supplies. In a build with an image encoder they are computed from the
portrait once per prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH, StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.families.layers.causal_dit import Embed, PromptKv
from seko_export.families.seko_talk.keys import talk_model
from seko_export.media.clip.encoder import ClipFeatures

# names of the caller's inputs: CLIP's features, or the picture itself
FEATURES, PORTRAIT = "picture", "portrait"
SEEN = "picture_seen"  # features of the caller's portrait, if the build has the image encoder
TOKENS, KEYS, VALUES = "picture_tokens", "picture_k", "picture_v"


class ReferenceEmbed(Embed):
    """The embedding, which treats the reference picture (negative frames) with its own weights and with the timestep
    of the pass."""

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        dtype: torch.dtype,
        *,
        key_rotary: bool,
        update: bool = False,
    ) -> None:
        super().__init__(model, stream, dtype, key_rotary=key_rotary, update=update)
        self.ref_patch_embedding = nn.Linear(model.in_channels * PATCH * PATCH, model.dim, dtype=dtype)
        self.ref_state = talk_model(model).ref_state
        self.state_embedding = nn.Embedding(talk_model(model).state_rows, model.dim, dtype=dtype)

    def tokens(self, patches: Tensor, frames: Tensor) -> Tensor:
        """Return the embedded patches [B, T, d] of stream frames and reference frames."""
        before = (frames < 0).repeat_interleave(self.stream.frame_tokens, 1)[..., None]  # [B, T, 1]
        reference = self.ref_patch_embedding(patches) + self.state_embedding.weight[self.ref_state]
        return torch.where(before, reference, self.patch_embedding(patches))

    def times(
        self, timestep: Tensor, frames: Tensor, conditioning_frames: Tensor, context_timestep: Tensor
    ) -> Tensor:
        """Return the timestep [B, F] of each frame: the context timestep for conditioning frames, the timestep of the
        pass for all others, including reference frames."""
        usual = super().times(timestep, frames, conditioning_frames, context_timestep)
        return torch.where(frames < 0, timestep, usual)


class PictureFeatures(ClipFeatures):
    """The module that encodes the portrait to CLIP's features."""

    groups = ("given",)

    def __init__(self, config: VideoBuild) -> None:
        if config.workload.image is None:
            raise TypeError("a build without an image encoder has no such engine")
        super().__init__(config.workload.image, config.target.dtype)

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return features [..., N, image_dim] of ``portrait`` [..., H, W, 3] uint8; in a pool there is no row
        axis."""
        portraits = given[PORTRAIT]
        features: Tensor = super().forward(portraits.reshape(-1, *portraits.shape[-3:]))
        return features.reshape(*portraits.shape[:-3], *features.shape[1:])


class PictureTokens(nn.Module):
    """The module that projects CLIP's features to tokens of the model's width."""

    groups = ("given",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        model, dtype = talk_model(config.model), config.target.dtype
        self.features = FEATURES if config.workload.image is None else SEEN
        self.proj = nn.Sequential(
            nn.LayerNorm(model.image_dim, model.image_eps),
            nn.Linear(model.image_dim, model.image_dim, dtype=dtype),
            nn.GELU(),
            nn.Linear(model.image_dim, model.dim, dtype=dtype),
            nn.LayerNorm(model.dim, model.image_eps),
        )

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        """Project picture features [..., N, image_dim] to tokens [..., N, d]."""
        dtype = self.proj[1].weight.dtype
        inner = self.proj[3](self.proj[2](self.proj[1](self.proj[0](given[self.features].float()).to(dtype))))
        tokens: Tensor = self.proj[4](inner.float()).to(dtype)
        return tokens


class PictureKv(PromptKv):
    """The projections of one layer's keys and values of the picture."""

    groups = ("given",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__(config.model, config.target.dtype)

    def forward(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return keys and values, [..., N, H, D] each, from the tokens [..., N, d]."""
        return super().forward(given[TOKENS])
