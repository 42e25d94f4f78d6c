"""A second truth: diffusers' Wan transformer with 36 channels, and two lines for the camera in its block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor

from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.families.wan_layout.namings import wan_to_diffusers
from tests.lingbot.streams import INPUTS, given_of, lingbot_config, random_checkpoint
from tests.support.tolerances import ORACLE, relative_error
from tests.truth.eager_stream import EagerStream, random_text
from tests.truth.naive_lingbot import naive_plucker
from tests.truth.test_diffusers_oracle import MaskedSelfAttention, full_forward

BAR = ORACLE[torch.float32]


class CameraBlock(WanTransformerBlock):
    """diffusers' block with a camera behind self-attention."""

    own: dict[str, Tensor]  # the layer's weights by lingbot's names
    tokens: Tensor  # [T, d], of all frames

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb) -> Tensor:
        x = hidden_states
        shift, scale, gate, c_shift, c_scale, c_gate = (self.scale_shift_table.unsqueeze(0) + temb).unbind(2)
        x = x + self.attn1(self.norm1(x) * (1 + scale) + shift, None, None, rotary_emb) * gate
        u = self.tokens + linear(
            self.own, "cam_injector_layer2", F.silu(linear(self.own, "cam_injector_layer1", self.tokens))
        )
        x = (1 + linear(self.own, "cam_scale_layer", u)) * x + linear(self.own, "cam_shift_layer", u)
        x = x + self.attn2(self.norm2(x), encoder_hidden_states, None, None)
        return x + self.ffn(self.norm3(x) * (1 + c_scale) + c_shift) * c_gate


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def camera_tokens(checkpoint: dict[str, Tensor], plucker: Tensor) -> Tensor:
    """Return [T, d] of rays [frames, 6, H, W], by torch's own unshuffle and unfold."""
    cells = F.unfold(F.pixel_unshuffle(plucker, 8), 2, stride=2).transpose(1, 2).flatten(0, 1)  # [T, 1536]
    p = linear(checkpoint, "patch_embedding_wancamctrl", cells)
    inner = F.silu(linear(checkpoint, "c2ws_hidden_states_layer1", p))
    return p + linear(checkpoint, "c2ws_hidden_states_layer2", inner)


def test_every_chunk_past_the_wrap_agrees_with_one_masked_forward(worst: Any) -> None:
    config = lingbot_config()
    m, s, checkpoint = config.model, config.workload.stream, random_checkpoint()
    text = random_text(m, 1)
    oracle = WanTransformer3DModel(
        num_attention_heads=m.heads, attention_head_dim=m.head_dim, in_channels=36, out_channels=16,
        text_dim=m.text_dim, freq_dim=m.freq_dim, ffn_dim=m.ffn_dim, num_layers=m.layers,
    ).eval()  # fmt: skip
    oracle.load_state_dict({wan_to_diffusers(name): checkpoint[name] for name in wan_shapes(m)})
    for number, block in enumerate(oracle.blocks):
        block.__class__ = CameraBlock
        block.attn1.set_processor(MaskedSelfAttention())
        prefix = f"blocks.{number}."
        block.own = {
            name.removeprefix(prefix): tensor
            for name, tensor in checkpoint.items()
            if name.startswith(prefix)
        }
    stream = EagerStream(config, checkpoint, text)
    table = given_of(config, None)["condition"]
    stream.buffers[INPUTS["condition"]].copy_(table)
    clean: list[Tensor] = []
    rays: list[Tensor] = []
    for number in range(6):
        inputs = given_of(config, number)
        for name, value in inputs.items():
            stream.buffers[INPUTS[name]].copy_(value)
        poses, intrinsics = inputs[POSES][0].numpy(), inputs[INTRINSICS][0].numpy()
        rays.append(naive_plucker(poses, intrinsics, s.height, s.width))
        tokens = camera_tokens(checkpoint, torch.cat(rays))
        for block in oracle.blocks:
            block.tokens = tokens
        passes = stream.run_chunk([number * s.chunk_frames], [3])
        for done in passes[:-1]:
            latents = torch.cat([*clean, done.latents], 2)
            frames = latents.shape[2]
            whole = torch.cat((latents, table[:, :, :frames]), 1)
            times = torch.zeros(1, frames)
            times[:, -s.chunk_frames :] = done.timestep
            wanted = full_forward(oracle, s, whole, times, text, masked=True)[:, :, -s.chunk_frames :]
            error = relative_error(done.velocity, wanted)
            worst("lingbot against diffusers with a camera in the block", error)
            assert error <= BAR, (number, done.timestep)
        clean.append(passes[-1].latents)
    assert 6 * s.chunk_frames > 2 * s.cache_frames
