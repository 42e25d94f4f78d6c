"""The causal DiT with a picture beside its latents and a camera in every layer: lingbot-world, for training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from scripts.train_sample.causal_training import Block, CausalDit, init_weights
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.lingbot.camera import as_tokens, rays, scaled
from seko_export.families.lingbot.model import LingbotModel

# A token's numbers are pixels that move alike, so a step's rate would act 256 times; the trained weights are larger by
# this, the checkpoint's are what the model multiplies by.
CONTROL_SCALE = 1 / 16
_CONTROL = "patch_embedding_wancamctrl.weight"


class CameraBlock(Block):
    """One layer with a camera."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        d = model.dim
        self.cam_injector_layer1, self.cam_injector_layer2 = nn.Linear(d, d), nn.Linear(d, d)
        self.cam_scale_layer, self.cam_shift_layer = nn.Linear(d, d), nn.Linear(d, d)

    def steered(self, x: Tensor, camera: Tensor | None) -> Tensor:
        """Return the hidden state, scaled and shifted by what this layer makes of the camera's tokens."""
        assert camera is not None  # of every forward of this model
        inner = camera + self.cam_injector_layer2(F.silu(self.cam_injector_layer1(camera)))
        return scaled(x, self.cam_scale_layer(inner), self.cam_shift_layer(inner))


class CameraDit(CausalDit):
    """The causal DiT that a picture and a camera steer; latents come with the condition's channels behind them.

    Parameters
    ----------
    model, stream
        Dimensions and layout, as the exporter takes them.
    """

    def __init__(self, model: LingbotModel, stream: StreamConfig) -> None:
        super().__init__(model, stream)
        d = model.dim
        self.patch_embedding_wancamctrl = nn.Linear(model.control_width, d)
        self.c2ws_hidden_states_layer1, self.c2ws_hidden_states_layer2 = nn.Linear(d, d), nn.Linear(d, d)

    def make_layer(self) -> Block:
        """Return one new layer, with a camera."""
        return CameraBlock(self.model)

    def camera_tokens(self, poses: Tensor, intrinsics: Tensor) -> Tensor:
        """Return [B, F, n, d] of framewise poses [B, F, 3, 4] and intrinsics [B, F, 4]."""
        seen = as_tokens(rays(poses, intrinsics, self.stream.height, self.stream.width))
        tokens: Tensor = self.patch_embedding_wancamctrl(seen * CONTROL_SCALE)
        inner = self.c2ws_hidden_states_layer2(F.silu(self.c2ws_hidden_states_layer1(tokens)))
        by_frame: Tensor = (tokens + inner).unflatten(1, (poses.shape[1], -1))
        return by_frame


def begin(model: CameraDit, seed: int, weights: Mapping[str, Tensor], source_layers: tuple[int, ...]) -> None:
    """Fill a model from a Wan checkpoint of its width: new channels and the camera begin without effect.

    Parameters
    ----------
    model : CameraDit
        To fill.
    seed : int
        Of what is new.
    weights : mapping of str to Tensor
        By the checkpoint's names, with as many latent channels as the model has noise channels.
    source_layers : tuple of int
        The checkpoint's layer for each of the model's.
    """
    init_weights(model, seed)
    mine = dict(model.named_parameters())
    with torch.no_grad():
        for layer, source in enumerate(source_layers):
            for name, values in weights.items():
                if name.startswith(f"blocks.{source}."):
                    mine[name.replace(f"blocks.{source}.", f"blocks.{layer}.", 1)].copy_(values)
        for name, values in weights.items():
            if name == "patch_embedding.weight":
                mine[name].zero_()
                mine[name][:, : values.shape[1]].copy_(values)
            elif not name.startswith("blocks."):
                mine[name].copy_(values)
        for name, parameter in mine.items():
            if "cam_scale_layer" in name or "cam_shift_layer" in name:
                parameter.zero_()
        mine[_CONTROL].div_(CONTROL_SCALE)


def to_checkpoint(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trained weights as a checkpoint of lingbot-world's layout has them."""
    return {name: t * CONTROL_SCALE if name == _CONTROL else t for name, t in weights.items()}
