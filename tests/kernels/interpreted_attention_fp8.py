"""The attention kernels in Triton's interpreter; run by test_interpreted.py in a process of their own."""

from __future__ import annotations

import math

import pytest
import torch

from scripts.kernel_admission.attention_cases import Case, expected, make_case
from scripts.kernel_admission.judge import distance
from seko_kernels.formats import KEY_TILE
from seko_kernels.fused_reference import attention_fp8
from seko_kernels.sparse_past import QUERY_TILE, query_tiles
from seko_kernels.triton.attention_fp8 import (
    attention_combine_kernel,
    attention_fp8_kernel,
    sparse_attention_fp8_kernel,
)
from seko_kernels.tuned import AttentionTiles

HEAD_DIM = 32
TILES = [
    AttentionTiles(64, 64, own_n=32, stages=2, warps=4),
    AttentionTiles(32, 64, own_n=16, stages=2, warps=4),
    AttentionTiles(64, 32, own_n=32, stages=2, warps=4),
    AttentionTiles(64, 128, own_n=64, stages=2, warps=4),
]
CASES = [
    Case("no multiple of a tile", 70, 2, 150, (150,)),
    Case("rows of different fill", 33, 3, 150, (3, 64, 97)),
    Case("scales of three tiles", 20, 2, 380, (300, 257)),
    Case("an empty row", 20, 1, 64, (0, 64)),
    Case("scores far below zero", 33, 2, 100, (71,), key_offset=-8.0 * HEAD_DIM**0.5),
    Case("outlier channels", 33, 2, 100, (71,), outliers=True),
    Case("own keys that are no queries", 20, 2, 150, (3, 97), more_own=39),
    Case("strided tokens", 20, 2, 150, (3, 97), more_own=3, strided=True),
]


# Each case and all tiles meet whole and cut.
MET = [
    pytest.param(case, TILES[(i + j) % 4], splits, id=f"{case.name}-{TILES[(i + j) % 4]}-{splits}")
    for i, case in enumerate(CASES)
    for j, splits in enumerate((1, 3))
]


@pytest.mark.parametrize(("case", "tiles", "splits"), MET)
def test_kernel_is_as_near_as_the_same_dtype_torch_computation(
    tiles: AttentionTiles, case: Case, splits: int
) -> None:
    """With `splits` the queries behind the first tile take parts of the keys, which are summed."""
    check(tiles, splits, make_case(case, HEAD_DIM, "cpu"))


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_keys_and_queries_of_nothing_leave_the_masked_places_masked(tiles: AttentionTiles) -> None:
    """Both have the least scale then, and the product of the two is no float32 number but 0."""
    q, k, k_scale, *rest = make_case(CASES[0], HEAD_DIM, "cpu")
    check(tiles, 1, (q * 0, k * 0, torch.full_like(k_scale, 2.0**-100), *rest))


SPARSE = [
    Case("lists of two query tiles", 200, 2, 500, (500,)),
    Case("lists of rows of different fill", 20, 1, 600, (0, 77, 513)),
]


@pytest.mark.parametrize(
    ("case", "tiles", "whole_tiles"), [(SPARSE[0], TILES[3], 3), (SPARSE[1], TILES[2], 1)], ids=str
)
def test_chosen_tiles_are_those_of_the_reference(case: Case, tiles: AttentionTiles, whole_tiles: int) -> None:
    """The error beside that of all tiles: the same roundings, whose size `check` holds against torch's."""
    arguments = make_case(case, HEAD_DIM, "cpu")
    chosen = lists(case, 3)
    out, every = run(tiles, 3, arguments, chosen, whole_tiles), run(tiles, 3, arguments, None, whole_tiles)
    truth, whole = attention_fp8(*arguments, chosen=chosen), attention_fp8(*arguments)
    assert distance(whole, truth) > 0.1
    assert distance(out.flatten(2), truth) <= 2 * distance(every.flatten(2), whole)


@pytest.mark.parametrize("splits", [1, 3])
def test_lists_of_all_tiles_give_the_bytes_of_no_lists(splits: int) -> None:
    arguments, chosen = make_case(SPARSE[1], HEAD_DIM, "cpu"), lists(SPARSE[1], 5)
    assert torch.equal(run(TILES[2], splits, arguments, chosen), run(TILES[2], splits, arguments))


def lists(case: Case, count: int) -> torch.Tensor:
    """Random lists of tiles that end with the row's last one; entries that do not count are no tiles at all."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.full(
        (len(case.valid_tokens), case.heads, query_tiles(case.query_tokens), count),
        1 << 20,
        dtype=torch.int32,
    )
    for row, cached in enumerate(case.valid_tokens):
        filled = -(-cached // KEY_TILE)
        if filled:
            for entries in chosen[row].flatten(0, 1):
                some = torch.randperm(filled - 1, generator=generator)[: count - 1].sort().values
                entries[: len(some) + 1] = torch.cat((some, torch.tensor([filled - 1])))
    return chosen


def check(tiles: AttentionTiles, splits: int, arguments: tuple[torch.Tensor, ...]) -> None:
    """Hold the kernel's error against that of the same roundings in torch."""
    out = run(tiles, splits, arguments)
    truth, rounded = expected(*arguments)
    for row in range(len(out)):
        error = distance(out[row].flatten(1), truth[row])
        assert error <= 2 * distance(rounded[row], truth[row])


def run(
    tiles: AttentionTiles,
    splits: int,
    arguments: tuple[torch.Tensor, ...],
    chosen: torch.Tensor | None = None,
    whole_tiles: int = 1,
) -> torch.Tensor:
    """The kernel's attention [B, T, H, D], to chosen tiles or to all. Queries behind the whole tiles of queries take
    parts of the keys, which are summed token by token."""
    q, k, k_scale, v_t, v_scale, valid, k_own, v_own = arguments
    batch, tokens, heads, _ = q.shape
    first_cut = whole_tiles * tiles.block_m
    whole = tokens if splits == 1 else first_cut * (tokens > first_cut)
    rest = tokens - whole
    # float32 results: the interpreter's cast to bfloat16 truncates.
    out = torch.full((batch, tokens, heads, HEAD_DIM), float("nan"))
    parts = torch.full((batch * splits, rest, heads, HEAD_DIM), float("nan"))
    lse = torch.full((batch * splits, heads, max(rest, 1)), float("nan"))
    for first, queries, out_tokens, cuts, target in (
        (0, whole, tokens, 1, out),
        (whole, rest, rest, splits, parts),
    ):
        if not queries:
            continue
        kernel = attention_fp8_kernel if chosen is None else sparse_attention_fp8_kernel
        listed = () if chosen is None else (chosen,)
        more = {} if chosen is None else {"CHOSEN_TILES": chosen.shape[-1], "QUERY_TILE": QUERY_TILE}
        kernel[(-(-queries // tiles.block_m), heads, batch * cuts)](
            *(q, k, k_scale, v_t, k_own, v_own, v_scale, valid, *listed, target, lse),
            *(tokens, k_own.shape[1], k.shape[1], v_t.shape[3], v_own.stride(1), first, out_tokens),
            HEADS=heads,
            HEAD_DIM=HEAD_DIM,
            SOFTMAX_SCALE=HEAD_DIM**-0.5 * math.log2(math.e),
            KEY_TILE=KEY_TILE,
            Q_STRIDE=q.stride(1),
            K_OWN_STRIDE=k_own.stride(1),
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            OWN_N=tiles.own_n,
            STAGES=tiles.stages,
            SPLITS=cuts,
            INTEGER=True,
            **more,
        )
    if rest:
        attention_combine_kernel[(rest, batch)](
            *(parts, lse, out, rest, tokens), HEADS=heads, HEAD_DIM=HEAD_DIM, SPLITS=splits, BLOCK_H=4
        )
    return out
