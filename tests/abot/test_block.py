"""The transformer with keys and reference tokens against its reference, past the wrap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seko_export.config.pool import PoolConfig
from seko_export.families.abot.actions import ACTIONS, KeyTokens, summed
from seko_export.families.abot.keys import ADAPTER, CONV
from seko_export.families.abot.model import KEY_BITS
from seko_export.families.layers.choice import CHUNK
from seko_export.families.layers.layer_pieces import BLOCK, FRONT, FRONT_EMBED
from seko_export.families.registry import graph_of
from seko_export.lowering.trace import trace
from seko_runtime.video.contract import FRONT_CACHES
from tests.abot.streams import abot_config, keys_of, naive_of, naive_velocity, press, random_checkpoint
from tests.support.tolerances import relative_error
from tests.truth.eager_stream import EagerStream, random_text

BAR = 1e-5  # in float32


@pytest.mark.parametrize(
    "layout", [{}, {"height": 96, "width": 160}, {"ring_frames": 9}, {"context": "reuse"}]
)
@pytest.mark.parametrize("still", [0, 1])
def test_every_chunk_past_two_windows_is_the_references(layout, still, worst) -> None:
    """Fed pass by pass, from noise or from a first picture, with other keys in each latent frame."""
    config = abot_config(layout=layout)
    s, checkpoint, text = config.workload.stream, random_checkpoint(), random_text(config.model, 1)
    stream, naive = EagerStream(config, checkpoint, text), naive_of(config, checkpoint, text[0])
    picture = torch.randn(stream.buffers["latents"].shape, generator=torch.Generator().manual_seed(9))
    chunks = 2 * s.cache_frames // s.chunk_frames + 2
    for number in range(chunks):
        keys, first = keys_of(config, number), number * s.chunk_frames
        press(stream, keys)
        count = still if number == 0 else 0
        for done in stream.run_chunk([first], [3], conditioning=([count], picture)):
            if count:
                assert torch.equal(done.latents[:, :, :count], picture[:, :, :count])
            velocity = naive_velocity(naive, done, 0, first, keys[0], count)
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst("abot, velocity", error)
                assert error <= BAR, (number, done.timestep)


def first_chunk(config, keys: torch.Tensor, checkpoint=None) -> torch.Tensor:
    """The velocity [C, F, h, w] of a stream's first pass with keys [F, 8]."""
    checkpoint = random_checkpoint() if checkpoint is None else checkpoint
    stream = EagerStream(config, checkpoint, random_text(config.model, 1))
    press(stream, keys[None])
    return stream.run_chunk([0], [3])[0].velocity[0]


def held(*names: str, frames: range = range(3)) -> torch.Tensor:
    """Keys [F, 8] with some held in some latent frames."""
    keys = torch.zeros(3, len(KEY_BITS), dtype=torch.uint8)
    for name in names:
        keys[frames.start : frames.stop, KEY_BITS.index(name)] = 1
    return keys


def test_every_key_counts_alone_and_together_and_in_its_frame() -> None:
    config = abot_config()
    each = {name: first_chunk(config, held(*name)) for name in ("", *KEY_BITS)}
    each |= {
        "WD": first_chunk(config, held("W", "D")),
        "late": first_chunk(config, held("W", frames=range(2, 3))),
    }
    names = list(each)
    for at, name in enumerate(names):
        for other in names[at + 1 :]:
            assert relative_error(each[name], each[other]) > 1e-3, (name, other)


def test_no_key_is_not_the_adapter_left_out() -> None:
    """Its biases reach every token."""
    config, checkpoint = abot_config(), random_checkpoint()
    without = {name: w if ADAPTER not in name else torch.zeros_like(w) for name, w in checkpoint.items()}
    assert relative_error(first_chunk(config, held(), without), first_chunk(config, held())) > 1e-3


def test_a_held_key_means_more_than_one_vector() -> None:
    """The 3 x 3 convolutions see zeros outside of the picture: three tokens from its border on, all are alike."""
    config = abot_config(layout={"height": 7 * 32, "width": 8 * 32})
    module = KeyTokens(config).requires_grad_(False)
    checkpoint = random_checkpoint()
    names = {f"{ADAPTER}.{name}": p for name, p in module.named_parameters()}
    for name, p in names.items():
        p.copy_(summed(checkpoint[name]) if name == f"{CONV}.weight" else checkpoint[name])
    tokens = module({ACTIONS: held("W")[None]}).unflatten(1, (3, 7, 8))[0, 0]
    inner, border = tokens[2:-2, 2:-2].flatten(0, 1), tokens[0]
    assert relative_error(inner, inner[:1].expand_as(inner)) <= BAR
    assert relative_error(border[3], inner[0]) > 0.01
    assert relative_error(border[0], border[3]) > 0.01


def test_the_reference_tokens_count_though_they_are_zeros() -> None:
    """They are queries in the first chunk's passes and are seen ever after; a stream without them is another one."""
    config, checkpoint = abot_config(), random_checkpoint()
    text = random_text(config.model, 1)
    bare = config.changed(model=replace(config.model, references=0))
    streams = [EagerStream(each, checkpoint, text) for each in (config, bare)]
    kept = []
    for number in range(4):  # past the window
        passes = []
        for stream in streams:
            press(stream, keys_of(config, number))
            feed = None if not passes else [done.latents for done in passes[0]]
            passes.append(stream.run_chunk([3 * number], [3], feed=feed))
        assert relative_error(passes[1][0].velocity, passes[0][0].velocity) > 1e-3
        kept.append([streams[0].buffers[name].clone() for name in FRONT_CACHES])
    assert all(torch.equal(*pair) for pair in zip(kept[0], kept[-1], strict=True))
    assert kept[0][0].abs().amax((2, 3)).min() > 0
    assert not set(FRONT_CACHES) & set(streams[1].buffers)


@pytest.mark.parametrize(
    "change",
    [{"pool": PoolConfig(2, (2,))}, {"fused": True, "fp8": True, "kv_scheme": "fp4"}],
    ids=["pool", "fused"],
)
def test_its_engines_are_replayable(change) -> None:
    """Also those of a first chunk alone, which write caches of their own."""
    pieces = graph_of(abot_config().changed(**change)).pieces.values()
    own = [piece for piece in pieces if piece.key.role in (BLOCK, FRONT, FRONT_EMBED, CHUNK)]
    assert {piece.key.role for piece in own} == {BLOCK, FRONT, FRONT_EMBED, CHUNK}
    for piece in own:
        trace(piece, "cpu")
