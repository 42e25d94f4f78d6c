"""A sparse past: which tiles of cached keys are chosen, at every place of a ring, and the attention to them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scripts.kernel_admission.attention_cases import Case, make_case
from scripts.kernel_admission.judge import distance
from seko_kernels.attention import OwnTokens, attention_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.formats import KEY_TILE
from seko_kernels.fused_reference import past_token_index, scale_per_token
from seko_kernels.sparse_past import QUERY_TILE, PastLayout, choose_past, query_tiles
from seko_kernels.tuned import SAFE, SPECIALISED
from seko_runtime.video.ring import Ring
from tests.support.tolerances import STEP

INT8_STEP = 2.0**-6  # what rounding queries to int8 may cost, relative
FRAMES = PastLayout(pinned_frames=1, ring_frames=15, chunk_frames=2, frame_tokens=100)


class Past(NamedTuple):
    """Arguments of `choose_past`."""

    q: Tensor
    k: Tensor
    k_scale: Tensor
    valid: Tensor
    slots: Tensor
    layout: PastLayout
    count: int


def past_at(layout: PastLayout, firsts: list[int], count: int, *, queries: int = 0) -> Past:
    """Random keys of rows whose present chunks begin with these frames; what is behind the cached tokens is absurd."""
    generator = torch.Generator().manual_seed(len(firsts) + count)
    ring = Ring(layout.pinned_frames, layout.ring_frames, layout.chunk_frames)
    tokens = layout.chunk_frames * layout.frame_tokens
    queries = queries or tokens
    cached = torch.tensor([ring.valid_frames(first) * layout.frame_tokens - tokens for first in firsts])
    places = ring.cache_frames * layout.frame_tokens - tokens
    q = torch.randn(len(firsts), queries, 2, 8, generator=generator)
    k = torch.randint(-127, 128, (len(firsts), places, 2, 8), generator=generator, dtype=torch.int8)
    k_scale = torch.rand(len(firsts), 2, layout.tiles, generator=generator) + 0.5
    for row, filled in enumerate(cached.tolist()):
        k[row, filled:] = 127
        k_scale[row, :, -(-filled // KEY_TILE) :] = torch.nan
    slots = torch.tensor([ring.write_slots(first) for first in firsts])
    return Past(q, k, k_scale, cached + queries, slots, layout, count)


def frames_of(past: Past, firsts: list[int]) -> list[list[int]]:
    """The frame of each cached token of the rows, by what was written into the slots one chunk after another."""
    layout = past.layout
    ring = Ring(layout.pinned_frames, layout.ring_frames, layout.chunk_frames)
    of_rows = []
    for row, first in enumerate(firsts):
        held: dict[int, int] = {}
        for earlier in range(0, first, layout.chunk_frames):
            for frame in range(earlier, earlier + layout.chunk_frames):
                held[ring.slot(frame)] = frame
        index = past_token_index(
            past.slots[row : row + 1], ring.cache_frames * layout.frame_tokens, layout.frame_tokens
        )
        cached = int(past.valid[row]) - past.q.shape[1]
        of_rows.append([held[token // layout.frame_tokens] for token in index[0, :cached].tolist()])
    return of_rows


@settings(max_examples=60, deadline=None)
@given(
    sink=st.integers(0, 4),
    ring_chunks=st.integers(1, 5),
    more=st.integers(0, 2),
    chunk=st.integers(1, 3),
    frame=st.sampled_from([3, 50, 64, 100, 130, 150]),
    chunks=st.lists(st.integers(0, 14), min_size=1, max_size=3),
    share=st.sampled_from([0.01, 0.4, 0.7]),
)
def test_sink_and_newest_chunk_are_taken_at_every_place(
    sink: int, ring_chunks: int, more: int, chunk: int, frame: int, chunks: list[int], share: float
) -> None:
    """Rows of any fill; rings that are no whole number of chunks, and frames that are no whole number of tiles."""
    layout = PastLayout(sink, ring_chunks * chunk + more, chunk, frame)
    if not layout.tiles:
        return
    firsts = [number * chunk for number in chunks]
    count = layout.tiles_of(share)
    assert min(layout.tiles, math.ceil(share * layout.tiles)) <= count <= layout.tiles
    past = past_at(layout, firsts, count)
    lists = choose_past(*past)
    assert (lists.dtype, lists.shape) == (torch.int32, (len(firsts), 2, query_tiles(chunk * frame), count))
    assert 0 <= int(lists.min()) <= int(lists.max()) < layout.tiles
    assert bool((lists.diff(dim=-1) > 0).all())
    for row, (first, frames) in enumerate(zip(firsts, frames_of(past, firsts), strict=True)):
        filled = -(-len(frames) // KEY_TILE)
        must = {
            place // KEY_TILE
            for place, of in enumerate(frames)
            if of < sink or first - chunk <= of < first or place == len(frames) - 1
        }
        for entries in lists[row].flatten(0, 1).tolist():
            counted = entries[: min(count, filled)]
            assert must <= {*counted}
            assert not counted or counted[-1] == filled - 1


def test_the_others_are_those_with_the_largest_products_of_means() -> None:
    """In float64, a head, a row and a tile of queries at a time."""
    firsts = [4, 26, 32]
    past = past_at(FRAMES, firsts, 7, queries=QUERY_TILE + 8)
    assert FRAMES.most_always < 7 < FRAMES.tiles
    lists = choose_past(*past)
    always = FRAMES.always(past.slots, past.valid - past.q.shape[1])
    differ = set()
    for row, cached in enumerate((past.valid - past.q.shape[1]).tolist()):
        filled = -(-cached // KEY_TILE)
        for head in range(2):
            for tile, entries in enumerate(lists[row, head].tolist()):
                query = past.q[row, tile * QUERY_TILE : (tile + 1) * QUERY_TILE, head].double().mean(0)
                products = {
                    key: float(
                        query @ past.k[row, key * KEY_TILE : (key + 1) * KEY_TILE, head].double().mean(0)
                    )
                    * float(past.k_scale[row, head, key])
                    for key in range(filled)
                    if not always[row, key]
                }
                taken = {key for key in range(filled) if always[row, key]}
                best = sorted(products, key=products.__getitem__, reverse=True)[: 7 - len(taken)]
                assert entries[: min(7, filled)] == sorted({*taken, *best})
                differ.add(tuple(entries))
    assert len(differ) > 4


def test_equal_products_take_the_first_tiles() -> None:
    past = past_at(FRAMES, [26], 6)
    entries = choose_past(past.q * 0, *past[1:])[0, 0, 0].tolist()
    always = FRAMES.always(past.slots, past.valid - past.q.shape[1])[0].tolist()
    first = [tile for tile, taken in enumerate(always) if not taken][: 6 - sum(always)]
    assert entries == sorted([*first, *(tile for tile, taken in enumerate(always) if taken)])


@pytest.mark.parametrize(
    ("layout", "share", "count"),
    [
        (PastLayout(0, 21, 3, 1560), 0.4, 88),  # of 220 tiles: Self-Forcing's stream at 480x832
        (PastLayout(3, 18, 3, 1560), 0.4, 88),
        (PastLayout(3, 18, 3, 1560), 0.1, 76),  # 37 of the sink, 38 of the newest chunk, the last
        (PastLayout(0, 21, 3, 1560), 1.0, 220),
        (PastLayout(0, 3, 1, 100), 0.4, 2),
    ],
)
def test_a_list_has_the_share_but_room_for_what_is_always_taken(
    layout: PastLayout, share: float, count: int
) -> None:
    assert layout.tiles_of(share) == count


CASE = Case("two lists of queries", 200, 2, 700, (0, 77, 700))


def given_lists(count: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Arguments of the attention, and lists for them."""
    arguments = make_case(CASE, 32, "cpu")
    layout = PastLayout(0, 9, 2, 100)  # 700 cached tokens
    slots = torch.tensor([[0, 1], [1, 2], [7, 8]])
    q, k, k_scale, *_ = arguments
    return arguments, choose_past(q, k, k_scale, arguments[5], slots, layout, count)


def test_lists_of_all_tiles_change_no_byte() -> None:
    arguments, chosen = given_lists(6)
    dense = attention_fp8(*arguments[:6], OwnTokens(*arguments[6:]))
    assert torch.equal(attention_fp8(*arguments[:6], OwnTokens(*arguments[6:]), chosen=chosen), dense)


def test_the_reference_is_sdpa_over_the_keys_of_the_lists() -> None:
    (q, k, k_scale, v_t, v_scale, valid, k_own, v_own), chosen = given_lists(4)
    ours = attention_fp8(q, k, k_scale, v_t, v_scale, valid, OwnTokens(k_own, v_own), chosen=chosen)
    dense = attention_fp8(q, k, k_scale, v_t, v_scale, valid, OwnTokens(k_own, v_own))
    assert torch.equal(ours[:2], dense[:2])  # rows with no more tiles than a list
    assert distance(ours[2], dense[2]) > 0.1
    row, own = 2, v_own[2].unflatten(-1, (2, 32))
    keys = (k[row] * scale_per_token(k_scale, 700)[row].T.unsqueeze(-1)).double()
    values = (v_t[row, :, :, :700].float() * v_scale[:, None, None]).permute(2, 0, 1).double()
    truth = torch.empty(200, 2, 32, dtype=torch.float64)
    for head in range(2):
        for tile, entries in enumerate(chosen[row, head].tolist()):
            live = torch.zeros(700, dtype=torch.bool)
            for entry in entries:
                live[entry * KEY_TILE : (entry + 1) * KEY_TILE] = True
            part = slice(tile * QUERY_TILE, (tile + 1) * QUERY_TILE)
            truth[part, head] = F.scaled_dot_product_attention(
                q[row, part, head].double(),
                torch.cat((keys[live, head], k_own[row, :, head].double())),
                torch.cat((values[live, head], own[:, head].double())),
            )
    assert STEP[torch.float32] < distance(ours[row], truth.flatten(1)) < INT8_STEP


def test_wrong_lists_are_refused() -> None:
    arguments, chosen = given_lists(4)

    def refused(match: str, wrong: Tensor) -> None:
        with pytest.raises(KernelsError, match=match):
            attention_fp8(*arguments[:6], OwnTokens(*arguments[6:]), chosen=wrong)

    refused("chosen is", chosen.long())
    refused("chosen has shape", chosen[:, :, :1].contiguous())
    refused("lists of 7, expected 1 to 6", F.pad(chosen, (0, 3)))
    refused("chosen is strided", chosen.mT.contiguous().mT)
    refused("one device", chosen.to("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [None, SAFE, SPECIALISED], ids=["tuned", "safe", "specialised"])
@pytest.mark.parametrize("queries", [390, 4680])
def test_gpu_attends_to_the_lists(tiles: None, queries: int) -> None:
    """With 4,680 queries the last wave takes parts of the lists."""
    if tiles is SPECIALISED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernel is for sm_90 alone")
    case = replace(CASE, query_tokens=queries, heads=12, cache_tokens=2800, valid_tokens=(0, 77, 2000, 2800))
    arguments = make_case(case, 128, "cuda")
    q, k, k_scale, *_ = arguments
    layout = PastLayout(0, 9, 2, 400)
    slots = torch.tensor([[0, 1], [1, 2], [5, 6], [7, 8]], device="cuda")
    chosen = choose_past(q, k, k_scale, arguments[5], slots, layout, 10)
    own = OwnTokens(*arguments[6:])
    ours = attention_fp8(*arguments[:6], own, tiles, chosen)
    dense = attention_fp8(*arguments[:6], own, tiles)
    on_host = [argument.cpu() for argument in arguments]
    host_own = OwnTokens(*(x.float() for x in on_host[6:]))
    asked = (on_host[0].float(), *on_host[1:6], host_own)
    truth, every = attention_fp8(*asked, chosen=chosen.cpu()), attention_fp8(*asked)
    assert distance(every, truth) > 0.1
    assert distance(ours.cpu(), truth) <= 1.5 * distance(dense.cpu(), every)
