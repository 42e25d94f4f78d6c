"""The attention kernels in Triton's interpreter; run by test_interpreted.py in a process of their own."""

from __future__ import annotations

import math

import pytest
import torch

from scripts.kernel_admission.attention_cases import Case, expected, make_case
from scripts.kernel_admission.judge import distance
from seko_kernels.formats import KEY_TILE
from seko_kernels.triton.attention_fp8 import attention_combine_kernel, attention_fp8_kernel
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
    Case("own keys that are no queries", 33, 2, 150, (3, 97), more_own=39),
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


def check(tiles: AttentionTiles, splits: int, arguments: tuple[torch.Tensor, ...]) -> None:
    """Hold the kernel's error against that of the same roundings in torch."""
    q, k, k_scale, v_t, v_scale, valid, k_own, v_own = arguments
    batch, tokens, heads, _ = q.shape
    whole = tokens if splits == 1 else tiles.block_m * (tokens > tiles.block_m)
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
        attention_fp8_kernel[(-(-queries // tiles.block_m), heads, batch * cuts)](
            *(q, k, k_scale, v_t, k_own, v_own, v_scale, valid, target, lse),
            *(tokens, k_own.shape[1], k.shape[1], v_t.shape[3], v_own.stride(1), first, out_tokens),
            HEADS=heads,
            HEAD_DIM=HEAD_DIM,
            SOFTMAX_SCALE=HEAD_DIM**-0.5 * math.log2(math.e),
            KEY_TILE=KEY_TILE,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            OWN_N=tiles.own_n,
            STAGES=tiles.stages,
            SPLITS=cuts,
            INTEGER=True,
        )
    if rest:
        attention_combine_kernel[(rest, batch)](
            *(parts, lse, out, rest, tokens), HEADS=heads, HEAD_DIM=HEAD_DIM, SPLITS=splits, BLOCK_H=4
        )
    truth, rounded = expected(*arguments)
    for row in range(batch):
        error = distance(out[row].flatten(1), truth[row])
        assert error <= 2 * distance(rounded[row], truth[row])
