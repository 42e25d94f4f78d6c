"""The pictures of the picture branch as an input. The host resizes the pictures to CLIP's square without a crop, and
CLIP's image encoder, an engine, encodes them."""

from __future__ import annotations

from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.choice import PROMPT
from seko_export.families.wan_i2v.keys import i2v_model
from seko_export.families.wan_layout.picture_branch import PictureBranch, PictureFeatures
from seko_runtime.format.manifest import InputSpec
from seko_runtime.video.conditioning.squashed import KIND
from seko_runtime.video.contract import PICTURE_CHANNELS

PICTURES = "squashed"  # name of the caller's input


class SquashedFeatures(PictureFeatures):
    """The module that encodes all pictures of a row to CLIP's features, one picture after the other."""

    def __init__(self, config: VideoBuild) -> None:
        super().__init__(config, PICTURES)

    def features_of(self, pictures: Tensor) -> Tensor:
        """Return features [..., P*N, I] of P squashed pictures [..., P, side, side, 3] float32."""
        return super().features_of(pictures).flatten(-3, -2)

    def resized(self, pictures: Tensor) -> Tensor:
        """Return the pictures [B, 3, side, side] with levels 0 to 1, without a resize, because they have CLIP's size
        already."""
        return pictures.permute(0, 3, 1, 2) / 255


def pictures_branch(config: VideoBuild) -> PictureBranch:
    """Return the picture branch, whose image encoder takes the pictures [P, side, side, 3] float32."""
    model, image = i2v_model(config.model), config.workload.image
    side = 0 if image is None else image.side
    shape = (model.pictures, side, side, PICTURE_CHANNELS)
    squashed = InputSpec(PICTURES, shape, "float32", f"input.{PICTURES}", per=PROMPT, kind=KIND)
    return PictureBranch(model.image_eps, squashed, SquashedFeatures, positions=model.last_picture)
