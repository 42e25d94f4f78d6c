"""Sizes of a first picture's condition, which several families share. The module `picture_sizes` is imported before
torch is."""

from __future__ import annotations

from seko_export.config.model import ModelConfig
from seko_export.errors import UsageError

MASK_CHANNELS = 4  # channels of the mask, in front of the picture's latents in the condition
TABLE_FRAMES = 30
"""Number of entries of the condition table. From latent frame 29 on the VAE's encoder no longer sees the picture, so
all later latents are equal bit by bit."""
IN_LAYER = "picture"  # name of the prompt module of a layer's attention to a picture's features
BRANCH_NAMES = {
    f".{IN_LAYER}.k.": ".cross_attn.k_img.",
    f".{IN_LAYER}.v.": ".cross_attn.v_img.",
    f".{IN_LAYER}.norm_k.": ".cross_attn.norm_k_img.",
}
"""For each part of a weight's name in the artifact: the text that replaces the part in the checkpoint's name; see
`RenamedWeights`."""


def has_condition(in_channels: int, out_channels: int) -> bool:
    """Return whether a model's input channels are latents, mask and a picture's latents."""
    return in_channels == 2 * out_channels + MASK_CHANNELS


def condition_channels(model: ModelConfig) -> int:
    """Return the number of condition channels beside a model's latents: a mask, and latents of a picture."""
    return model.in_channels - model.out_channels


def check_condition(model: ModelConfig) -> None:
    """Raise a UsageError unless a model's input channels are latents, mask and a picture's latents."""
    if not has_condition(model.in_channels, model.out_channels):
        raise UsageError(
            f"in_channels {model.in_channels} beside out_channels {model.out_channels}: expected "
            f"{2 * model.out_channels + MASK_CHANNELS}, latents, a mask of {MASK_CHANNELS} and a picture's latents"
        )
