"""The attention kernels in Triton's interpreter; run by test_fused_interpreted.py in a process of their own."""

from __future__ import annotations

import math

import pytest
import torch

from seko_kernels.admission import Case, distance, expected, make_case
from seko_kernels.attention import own_block
from seko_kernels.triton.attention_fp8 import attention_combine_kernel, attention_fp8_kernel
from seko_kernels.tuned import AttentionTiles

HEAD_DIM = 32
TILES = [
    AttentionTiles(64, 64, stages=2, warps=4),
    AttentionTiles(32, 64, stages=2, warps=4, tail_n=32),
    AttentionTiles(64, 32, stages=2, warps=4, splits=3),
    AttentionTiles(64, 64, stages=2, warps=4, whole=True),
    AttentionTiles(64, 32, stages=2, warps=4, peel=True),
    AttentionTiles(64, 64, stages=2, warps=4, whole=True, splits=2),
]
CASES = [
    Case("no multiple of a tile", 70, 2, 150, (150,)),
    Case("rows of different fill", 33, 3, 150, (3, 64, 97)),
    Case("an empty row", 20, 1, 64, (0, 64)),
    Case("scores far below zero", 33, 2, 100, (71,), key_offset=-8.0 * HEAD_DIM**0.5),
    Case("outlier channels", 33, 2, 100, (71,), outliers=True),
]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("own", [True, False], ids=["own", "all in fp8"])
def test_kernel_is_as_near_as_the_same_dtype_torch_computation(
    tiles: AttentionTiles, case: Case, own: bool
) -> None:
    arguments = make_case(case, HEAD_DIM, "cpu", own=own)
    q, k, v_t, *scales, v_scale, valid = arguments[:7]
    k_own, v_own = arguments[7:] if own else (q, q)
    batch, tokens, heads, _ = q.shape
    # float32 results: the interpreter's cast to bfloat16 truncates.
    parts = torch.full((batch * tiles.splits, tokens, heads, HEAD_DIM), float("nan"))
    lse = torch.full((batch * tiles.splits, heads, tokens), float("nan"))
    attention_fp8_kernel[(-(-tokens // tiles.block_m), heads, batch * tiles.splits)](
        *(
            q,
            k,
            v_t,
            k_own,
            v_own,
            *(v_scale if scale is None else scale for scale in scales),
            v_scale,
            valid,
        ),
        parts,
        lse,
        tokens,
        k.shape[1],
        v_t.shape[3],
        v_own.stride(1),
        HEADS=heads,
        HEAD_DIM=HEAD_DIM,
        SOFTMAX_SCALE=HEAD_DIM**-0.5 * math.log2(math.e),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        STAGES=tiles.stages,
        WARP_SPECIALIZE=False,
        SPLITS=tiles.splits,
        TAIL_N=tiles.tail_n,
        WHOLE=tiles.whole,
        PEEL=tiles.peel,
        FMA_EXPS=0,  # the interpreter knows no assembly
        OWN_N=own_block(tiles.block_n) if own else 0,
        INTEGER=True,
    )
    out = parts
    if tiles.splits > 1:
        out = torch.full((batch, tokens, heads, HEAD_DIM), float("nan"))
        attention_combine_kernel[(tokens, batch)](
            parts, lse, out, tokens, HEADS=heads, HEAD_DIM=HEAD_DIM, SPLITS=tiles.splits, BLOCK_H=4
        )
    truth, rounded = expected(*arguments)
    for row, filled in enumerate(valid.tolist()):
        if not filled:
            assert not out[row].any()
            continue
        error = distance(out[row].flatten(1), truth[row])
        assert error <= 2 * distance(rounded[row], truth[row])
