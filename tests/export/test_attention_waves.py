"""Attention cut to fill a GPU's waves: the cut, what it gives, and where nothing is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_export.families.layers import block
from seko_export.families.layers.attention_waves import TILE, cut_attention, waves_for, waves_on
from seko_kernels.attention_parts import SPLITS, WAVE_OF_PARTS_KEYS
from seko_kernels.waves import Waves, cut

H200 = 132


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return y.transpose(1, 2)


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    queries=st.integers(2, 40),
    part=st.integers(1, 9),
    splits=st.integers(2, 6),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_cut_attention_is_the_attention(batch, queries, part, splits, seed, data):
    """Scores of 20, weights orders apart. At numbers twice as large plain float32 breaks the bound itself."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        2 * torch.randn(batch, tokens, 2, 8, generator=generator)
        for tokens in (queries, part * splits, part * splits)
    )
    waves = Waves(data.draw(st.integers(1, queries - 1)), splits)
    torch.testing.assert_close(cut_attention(q, k, v, waves), plain(q, k, v), rtol=1e-4, atol=1e-5)


@settings(max_examples=200)
@given(
    batch=st.integers(1, 8),
    heads=st.integers(1, 40),
    queries=st.integers(1, 9000),
    keys=st.integers(1, 40_000),
)
def test_what_is_cut_fills_whole_waves_and_takes_less_time(batch, heads, queries, keys):
    waves = waves_for(batch, heads, queries, keys, H200)
    if waves is None:
        return
    assert 0 < waves.whole < queries
    assert waves.whole % TILE == 0
    assert keys % waves.splits == 0
    tiles = batch * heads * waves.whole // TILE
    left = batch * heads * -(-(queries - waves.whole) // TILE)
    rounds = -(-tiles // H200)
    assert tiles > (rounds - 1) * H200
    assert rounds + -(-left * waves.splits // H200) / waves.splits < -(-(tiles + left) // H200)


def test_a_shape_whose_last_wave_is_a_third_full_is_cut():
    assert waves_for(1, 12, 4680, 32760, H200) == Waves(33 * TILE, 8)


@pytest.mark.parametrize(
    ("pairs", "queries", "keys", "waves"),
    [
        (12, 4680, 37440, Waves(22 * 192, 3)),  # 11 parts, of three waves, are as fast once the cache is full
        (40, 4680, 37440, Waves(23 * 192, 3)),
        (12, 2160, 10800, Waves(11 * 192, 10)),
        (48, 2160, 10800, Waves(11 * 192, 2)),  # one wave of long parts, not four of short ones
    ],
)
def test_parts_in_the_launch_of_whole_tiles_are_few(pairs, queries, keys, waves):
    assert cut(pairs, queries, keys, 192, H200, SPLITS, 0, WAVE_OF_PARTS_KEYS) == waves


@settings(max_examples=200)
@given(pairs=st.integers(1, 160), queries=st.integers(1, 9000), keys=st.integers(1, 40_000))
def test_what_waves_of_parts_cost_is_less_than_what_they_gain(pairs, queries, keys):
    waves = cut(pairs, queries, keys, 192, H200, SPLITS, 0, WAVE_OF_PARTS_KEYS)
    if waves is None:
        return
    assert 0 < waves.whole < queries
    assert waves.whole % 192 == 0
    left = pairs * -(-(queries - waves.whole) // 192)
    plain = -(-(pairs * waves.whole // 192 + left) // H200)
    of_parts = -(-left * waves.splits // H200) * (1 / waves.splits + WAVE_OF_PARTS_KEYS / keys)
    assert -(-pairs * waves.whole // 192 // H200) + of_parts < plain


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys"),
    [
        (1, 12, 2160, 8640),  # the cost of cutting is as large as what it gains
        (1, 12, 96, 1000),  # not one whole wave
        (1, 12, 11 * TILE, 32760),  # whole waves already
        (1, 12, 4680, 32749),  # a prime
    ],
)
def test_what_gains_nothing_is_left_as_it_is(batch, heads, queries, keys):
    assert waves_for(batch, heads, queries, keys, H200) is None


def test_nothing_is_cut_where_tiles_were_not_measured():
    assert waves_on(torch.device("cpu"), 1, 12, 4680, 32760) is None


def test_the_window_is_cut_where_the_device_says_so(monkeypatch):
    q, k, v = (torch.randn(1, tokens, 2, 8) for tokens in (10, 12, 12))
    monkeypatch.setattr(block, "waves_on", lambda *_: Waves(8, 3))
    taken = []
    monkeypatch.setattr(
        block, "cut_attention", lambda *arguments: taken.append(arguments[-1]) or cut_attention(*arguments)
    )
    full = block.window_attention(q, k, v, None)
    torch.testing.assert_close(full, plain(q, k, v).flatten(2))
    assert taken == [Waves(8, 3)]
    block.window_attention(q, k, v, torch.tensor([12]))
    assert len(taken) == 1  # a row that fills has a mask, which a cut knows nothing of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_is_as_near_to_the_truth_as_the_attention_at_once():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cut on Hopper alone")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, 12, 128, device="cuda", generator=generator, dtype=torch.bfloat16)
        for tokens in (4680, 32760, 32760)
    )
    waves = waves_on(q.device, 1, 12, 4680, 32760)
    assert waves is not None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        cut, whole = cut_attention(q, k, v, waves), plain(q, k, v)
    rows = slice(waves.whole - 64, None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        truth = plain(*(x.float() for x in (q[:, rows], k, v)))
    assert torch.equal(cut[:, : waves.whole], whole[:, : waves.whole])
    errors = [float((x[:, rows].float() - truth).norm() / truth.norm()) for x in (cut, whole)]
    assert errors[0] <= 2 * errors[1]
