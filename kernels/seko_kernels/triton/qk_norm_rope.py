"""The kernel that normalises and rotates q and k, and writes k into the chunk's cache slots, or q, k and v by shares of
the heads. The module `seko_kernels.qk_norm_rope` checks the arguments of `qk_norm_rope_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

NORM_ROPE_WARPS = 4
PLAIN_NONE, PLAIN_ROTATED, PLAIN_BEFORE = 0, 1, 2  # which keys are also returned unquantised


@triton.jit  # type: ignore[untyped-decorator]
def _normalised_pairs(SOURCE, WEIGHT, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the normalised even and odd channels ``[BLOCK / 2]`` fp32 of one row: ``x * rsqrt(mean(x**2) + eps) *
    weight``."""
    channel = tl.arange(0, BLOCK)
    live = channel < WIDTH
    x = tl.load(SOURCE + channel, mask=live, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    x = x * tl.load(WEIGHT + channel, mask=live, other=0.0)
    return tl.split(tl.reshape(x, (BLOCK // 2, 2)))


@triton.jit  # type: ignore[untyped-decorator]
def _store_pairs(  # type: ignore[no-untyped-def]
    TARGET,
    even,
    odd,
    keep,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the even and odd channels of one row."""
    channel = tl.arange(0, BLOCK)
    live = (channel < WIDTH) & keep
    x = tl.reshape(tl.join(even, odd), (BLOCK,))
    tl.store(TARGET + channel, x.to(TARGET.dtype.element_ty), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _store_shares(  # type: ignore[no-untyped-def]
    TARGET, even, odd, OWN: tl.constexpr, PLANE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the even and odd channels of one row OWN by OWN, with PLANE numbers from one share to the next."""
    channel = tl.arange(0, BLOCK)
    x = tl.reshape(tl.join(even, odd), (BLOCK,))
    place = TARGET + (channel // OWN).to(tl.int64) * PLANE + channel % OWN
    tl.store(place, x.to(TARGET.dtype.element_ty), mask=channel < WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def qk_norm_rope_kernel(  # type: ignore[no-untyped-def]
    QKV,
    Q_WEIGHT,
    K_WEIGHT,
    COS,
    SIN,
    WRITE_SLOTS,
    Q_OUT,
    K_OUT,
    K_PLAIN,
    tokens,
    cache_tokens,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    SHARES: tl.constexpr,
    PLANE: tl.constexpr,
):
    """Write ``rope(rms_norm(q))`` of each token, and ``rope(rms_norm(k))`` into its slot of the ring; with SHARES these
    two and v by shares of the heads.

    `seko_kernels.fused_reference.qk_norm_rope` defines the results of `qk_norm_rope_kernel`. The results are RMSNorm
    over the full width, and rotation of neighbouring channels, all in fp32, rounded once. A program handles q or k of
    one token of the chunk, with SHARES also v.

    Parameters
    ----------
    QKV : pointer to bf16 or fp32
        The output of the fused projection, ``[B * T, 3 * H * D]``, contiguous.
    Q_WEIGHT, K_WEIGHT : pointer to fp32
        Weights of the two norms, ``[H * D]``.
    COS, SIN : pointer to fp32
        Rotary tables, ``[B * T, D/2]``.
    WRITE_SLOTS : pointer to int64
        Cache slot of each latent frame, ``[B, T / FRAME_TOKENS]``. A token whose position is outside the cache is not
        written. Like K_OUT and K_PLAIN it is not used with SHARES.
    Q_OUT : pointer to bf16 or fp32
        Normalised and rotated queries, ``[B * T, H * D]``; with SHARES q, k, v and the keys that PLAIN selects,
        ``[SHARES, B * T, 3 or 4, H / SHARES * D]``.
    K_OUT : pointer to bf16 or fp32
        The cache of keys, ``[B, N, H * D]``.
    K_PLAIN : pointer to bf16 or fp32
        Unquantised keys, ``[B * T, H * D]``, written if PLAIN is not 0.
    tokens, cache_tokens : int
        Number T of tokens in the chunk, and number N of tokens in the cache. The grid is (B * T, 2), with SHARES
        (B * T, 3).
    EPS, HEADS, HEAD_DIM, FRAME_TOKENS, BLOCK : constexpr
        Epsilon of the norm, number H of heads, number D of channels, number of tokens of a slot, and H * D rounded up
        to a power of two.
    PLAIN : constexpr int
        Kind of keys written to K_PLAIN: none, rotated, or before rotation.
    SHARES, PLANE : constexpr int
        Number of shares of the heads, 0 if the keys go into slots, and numbers of a share.
    """
    token = tl.program_id(0)
    token64 = token.to(tl.int64)
    width: tl.constexpr = HEADS * HEAD_DIM
    pair = tl.arange(0, BLOCK // 2)
    angle = token64 * (HEAD_DIM // 2) + pair % (HEAD_DIM // 2)
    live = pair < width // 2
    cos = tl.load(COS + angle, mask=live, other=1.0)
    sin = tl.load(SIN + angle, mask=live, other=0.0)
    source = QKV + token64 * (3 * width)
    if SHARES > 0:
        own: tl.constexpr = width // SHARES
        parts: tl.constexpr = 4 if PLAIN > 0 else 3
        target = Q_OUT + token64 * (parts * own)
        if tl.program_id(1) == 0:
            even, odd = _normalised_pairs(source, Q_WEIGHT, EPS, width, BLOCK)
            turned, other = even * cos - odd * sin, even * sin + odd * cos
            _store_shares(target, turned, other, own, PLANE, width, BLOCK)
        elif tl.program_id(1) == 1:
            even, odd = _normalised_pairs(source + width, K_WEIGHT, EPS, width, BLOCK)
            if PLAIN == 2:
                _store_shares(target + 3 * own, even, odd, own, PLANE, width, BLOCK)
            turned, other = even * cos - odd * sin, even * sin + odd * cos
            if PLAIN == 1:
                _store_shares(target + 3 * own, turned, other, own, PLANE, width, BLOCK)
            _store_shares(target + own, turned, other, own, PLANE, width, BLOCK)
        else:
            channel = tl.arange(0, BLOCK)
            v = tl.load(source + 2 * width + channel, mask=channel < width)
            place = target + 2 * own + (channel // own).to(tl.int64) * PLANE + channel % own
            tl.store(place, v, mask=channel < width)
    elif tl.program_id(1) == 0:
        even, odd = _normalised_pairs(source, Q_WEIGHT, EPS, width, BLOCK)
        target = Q_OUT + token64 * width
        turned, other = even * cos - odd * sin, even * sin + odd * cos
        _store_pairs(target, turned, other, True, width, BLOCK)
    else:
        even, odd = _normalised_pairs(source + width, K_WEIGHT, EPS, width, BLOCK)
        plain = K_PLAIN + token64 * width
        if PLAIN == 2:
            _store_pairs(plain, even, odd, True, width, BLOCK)
        turned, other = even * cos - odd * sin, even * sin + odd * cos
        if PLAIN == 1:
            _store_pairs(plain, turned, other, True, width, BLOCK)
        row = token // tokens
        position = token % tokens
        slot = tl.load(WRITE_SLOTS + row * (tokens // FRAME_TOKENS) + position // FRAME_TOKENS)
        place = slot * FRAME_TOKENS + position % FRAME_TOKENS
        inside = (slot >= 0) & (place < cache_tokens)
        target = K_OUT + (row.to(tl.int64) * cache_tokens + place) * width
        _store_pairs(target, turned, other, inside, width, BLOCK)
