"""The module that embeds the portrait as the reference frame before the stream, and the picture branch that takes the
portrait as input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH, StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.layers.choice import PROMPT
from seko_export.families.seko_talk.model import SekoTalkModel
from seko_export.families.wan_layout.picture_branch import PictureBranch, PictureFeatures
from seko_runtime.format.manifest import InputSpec
from seko_runtime.video.contract import PICTURE_CHANNELS
from seko_runtime.video.reference_frames import PORTRAIT as PORTRAIT_KIND

PORTRAIT = "portrait"  # name of the caller's input


def portrait_branch(config: VideoBuild) -> PictureBranch:
    """Return the picture branch, whose image encoder takes the portrait [H, W, 3] uint8."""
    s, model = config.workload.stream, SekoTalkModel.of(config.model)
    shape = (s.height, s.width, PICTURE_CHANNELS)
    portrait = InputSpec(PORTRAIT, shape, "uint8", f"input.{PORTRAIT}", per=PROMPT, kind=PORTRAIT_KIND)
    return PictureBranch(model.image_eps, portrait, lambda config: PictureFeatures(config, PORTRAIT))


class ReferenceEmbed(Embed):
    """The embedding of Seko-Talk. The reference picture (negative frame numbers) has separate embedding weights, and
    the timestep of the pass."""

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
        self.ref_state = SekoTalkModel.of(model).ref_state
        self.state_embedding = nn.Embedding(SekoTalkModel.of(model).state_rows, model.dim, dtype=dtype)

    def tokens(self, patches: Tensor, frames: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the embedded patches [B, T, d] of stream frames and reference frames."""
        del conditioning
        before = (frames < 0).repeat_interleave(self.stream.frame_tokens, 1)[..., None]  # [B, T, 1]
        reference = self.ref_patch_embedding(patches) + self.state_embedding.weight[self.ref_state]
        return torch.where(before, reference, self.patch_embedding(patches))

    def times(
        self, timestep: Tensor, frames: Tensor, conditioning_frames: Tensor, context_timestep: Tensor
    ) -> Tensor:
        """Return the timestep [B, F] of each frame: the context timestep for conditioning frames, and the timestep of
        the pass for all other frames, including reference frames."""
        usual = super().times(timestep, frames, conditioning_frames, context_timestep)
        return torch.where(frames < 0, timestep, usual)
