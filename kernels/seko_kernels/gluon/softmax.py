"""What attention kernels of one warpgroup a tile of 64 queries share: row sums, exponentials, the ring's next stage."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def lane_sums(p):  # type: ignore[no-untyped-def]
    """Sums of what a thread holds of a row of `p` [64, N]: [64, 4]. The four threads are asked once, at the end."""
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [64, N // 8, 4, 2]), 3), 1)


@gluon.jit
def decayed(total, decay):  # type: ignore[no-untyped-def]
    """`total` [64, 4] times `decay` [64]."""
    LANES: gl.constexpr = total.type.layout
    return total * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, LANES)), 1)


@gluon.jit
def exp2(x):  # type: ignore[no-untyped-def]
    """2 ** x in one instruction: `gl.exp2` scales around results below 2**-126, which are 0 here."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def next_stage(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Stage and phase of the ring's next tile."""
    stage += 1
    last = stage == STAGES
    return gl.where(last, 0, stage), gl.where(last, phase ^ 1, phase)
