"""The 8-bit attention op: checks its arguments, chooses tiles, calls Triton (CUDA) or the reference (CPU)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import fused_reference, hopper_attention
from seko_kernels.attention_parts import SPLITS, WAVE_OF_PARTS_KEYS, Parts, softmax_scale, use_torchs_memory
from seko_kernels.checks import expect, expect_dims, expect_dtype, expect_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.formats import KEY_TILE
from seko_kernels.fused_reference import FP8
from seko_kernels.hopper_attention import attention_hopper_outline, sparse_attention_hopper_outline
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, stand_in, takes_kernels
from seko_kernels.sparse_past import QUERY_TILE, query_tiles
from seko_kernels.triton.attention_fp8 import attention_fp8_kernel, sparse_attention_fp8_kernel
from seko_kernels.tuned import AttentionTiles, safe_tiles, shape_class, tiles_for
from seko_kernels.waves import Waves, cut

# The number of columns of a transposed V scratch is a multiple of this, so that the last tile of keys is whole. Rows
# of a tensor descriptor must begin at multiples of 16 bytes; beginning at a cache line saves loading a second line.
COLUMN_UNIT = KEY_TILE
DESCRIPTOR_UNIT = 8  # the stride of a descriptor's rows is a multiple of so many bfloat16 numbers (16 bytes)
SMALLEST_HEAD_DIM = 32  # smallest head_dim for an fp8 matrix instruction


class OwnTokens(NamedTuple):
    """Unquantised keys and values of the chunk that is being denoised, and of further tokens that are not cached
    frames.

    Parameters
    ----------
    k : Tensor
        Keys after RoPE, ``[B, O, H, D]`` of q's dtype; O is at least the number T of queries. Tokens may be strided, as
        in what ranks exchange.
    v : Tensor
        Values, ``[B, O, H * D]`` of q's dtype; tokens may be strided, as in the output of a fused projection.
    """

    k: Tensor
    v: Tensor


def v_columns(tokens: int) -> int:
    """Return the number of columns of the scratch buffer for the transposed values of `tokens` cached tokens."""
    return -(-tokens // COLUMN_UNIT) * COLUMN_UNIT


def scratch_tokens(tokens: int) -> int:
    """Return the number of token positions of a scratch buffer for `tokens` cached tokens, padded so that every kernel
    can read the buffer."""
    group = hopper_attention.KEY_GROUP
    return -(-tokens // group) * group


def key_tiles(tokens: int) -> int:
    """Return the number of scales for the keys of `tokens` tokens: one for each tile of `KEY_TILE` tokens."""
    return v_columns(tokens) // KEY_TILE


def attention_fp8(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v_t: Tensor,
    v_scale: Tensor,
    valid_tokens: Tensor,
    own: OwnTokens,
    tiles: AttentionTiles | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend to the cached tokens in 8 bits and to the chunk's own tokens unquantised (docs/adr/0006).

    The cached tokens of row b are its first ``valid_tokens[b] - T`` keys; bytes after them are never used. Cached keys
    are int8, with one scale for each head and tile of `KEY_TILE` tokens. Queries are rounded to int8, with one scale
    for each query. Cached values are e4m3. Keys and queries are not e4m3, because the three mantissa bits of e4m3 would
    visibly reduce picture quality.

    The cached keys are token-major like the cache, so that expanding the cache writes whole rows of H * D numbers. A
    tile of one head still fits a tensor descriptor (rows of D bytes, D a multiple of 32). The cached values are
    transposed, because the fp8 matrix instruction takes its second operand only in that order.

    Parameters
    ----------
    q : Tensor
        Queries, ``[B, T, H, D]`` (rows, query tokens, heads, channels) bfloat16, on a CPU also float32; tokens may be
        strided. D is a power of two, at least 32.
    k : Tensor
        Cached keys, ``[B, N, H, D]`` int8, contiguous, for N cached tokens of each row.
    k_scale : Tensor
        Scale of each tile of keys, ``[B, H, key_tiles(N)]`` float32, contiguous: a key is its code times its tile's
        scale.
    v_t : Tensor
        Cached values, transposed: ``[B, H, D, v_columns(N)]`` e4m3, contiguous.
    v_scale : Tensor
        Scale of each head's values, ``[H]`` float32, powers of two: a value is its e4m3 number times its head's scale.
    valid_tokens : Tensor
        Number of valid tokens of each row, ``[B]`` int64 on the device, from T to N + T, including the T tokens of the
        chunk.
    own : OwnTokens
        Keys and values of the chunk's T tokens, and of others to which every query attends unquantised.
    tiles : AttentionTiles, optional
        Tile sizes of the kernel; default: the sizes that `tuned` chooses. Only admission and benchmarks pass tile
        sizes.
    chosen : Tensor, optional
        Numbers of the tiles of `KEY_TILE` cached keys to which queries attend, ascending, ``[B, H, query_tiles(T), C]``
        int32, contiguous, as `sparse_past.choose_past` returns them; default: queries attend to all cached keys. Of row
        b only the first ``min(C, key_tiles(valid_tokens[b] - T))`` numbers are read, the last of which must be the
        row's last tile.

    Returns
    -------
    Tensor
        The attention, ``[B, T, H * D]`` of q's dtype.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here; if the tensors are on different devices, or
        on a device that is neither CPU nor CUDA; if the GPU has no fp8 numbers; if `tiles` has queries of two lists of
        `chosen` in a tile.
    """
    expect_dims("q", q, 4, "[batch, tokens, heads, head_dim]")
    expect_dims("k", k, 4, "[batch, tokens, heads, head_dim]")
    batch, _, heads, head_dim = q.shape
    cache_tokens = k.shape[1]
    if head_dim < SMALLEST_HEAD_DIM or head_dim & (head_dim - 1):
        raise KernelsError(f"head_dim must be a power of two of at least {SMALLEST_HEAD_DIM}, got {head_dim}")
    expect_dtype("q", q, *FLOAT_DTYPES)
    _expect_rows("q", q)
    _expect_own(own, q)
    expect("k", k, (batch, cache_tokens, heads, head_dim), torch.int8)
    expect("k_scale", k_scale, (batch, heads, key_tiles(cache_tokens)), torch.float32)
    expect("v_t", v_t, (batch, heads, head_dim, v_columns(cache_tokens)), FP8)
    expect("v_scale", v_scale, (heads,), torch.float32)
    expect("valid_tokens", valid_tokens, (batch,), torch.int64)
    arguments = (q, k, k_scale, v_t, v_scale, valid_tokens, *own)
    if chosen is not None:
        _expect_chosen(chosen, q, key_tiles(cache_tokens))
        return _sparse_attention(arguments, chosen, tiles)
    if whole := stand_in("attention_fp8"):
        stood: Tensor = whole(*arguments)
        return stood
    if not takes_kernels(*arguments):
        return fused_reference.attention_fp8(*arguments)
    expect_dtype("q", q, torch.bfloat16)
    tiles = _tiles(arguments, tiles)
    waves = _waves(arguments, tiles, cache_tokens)
    out: Tensor = _attention_fp8_cuda(
        *arguments,
        tiles.block_m,
        tiles.block_n,
        tiles.own_n,
        tiles.stages,
        tiles.warps,
        *waves,
        tiles.specialised,
    )
    return out


def _tiles(arguments: tuple[Tensor, ...], tiles: AttentionTiles | None) -> AttentionTiles:
    """Return the tile sizes of an attention to the tensors of the kernel, by default those of `tuned`; refuse sizes
    that its kernel cannot take."""
    q, cache_tokens = arguments[0], arguments[1].shape[1]
    batch, query_tokens, heads, head_dim = q.shape
    major, minor = expect_fp8(q.device)
    if tiles is None:
        shape = shape_class(batch, heads, query_tokens)
        return tiles_for(f"sm_{major}{minor}", head_dim, shape, cache_tokens)
    if tiles.specialised and not hopper_attention.takes(head_dim, cache_tokens):
        raise KernelsError(
            f"specialised tiles take heads of {hopper_attention.HEAD_DIM} and a multiple of "
            f"{hopper_attention.KEY_GROUP} keys, got {head_dim} and {cache_tokens}"
        )
    return tiles


def _waves(arguments: tuple[Tensor, ...], tiles: AttentionTiles, cached_keys: int) -> Waves:
    """Return how queries and keys are divided, if a query attends to ``cached_keys`` cached keys."""
    q, k_own = arguments[0], arguments[6]
    batch, query_tokens, heads, _ = q.shape
    slots = torch.cuda.get_device_properties(q.device).multi_processor_count * tiles.resident
    costs = (0, WAVE_OF_PARTS_KEYS) if tiles.specialised else ()
    keys = cached_keys + k_own.shape[1]
    waves = cut(batch * heads, query_tokens, keys, tiles.block_m, slots, SPLITS, *costs)
    return waves or Waves(query_tokens, 1)


def _sparse_attention(arguments: tuple[Tensor, ...], chosen: Tensor, tiles: AttentionTiles | None) -> Tensor:
    """Return the attention to chosen tiles of cached keys; ``arguments`` are the tensors of the kernel."""
    if stand_in("attention_fp8"):
        raise KernelsError("graphs of another language have no attention to chosen tiles of cached keys")
    if not takes_kernels(*arguments, chosen):
        return fused_reference.attention_fp8(*arguments, chosen=chosen)
    q, cache_tokens = arguments[0], arguments[1].shape[1]
    expect_dtype("q", q, torch.bfloat16)
    asked, tiles = tiles, _tiles(arguments, tiles)
    if QUERY_TILE % tiles.block_m:
        if asked is not None:
            raise KernelsError(
                f"{QUERY_TILE} queries share a list of tiles, which a tile of {tiles.block_m} queries does not divide"
            )
        major, minor = expect_fp8(q.device)
        tiles = safe_tiles(f"sm_{major}{minor}")
    cached_keys = min(chosen.shape[-1] * KEY_TILE, cache_tokens)
    out: Tensor = _sparse_attention_fp8_cuda(
        *arguments,
        chosen,
        tiles.block_m,
        tiles.block_n,
        tiles.own_n,
        tiles.stages,
        tiles.warps,
        *_waves(arguments, tiles, cached_keys),
        tiles.specialised,
    )
    return out


@kernel_op("seko::attention_fp8", mutates_args=())
def _attention_fp8_cuda(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v_t: Tensor,
    v_scale: Tensor,
    valid_tokens: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    block_m: int,
    block_n: int,
    own_n: int,
    stages: int,
    warps: int,
    whole: int,
    splits: int,
    specialised: bool,
) -> Tensor:
    return _launch(
        wrap_triton(attention_hopper_outline),
        wrap_triton(attention_fp8_kernel),
        (q, k, k_scale, v_t, k_own, v_own, v_scale, valid_tokens),
        None,
        block_m,
        block_n,
        own_n,
        stages,
        warps,
        whole,
        splits,
        specialised,
    )


@kernel_op("seko::sparse_attention_fp8", mutates_args=())
def _sparse_attention_fp8_cuda(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v_t: Tensor,
    v_scale: Tensor,
    valid_tokens: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    chosen: Tensor,
    block_m: int,
    block_n: int,
    own_n: int,
    stages: int,
    warps: int,
    whole: int,
    splits: int,
    specialised: bool,
) -> Tensor:
    return _launch(
        wrap_triton(sparse_attention_hopper_outline),
        wrap_triton(sparse_attention_fp8_kernel),
        (q, k, k_scale, v_t, k_own, v_own, v_scale, valid_tokens),
        chosen,
        block_m,
        block_n,
        own_n,
        stages,
        warps,
        whole,
        splits,
        specialised,
    )


def _launch(
    outline: Any,
    kernel: Any,
    inputs: tuple[Tensor, ...],
    chosen: Tensor | None,
    block_m: int,
    block_n: int,
    own_n: int,
    stages: int,
    warps: int,
    whole: int,
    splits: int,
    specialised: bool,
) -> Tensor:
    """Launch the kernels of an attention to all cached keys, or to those that ``chosen`` lists. Each op wraps its own
    kernels, because torch looks for them in the op's source."""
    q, k, _, v_t, k_own, v_own, *_ = inputs
    batch, query_tokens, heads, head_dim = q.shape
    use_torchs_memory()
    rest = query_tokens - whole
    out = torch.empty((batch, query_tokens, heads, head_dim), dtype=torch.bfloat16, device=q.device)
    parts = Parts.of(out, rest, splits)
    strides = (query_tokens, k_own.shape[1], k.shape[1], v_t.shape[3], v_own.stride(1))
    of_list, of_kernel = {}, {}
    if chosen is not None:
        inputs = (*inputs, chosen)
        of_list = {"CHOSEN_TILES": chosen.shape[-1]}
        of_kernel = {**of_list, "QUERY_TILE": QUERY_TILE}
    if specialised:
        programs, places = parts.programs(whole, block_m, batch, heads)
        outline[(programs,)](
            *inputs,
            out,
            parts.out,
            parts.lse,
            *strides,
            *places,
            HEADS=heads,
            SOFTMAX_SCALE=softmax_scale(head_dim),
            Q_STRIDE=q.stride(1),
            K_OWN_STRIDE=k_own.stride(1),
            OWN_N=own_n,
            STAGES=stages,
            **of_list,
            num_warps=warps,
        )
    else:
        launches = [(0, whole, query_tokens, 1, out)]
        if rest:
            launches.append((whole, rest, rest, splits, parts.out))
        for first, queries, out_tokens, cuts, target in launches:
            kernel[(-(-queries // block_m), heads, batch * cuts)](
                *inputs,
                target,
                parts.lse,
                *strides,
                first,
                out_tokens,
                HEADS=heads,
                HEAD_DIM=head_dim,
                SOFTMAX_SCALE=softmax_scale(head_dim),
                KEY_TILE=KEY_TILE,
                Q_STRIDE=q.stride(1),
                K_OWN_STRIDE=k_own.stride(1),
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                OWN_N=own_n,
                STAGES=stages,
                SPLITS=cuts,
                INTEGER=False,
                **of_kernel,
                num_warps=warps,
            )
    parts.combine(out)
    return out.view(batch, query_tokens, heads * head_dim)


def _expect_chosen(chosen: Tensor, q: Tensor, tiles: int) -> None:
    expect_dims("chosen", chosen, 4, "[batch, heads, query tiles, entries]")
    batch, queries, heads, _ = q.shape
    count = chosen.shape[3]
    if not 0 < count <= tiles:
        raise KernelsError(f"chosen has lists of {count}, expected 1 to {tiles}, the number of key tiles")
    expect("chosen", chosen, (batch, heads, query_tiles(queries), count), torch.int32)


def _expect_own(own: OwnTokens, q: Tensor) -> None:
    expect_dims("own keys", own.k, 4, "[batch, tokens, heads, head_dim]")
    batch, queries, heads, head_dim = q.shape
    tokens = own.k.shape[1]
    if tokens < queries:
        raise KernelsError(
            f"there are {tokens} own keys and {queries} queries, expected at least as many keys"
        )
    of_rows = (("own keys", own.k, (heads, head_dim)), ("own values", own.v, (heads * head_dim,)))
    for name, given, row in of_rows:
        expect_dtype(name, given, q.dtype)
        expected = (batch, tokens, *row)
        if tuple(given.shape) != expected:
            raise KernelsError(f"{name} have shape {tuple(given.shape)}, expected {expected}")
        _expect_rows(name, given)


def _expect_rows(name: str, x: Tensor) -> None:
    """Raise an error unless each token's numbers ``x[b, t]`` are contiguous, and all tokens lie at one stride. Strides
    of axes of one entry count, too: kernels are given them."""
    batch, tokens, *row = x.shape
    apart, token, *within = x.stride()
    contiguous = within[-1] == 1 and within[:-1] == row[1:]
    if not contiguous or token % DESCRIPTOR_UNIT or (batch > 1 and apart != tokens * token):
        raise KernelsError(
            f"{name}: strided {x.stride()}, expected rows of contiguous numbers at one stride, a multiple of "
            f"{DESCRIPTOR_UNIT}"
        )
