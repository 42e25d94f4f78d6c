"""The static step against diffusers' WanTransformer3DModel: a plain forward, and one masked forward past the wrap.

Recipe A: the first chunk is an ordinary forward. Recipe B: any later chunk is one forward over every frame since
the start of the stream, in which each frame sees what was in the cache when its own chunk ran: sink and the last
ring frames up to the end of that chunk. Context frames stand at their cached time, so their hidden states, and
with them their K and V, are those that the context passes cached.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.wan_layout.namings import diffusers_to_wan
from tests.support.tolerances import ORACLE, relative_error
from tests.truth.eager_stream import EagerStream, random_text, small_config

BAR = ORACLE[torch.float32]


class MaskedSelfAttention(WanAttnProcessor):
    """diffusers' own attention, given a mask."""

    mask: Tensor | None = None

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None
    ) -> Tensor:
        """Run with our mask in place of the model's, which has none."""
        assert attention_mask is None
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.mask, rotary_emb)


def make_oracle(model: ModelConfig, seed: int) -> WanTransformer3DModel:
    """Return a random fp32 model: matrices and biases at 0.05, so that no part of the output is degenerate."""
    oracle = WanTransformer3DModel(
        num_attention_heads=model.heads,
        attention_head_dim=model.head_dim,
        in_channels=model.in_channels,
        out_channels=model.out_channels,
        text_dim=model.text_dim,
        freq_dim=model.freq_dim,
        ffn_dim=model.ffn_dim,
        num_layers=model.layers,
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.normal_(0.0, 0.05, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    for block in oracle.blocks:
        block.attn1.set_processor(MaskedSelfAttention())
    return oracle


def visible_frames(frame: int, stream: StreamConfig) -> set[int]:
    """Return the frames that ``frame``'s chunk saw."""
    end = (frame // stream.chunk_frames + 1) * stream.chunk_frames
    sink = set(range(min(end, stream.sink_frames)))
    return sink | set(range(max(stream.sink_frames, end - stream.ring_frames), end))


def full_forward(
    oracle: WanTransformer3DModel,
    stream: StreamConfig,
    latents: Tensor,
    times: Tensor,
    text: Tensor,
    *,
    masked: bool,
    features: Tensor | None = None,
) -> Tensor:
    """Return the velocity [B, C, all frames, h, w] of latents of that shape at times [B, all frames].

    ``features`` [B, N, width] are a picture's, for a model that takes them.
    """
    frames, n = latents.shape[2], stream.frame_tokens
    mask = None
    if masked:
        seen = torch.zeros(frames, frames, dtype=torch.bool)
        for frame in range(frames):
            seen[frame, sorted(visible_frames(frame, stream))] = True
        mask = seen.repeat_interleave(n, 0).repeat_interleave(n, 1)[None, None]
    for block in oracle.blocks:
        block.attn1.processor.mask = mask
    with torch.no_grad():
        return oracle(latents, times.repeat_interleave(n, 1), text, features, return_dict=False)[0]


@pytest.mark.parametrize(("chunk", "sink", "ring", "batch"), [(3, 1, 6, 2), (2, 3, 5, 1), (1, 0, 3, 1)])
def test_every_chunk_past_the_wrap_agrees_with_one_masked_forward(chunk, sink, ring, batch, worst):
    """Chunk by chunk, pass by pass, over 2.5 times the cache."""
    config = small_config(chunk, sink, ring, batch=batch, passes=2)
    oracle = make_oracle(config.model, seed=chunk)
    wan = {diffusers_to_wan(name): tensor for name, tensor in oracle.state_dict().items()}
    text = random_text(config.model, batch)
    stream = EagerStream(config, wan, text)
    clean: list[Tensor] = []
    chunks = -(-5 * config.workload.stream.cache_frames // (2 * chunk))
    for number in range(chunks):
        passes = stream.run_chunk([number * chunk] * batch, list(range(20, 20 + batch)))
        for done in passes[:-1]:
            latents = torch.cat([*clean, done.latents], dim=2)
            times = torch.zeros(batch, latents.shape[2])  # context at its cached time
            times[:, -chunk:] = done.timestep
            wanted = full_forward(oracle, config.workload.stream, latents, times, text, masked=True)[
                :, :, -chunk:
            ]
            if number == 0:  # recipe A: the first chunk needs no mask
                plain = full_forward(oracle, config.workload.stream, latents, times, text, masked=False)
                error = relative_error(done.velocity, plain)
                worst("diffusers, recipe A", error)
                assert error <= BAR
            for row in range(batch):
                error = relative_error(done.velocity[row], wanted[row])
                worst(f"diffusers, recipe B, B={batch}", error)
                assert error <= BAR, (number, done.timestep, row)
        clean.append(passes[-1].latents)
    assert chunks * chunk > 2 * config.workload.stream.cache_frames


def test_a_start_picture_of_wan_2_2_has_a_time_of_its_own(worst):
    """48 channels, and diffusers' times for every token (``expand_timesteps``): 0 for those of the picture's frame."""
    config = small_config(3, 1, 6, passes=2)
    model = replace(config.model, in_channels=48, out_channels=48)
    config = replace(config, model=model)
    oracle = make_oracle(model, seed=5)
    wan = {diffusers_to_wan(name): tensor for name, tensor in oracle.state_dict().items()}
    text = random_text(model, 1)
    stream = EagerStream(config, wan, text)
    shape = stream.buffers["latents"].shape
    picture = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    *passes, context = stream.run_chunk([0], [20], conditioning=([1], picture))
    for done in passes:
        assert torch.equal(done.latents[:, :, 0], picture[:, :, 0])
        times = torch.full((1, shape[2]), float(done.timestep))
        times[:, 0] = 0
        wanted = full_forward(oracle, config.workload.stream, done.latents, times, text, masked=False)
        error = relative_error(done.velocity, wanted)
        worst("diffusers, a start picture of Wan 2.2", error)
        assert error <= BAR
        even = torch.full_like(times, float(done.timestep))
        uniform = full_forward(oracle, config.workload.stream, done.latents, even, text, masked=False)
        assert relative_error(done.velocity, uniform) > 100 * BAR
    assert torch.equal(context.latents[:, :, 0], picture[:, :, 0])


def test_the_window_matters():
    """A mask without the window is refuted past the wrap: the oracle above can tell."""
    config = small_config(2, 1, 3, passes=1)
    oracle = make_oracle(config.model, seed=0)
    wan = {diffusers_to_wan(name): tensor for name, tensor in oracle.state_dict().items()}
    text = random_text(config.model, 1)
    stream = EagerStream(config, wan, text)
    passes = [stream.run_chunk([2 * number], [1]) for number in range(4)]
    latents = torch.cat([p[-1].latents for p in passes[:-1]] + [passes[-1][0].latents], dim=2)
    times = torch.zeros(1, 8)
    times[:, -2:] = passes[-1][0].timestep
    endless = StreamConfig(64, 96, chunk_frames=2, sink_frames=0, ring_frames=100)
    wide = full_forward(oracle, endless, latents, times, text, masked=True)[:, :, -2:]
    assert relative_error(passes[-1][0].velocity, wide) > 100 * BAR
