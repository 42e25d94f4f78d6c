"""The rotary positions, and the base net alone, against the original and against transformers' Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_export.errors import UsageError
from seko_export.families.voxcpm2.config import LongRope, VoxCpm2Config
from seko_export.families.voxcpm2.layers import CachedLayer, Norm, Positions, local_rotary, rope_tables
from seko_export.families.voxcpm2.presets import PRESETS, TINY
from seko_export.families.voxcpm2.weights import SpeechWeights
from tests.support.tolerances import ORACLE, relative_error
from tests.voxcpm2.oracle import original, original_config, original_model, weights_of

BAR = ORACLE[torch.float32]
PLAIN = PRESETS[TINY]
LENGTHS = {"short": (2048, 2048), "long": (2048, 64), "shorter": (64, 2048)}


def with_rope(maximum: int, trained: int) -> VoxCpm2Config:
    rope = PLAIN.rope
    return replace(PLAIN, rope=LongRope(rope.theta, rope.short_factors, rope.long_factors, maximum, trained))


@pytest.mark.parametrize("named", LENGTHS)
def test_tables_are_the_originals_to_the_bit(named: str) -> None:
    """Short and long factors, chosen once; cosines and sines with the scale of a longer model."""
    config = with_rope(*LENGTHS[named])
    theirs = original().lm.model.MiniCPMLongRoPE(original_config(config).lm_config)
    count = config.rope.max_positions
    cos, sin = theirs(torch.arange(count))
    positions = Positions(tokens=count, length=count, places=count + 1, amplitude=config.rope.amplitude)
    zero = torch.zeros(1, dtype=torch.int64)
    *_, ours_cos, ours_sin = positions(zero, zero, zero + count, *rope_tables(config.rope))
    assert torch.equal(ours_cos[0], cos)
    assert torch.equal(ours_sin[0], sin)
    local_cos, local_sin = local_rotary(config.rope, 11)
    assert torch.equal(local_cos, cos[:11])
    assert torch.equal(local_sin, sin[:11])
    assert (config.rope.factors == config.rope.long_factors) == (named == "long")


@pytest.mark.parametrize("named", ["short", "long"])
def test_the_base_net_is_transformers_llama(named: str, worst: Callable[[str, float], None]) -> None:
    """40 positions at once by transformers; by us 15 at once, then one by one over the cache."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = with_rope(*LENGTHS[named])
    net, rope = config.base, config.rope
    model, vae = weights_of(original_model(config, seed=4))
    llama = transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=net.dim,
            intermediate_size=net.ffn_dim,
            num_hidden_layers=net.layers,
            num_attention_heads=net.heads,
            num_key_value_heads=net.kv_heads,
            head_dim=net.head_dim,
            rms_norm_eps=net.norm_eps,
            max_position_embeddings=rope.max_positions,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": rope.theta,
                "short_factor": list(rope.short_factors),
                "long_factor": list(rope.long_factors),
                "factor": rope.max_positions / rope.original_positions,
                "original_max_position_embeddings": rope.original_positions,
            },
        )
    )
    prefix = "base_lm."
    llama.load_state_dict(
        {name.removeprefix(prefix): tensor for name, tensor in model.items() if name.startswith(prefix)}
    )
    hidden = torch.randn(1, 40, net.dim, generator=torch.Generator().manual_seed(5))
    length = 40 if named == "short" else 100  # transformers chooses factors by the sequence's length
    if named == "long":
        hidden = torch.cat((hidden, hidden, hidden[:, :20]), dim=1)
    with torch.no_grad():
        wanted = llama(inputs_embeds=hidden).last_hidden_state

    weights = SpeechWeights(model, vae, config)
    layers = []
    for number in range(net.layers):
        layer = CachedLayer(net, torch.float32)
        names = [name for name, _ in layer.named_parameters()]
        layer.load_state_dict({name: weights[f"base_lm.layers.{number}.{name}"] for name in names})
        layers.append(layer)
    norm = Norm(net, torch.float32)
    norm.load_state_dict({"weight": weights["fusion.norm.weight"]})
    caches = torch.full((net.layers, 2, length + 9, net.kv_heads, net.head_dim), torch.nan)
    outputs = []
    for first, count in [(0, 15), *((position, 1) for position in range(15, length))]:
        places = Positions(count, length, length + 9, rope.amplitude)
        at = [torch.tensor([number]) for number in (5, first, count)]
        write, read, mask, cos, sin = places(*at, *rope_tables(rope))
        x = hidden[:, first : first + count]
        with torch.no_grad():
            for layer, (k, v) in zip(layers, caches, strict=True):
                x = layer(x, k, v, write, read, mask, cos, sin)
            outputs.append(norm(x))
    error = relative_error(torch.cat(outputs, dim=1), wanted)
    worst(f"VoxCPM2 base net against Llama, {named}", error)
    assert error <= BAR


@given(
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=4),
    tokens=st.integers(1, 5),
    data=st.data(),
)
def test_rows_write_and_read_their_own_places_alone(
    rows: list[tuple[int, int]], tokens: int, data: st.DataObject
) -> None:
    """Rows of given lengths side by side in a cache, each with tokens before the call and some of the call's own."""
    starts, firsts, counts, room = [], [], [], 0
    for size, before in rows:
        count = data.draw(st.integers(1, min(tokens, size)))
        starts.append(room)
        counts.append(count)
        firsts.append(min(before, size - count))
        room += size
    places = room + 1
    length = max(first + tokens for first in firsts)
    positions = Positions(tokens, length, places, 1.0)
    frequencies = torch.ones(2)
    given_rows = [torch.tensor(numbers) for numbers in (starts, firsts, counts)]
    write, read, mask, _, _ = positions(*given_rows, frequencies, frequencies)
    write, read = write.view(-1, tokens), read.view(-1, length)
    for row, (start, first, count) in enumerate(zip(starts, firsts, counts, strict=True)):
        own = range(start, start + rows[row][0])
        assert write[row, :count].tolist() == [start + first + step for step in range(count)]
        assert set(write[row, count:].tolist()) <= {places - 1}
        assert set(read[row].tolist()) <= set(own)
        assert max(read[row].tolist()) == start + first + count - 1  # nothing that was not written yet
        for token in range(count):
            seen = read[row][mask[row, token]].tolist()
            assert seen == [start + position for position in range(first + token + 1)]


def test_factors_that_are_no_factors_are_refused() -> None:
    for fields, said in (
        ({"short_factors": (0.0,) * 8}, "not above 0"),
        ({"theta": 1.0}, "above 1"),
        ({"original_positions": 1}, "at least 2"),
        ({"max_positions": 1}, "at least 2"),
    ):
        with pytest.raises(UsageError, match=said):
            replace(PLAIN.rope, **fields)
    with pytest.raises(UsageError, match="half of the 16 channels"):
        replace(PLAIN, rope=replace(PLAIN.rope, long_factors=(1.0,) * 4))
