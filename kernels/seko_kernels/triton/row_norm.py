"""One kernel for the ops between two matmuls: residual, LayerNorm, modulation and quantisation, each optional."""

# mypy: disable-error-code="assignment"
# (tuples of a row's parts grow)
from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import row_scale, to_e4m3

ADD_NONE, ADD_PLAIN, ADD_GATED = 0, 1, 2
NORM_NONE, NORM_MODULATED, NORM_AFFINE = 0, 1, 2
# largest part for rows up to a width, and for longer rows
SHORT_ROW, SHORT_PART, LONG_PART = 2048, 512, 1024
LEAST_PART = 128  # numbers of a warp; a row that is no multiple of this is one padded part


class RowTiles(NamedTuple):
    """Tile sizes of the row kernel: how rows are divided among programs.

    Parameters
    ----------
    rows : int
        Number of rows that a program handles, all of one latent frame.
    part, parts : int
        Number of values in a part, a power of two, and number of parts of a row.
    warps : int
        Number of warps of a program.
    """

    rows: int
    part: int
    parts: int
    warps: int

    @property
    def constants(self) -> dict[str, int]:
        """The constexpr arguments of `row_norm_kernel` for these tiles."""
        return {"ROWS": self.rows, "PART": self.part, "PARTS": self.parts}


def row_tiles(width: int, frame_tokens: int, norm: int) -> RowTiles:
    """Return the tile sizes for rows of `width` numbers. A row is split into parts of equal size, so that little is
    padded.

    The following times in us are for 4,680 rows of 1,536 and of 5,120 numbers, as fp8, on an H200. Residual, norm and
    modulation take 17 and 54 us with one row a program, 16 and 46 us with two rows, 16 and 58 us with four rows. With
    gate and affine norm the times are 16 and 52 us with one row a program, 18 and 73 us with two, 19 and 65 us with
    four.
    """
    part = min(width & -width, LONG_PART if width > SHORT_ROW else SHORT_PART)
    if part < LEAST_PART:
        return RowTiles(1, triton.next_power_of_2(width), 1, 4)
    rows = math.gcd(frame_tokens, 2) if norm == NORM_MODULATED else 1
    return RowTiles(rows, part, width // part, part // LEAST_PART)


@triton.jit  # type: ignore[untyped-decorator]
def _row(SOURCE, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row as a tuple of parts, fp32, with zeros after its end."""
    row = ()
    for part in tl.static_range(PARTS):
        channel = part * PART + tl.arange(0, PART)
        if PART * PARTS != WIDTH:
            x = tl.load(SOURCE + channel, mask=channel < WIDTH, other=0.0)
        else:
            x = tl.load(SOURCE + channel)
        row += (x.to(tl.float32),)
    return row


@triton.jit  # type: ignore[untyped-decorator]
def _row_of_shares(  # type: ignore[no-untyped-def]
    SOURCE,
    OWN: tl.constexpr,
    PLANE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return what `_row` does of a row whose numbers lie OWN by OWN, with PLANE numbers from one such run to the
    next."""
    row = ()
    for part in tl.static_range(PARTS):
        channel = part * PART + tl.arange(0, PART)
        x = tl.load(SOURCE + channel // OWN * PLANE + channel % OWN, mask=channel < WIDTH, other=0.0)
        row += (x.to(tl.float32),)
    return row


@triton.jit  # type: ignore[untyped-decorator]
def _modulation(  # type: ignore[no-untyped-def]
    MODULATION,
    LAYER_MODULATION,
    frame,
    which: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return entry `which` of a latent frame's six modulation rows, plus the layer's own."""
    own = _row(LAYER_MODULATION + which * WIDTH, WIDTH, PART, PARTS)
    of_frame = _row(MODULATION + (frame * 6 + which) * WIDTH, WIDTH, PART, PARTS)
    row = ()
    for part in tl.static_range(PARTS):
        row += (own[part] + of_frame[part],)
    return row


@triton.jit  # type: ignore[untyped-decorator]
def _store(TARGET, x, part: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a part of a row."""
    channel = part * PART + tl.arange(0, PART)
    if PART * PARTS != WIDTH:
        tl.store(TARGET + channel, x, mask=channel < WIDTH)
    else:
        tl.store(TARGET + channel, x)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(row, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum over all parts of a row."""
    total = row[0]
    for part in tl.static_range(1, PARTS):
        total += row[part]
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def row_norm_kernel(  # type: ignore[no-untyped-def]
    X,
    Y,
    MODULATION,
    LAYER_MODULATION,
    GATE_MODULATION,
    WEIGHT,
    BIAS,
    HIDDEN,
    OUT,
    OUT_SCALE,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    QUANTISE: tl.constexpr,
    GATE_AT: tl.constexpr,
    SHIFT_AT: tl.constexpr,
    SCALE_AT: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    PLANE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write the residual sum ``hidden = x + y * gate`` and the modulated norm ``out = layer_norm(hidden) * (1 + scale)
    + shift``.

    `seko_kernels.fused_reference` defines the results of `row_norm_kernel`. All computation of `row_norm_kernel` is in
    fp32. ``hidden`` is rounded to its dtype before it is normalised, so that the norm sees the stored numbers. A
    program handles several rows, one after another.

    Parameters
    ----------
    X, Y : pointer to bf16 or fp32
        The two terms of the residual sum, ``[B * T, WIDTH]``, contiguous; Y is read if ADD is not 0. If SHARES is
        above 1, X is ``[SHARES, B * T, WIDTH / SHARES]``, and nothing is added.
    MODULATION, LAYER_MODULATION, GATE_MODULATION : pointer to fp32
        Modulation of the frames ``[B, F, 6, WIDTH]``, of this layer ``[6, WIDTH]``, and of the layer with the gate
        ``[6, WIDTH]``. Shift and scale are rows SHIFT_AT and SCALE_AT of the sum of MODULATION and LAYER_MODULATION.
        The gate is row GATE_AT of the sum of MODULATION and GATE_MODULATION.
    WEIGHT, BIAS : pointer to fp32
        Weight and bias of an affine norm, ``[WIDTH]``: ``out = layer_norm(hidden) * weight + bias``.
    HIDDEN : pointer to X's dtype
        The residual sum, ``[B * T, WIDTH]``, written if ADD is not 0.
    OUT : pointer to X's dtype, or fp8
        The normalised rows, ``[B * T, WIDTH]``, written unless NORM and QUANTISE are both 0.
    OUT_SCALE : pointer to fp32
        Scale of each row, ``[B * T]``, written if QUANTISE.
    EPS, WIDTH, FRAME_TOKENS : constexpr
        Epsilon of the norm, number of values in a row, and number of tokens of a latent frame.
    ROWS, PART, PARTS : constexpr int
        Tile sizes of the kernel; see `RowTiles`.
    SHARES, PLANE : constexpr int
        Number of equal shares in which rows of X lie, and distance between two shares of a row in numbers, B * T *
        WIDTH / SHARES.
    ADD, NORM : constexpr int
        ADD selects the residual: none, plain or gated. NORM selects the norm: none, modulated or affine.
    QUANTISE, INTEGER : constexpr bool
        QUANTISE: whether OUT is fp8 with a scale for each row. INTEGER: whether fp8 casts use integer operations, see
        `to_e4m3`.
    """
    first = tl.program_id(0) * ROWS
    frame = (first // FRAME_TOKENS).to(tl.int64)
    start = first.to(tl.int64) * WIDTH
    if SHARES > 1:
        tl.static_assert(
            ADD == 0 and ROWS == 1, "rows in shares are only normalised or quantised, one by a program"
        )
        xs = _row_of_shares(
            X + first.to(tl.int64) * (WIDTH // SHARES), WIDTH // SHARES, PLANE, WIDTH, PART, PARTS
        )
    else:
        xs = _row(X + start, WIDTH, PART, PARTS)
    if ADD > 0:
        ys = _row(Y + start, WIDTH, PART, PARTS)
    # Modulation that the rows share stays in registers: loading it for each row would be most of a short row's loads.
    if ADD == 2:
        gate = _modulation(MODULATION, GATE_MODULATION, frame, GATE_AT, WIDTH, PART, PARTS)
    if NORM == 1:
        factor = _modulation(MODULATION, LAYER_MODULATION, frame, SCALE_AT, WIDTH, PART, PARTS)
        added = _modulation(MODULATION, LAYER_MODULATION, frame, SHIFT_AT, WIDTH, PART, PARTS)
    elif NORM == 2:
        factor, added = _row(WEIGHT, WIDTH, PART, PARTS), _row(BIAS, WIDTH, PART, PARTS)
    for turn in tl.static_range(ROWS):
        # The next row is loaded before this row is stored, because the compiler moves no load across a store.
        if turn + 1 < ROWS:
            next_xs = _row(X + start + WIDTH, WIDTH, PART, PARTS)
            if ADD > 0:
                next_ys = _row(Y + start + WIDTH, WIDTH, PART, PARTS)
        if ADD > 0:
            sums = ()
            for part in tl.static_range(PARTS):
                y = ys[part] * gate[part] if ADD == 2 else ys[part]
                hidden = (xs[part] + y).to(HIDDEN.dtype.element_ty)
                _store(HIDDEN + start, hidden, part, WIDTH, PART, PARTS)
                sums += (hidden.to(tl.float32),)
            xs = sums
        if NORM > 0:
            mean = _sum(xs, PARTS) / WIDTH
            centred, squares = (), ()
            for part in tl.static_range(PARTS):
                x = xs[part] - mean
                if PART * PARTS != WIDTH:
                    x = tl.where(part * PART + tl.arange(0, PART) < WIDTH, x, 0.0)
                centred += (x,)
                squares += (x * x,)
            inverse = tl.rsqrt(_sum(squares, PARTS) / WIDTH + EPS)
            xs = ()
            for part in tl.static_range(PARTS):
                by = 1.0 + factor[part] if NORM == 1 else factor[part]
                xs += (centred[part] * inverse * by + added[part],)
        if QUANTISE:
            largest = tl.abs(xs[0])
            for part in tl.static_range(1, PARTS):
                largest = tl.maximum(largest, tl.abs(xs[part]))
            scale, inverse_scale = row_scale(tl.max(largest, 0))
            tl.store(OUT_SCALE + first + turn, scale)
            for part in tl.static_range(PARTS):
                _store(OUT + start, to_e4m3(xs[part] * inverse_scale, INTEGER), part, WIDTH, PART, PARTS)
        elif NORM > 0:
            for part in tl.static_range(PARTS):
                _store(OUT + start, xs[part].to(OUT.dtype.element_ty), part, WIDTH, PART, PARTS)
        if turn + 1 < ROWS:
            start += WIDTH
            xs = next_xs
            if ADD > 0:
                ys = next_ys
