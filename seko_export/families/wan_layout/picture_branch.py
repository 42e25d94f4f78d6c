"""The picture branch of Wan 2.1, with CLIP's features of a picture, to which every layer attends beside the text.

In a build without an image encoder, the caller supplies the features of the picture. In a build with an image encoder,
the features are computed from the picture once per prompt.

In shapes N is the number of features of all pictures together, I their width, d the model's width, H the number
of heads, D the number of channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.layers.causal_dit import PromptKv
from seko_export.families.layers.choice import PROMPT, PromptModule
from seko_export.families.wan_layout.picture_sizes import IN_LAYER
from seko_export.media.clip.encoder import ClipFeatures
from seko_export.media.pieces import IMAGE_ENCODER
from seko_runtime.controls.pictures import FEATURES_KIND
from seko_runtime.format.manifest import InputSpec
from seko_runtime.video.conditioning.clip_pictures import KIND
from seko_runtime.video.contract import PICTURE_CHANNELS

FEATURES = "picture"  # name of the caller's input with CLIP's features
PICTURES = "squashed"  # name of the caller's input with pictures that the host resizes to CLIP's square without a crop
SEEN = "picture_seen"  # features that the build's image encoder computes
TOKENS, KEYS, VALUES = "picture_tokens", "picture_k", "picture_v"
PROJECTION = "img_emb"  # name of a prompt module, with which its weights' names begin, as with `IN_LAYER`


@dataclass(frozen=True)
class PictureBranch:
    """Description of a model's picture branch: the layers that attend to a picture's features.

    Parameters
    ----------
    eps : float
        Epsilon of the projection's norms.
    positions : bool
        Whether the projection adds a learnt position to each feature, as models of two pictures do.
    picture : InputSpec
        The caller's input with the pictures, in a build with an image encoder.
    encoder : callable
        Function that returns, for a build with an image encoder, the module that maps the pictures to features.
    """

    eps: float
    picture: InputSpec
    encoder: Callable[[VideoBuild], nn.Module]
    positions: bool = False


def picture_branch(config: VideoBuild, branch: PictureBranch) -> tuple[InputSpec, tuple[PromptModule, ...]]:
    """Return the caller's input of the picture branch, and the modules that compute each layer's keys and values.

    Raises
    ------
    UsageError
        If the model has no picture branch.
    """
    model, dtype = config.model, config.target.dtype
    if model.picture_features is None:
        raise UsageError(f"{model.name!r} has no picture branch")
    count, _ = features = model.picture_features
    taken = InputSpec(FEATURES, features, "float32", f"input.{FEATURES}", per=PROMPT, kind=FEATURES_KIND)
    encoder: tuple[PromptModule, ...] = ()
    source = FEATURES
    if config.workload.image is not None:
        taken, source = branch.picture, SEEN
        seen = {SEEN: (features, dtype)}
        encoder = (PromptModule(IMAGE_ENCODER, branch.encoder, (taken.name,), lambda _: seen),)
    tokens = {TOKENS: ((count, model.dim), dtype)}
    heads = ((count, model.heads, model.head_dim), dtype)
    return taken, (
        *encoder,
        PromptModule(PROJECTION, lambda config: PictureTokens(config, branch), (source,), lambda _: tokens),
        PromptModule(
            IN_LAYER, PictureKv, (TOKENS,), lambda _: dict.fromkeys((KEYS, VALUES), heads), per_layer=True
        ),
    )


class PictureTokens(nn.Module):
    """The module that projects CLIP's features to tokens of the model's width."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild, branch: PictureBranch) -> None:
        super().__init__()
        model, dtype = config.model, config.target.dtype
        if model.picture_features is None:
            raise TypeError(f"{model.name} has no picture branch")
        self.features = FEATURES if config.workload.image is None else SEEN
        count, width = model.picture_features
        self.proj = nn.Sequential(
            nn.LayerNorm(width, branch.eps),
            nn.Linear(width, width, dtype=dtype),
            nn.GELU(),
            nn.Linear(width, model.dim, dtype=dtype),
            nn.LayerNorm(model.dim, branch.eps),
        )
        self.emb_pos = nn.Parameter(torch.empty(1, count, width)) if branch.positions else None

    def forward(self, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Project picture features [..., N, I] to tokens [..., N, d]."""
        dtype = self.proj[1].weight.dtype
        features = conditioning[self.features].float()
        if self.emb_pos is not None:
            features = features + self.emb_pos[0]
        inner = self.proj[3](self.proj[2](self.proj[1](self.proj[0](features).to(dtype))))
        tokens: Tensor = self.proj[4](inner.float()).to(dtype)
        return tokens


class PictureKv(PromptKv):
    """The projections of one layer's keys and values of the picture."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__(config.model, config.target.dtype)

    def forward(self, conditioning: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return keys and values, [..., N, H, D] each, from the tokens [..., N, d]."""
        return super().forward(conditioning[TOKENS])


class PictureFeatures(ClipFeatures):
    """The module that encodes pictures to CLIP's features.

    Parameters
    ----------
    picture : str
        Name of the input with the pictures.
    """

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild, picture: str) -> None:
        if config.workload.image is None:
            raise TypeError("a build without an image encoder has no such engine")
        super().__init__(config.workload.image, config.target.dtype)
        self.picture = picture

    def forward(self, conditioning: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return the features [..., N, I] of the row's pictures. In a pool neither pictures nor features have a row
        axis."""
        return self.features_of(conditioning[self.picture])

    def features_of(self, pictures: Tensor) -> Tensor:
        """Return features [..., N, I] of pictures [..., rows, columns, 3]."""
        features: Tensor = super().forward(pictures.reshape(-1, *pictures.shape[-3:]))
        return features.reshape(*pictures.shape[:-3], *features.shape[1:])


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


def squashed_branch(config: VideoBuild, eps: float, *, positions: bool = False) -> PictureBranch:
    """Return the branch of pictures that the host resizes to CLIP's square, [P, side, side, 3] float32; the other
    parameters are those of `PictureBranch`."""
    image = config.workload.image
    side = 0 if image is None else image.side
    shape = (config.model.seen_pictures, side, side, PICTURE_CHANNELS)
    squashed = InputSpec(PICTURES, shape, "float32", f"input.{PICTURES}", per=PROMPT, kind=KIND)
    return PictureBranch(eps, squashed, SquashedFeatures, positions=positions)


def golden_pictures(config: VideoBuild, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the golden's input of a branch of squashed pictures: random pictures, or features without an image
    encoder; empty for a model without the branch."""
    model, image, batch = config.model, config.workload.image, config.workload.stream.batch
    if image is not None:
        shape = (batch, model.seen_pictures, image.side, image.side, PICTURE_CHANNELS)
        return {PICTURES: 255 * torch.rand(shape, generator=generator)}
    if model.picture_features is None:
        return {}
    return {FEATURES: torch.randn(batch, *model.picture_features, generator=generator)}
