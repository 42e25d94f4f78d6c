"""Test cases with which attention kernels are admitted: sizes, arguments and expected results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from seko_kernels.attention import key_tiles, v_columns
from seko_kernels.fused_reference import e4m3_cast, int8_rows, int8_tiles, largest_of_tiles, scale_per_token

NAN_BYTE = 0x7F


@dataclass(frozen=True)
class Case:
    """A test case of attention: its sizes, the kind of its numbers, and the number of cached tokens of each row."""

    name: str
    query_tokens: int
    heads: int
    cache_tokens: int
    valid_tokens: tuple[int, ...]
    key_offset: float = 0.0  # added along each query's mean direction, to move scores far from 0
    outliers: bool = False
    sink: bool = False  # one key has nearly all weight, and a value of 0
    more_own: int = 0  # own keys beyond those of the queries
    strided: bool = False  # tokens of queries and own keys lie apart, as ranks get them


def cases(head_dim: int, full: tuple[int, int, int] | None) -> Iterator[Case]:
    """Yield the test cases of attention; `full` (heads, query tokens, cache tokens) adds cases of that size.

    The small sizes are no multiples of 16, as in most presets, because Triton compiles a separate kernel for such
    sizes.
    """
    heads = full[0] if full else 2
    yield Case("whole tiles", 200, heads, 1000, (768,))
    yield Case("no size a multiple of a tile", 200, heads, 1000, (1000,))
    yield Case("rows of different fill", 130, heads, 1500, (1, 777, 1500, 256))
    yield Case("an empty row", 60, heads, 300, (0, 300))
    # Scores of -60 and less: a masked position whose score counted as 0 would get all the weight.
    yield Case("scores far below zero", 130, heads, 700, (523,), key_offset=-8.0 * head_dim**0.5)
    yield Case("outlier channels", 130, heads, 700, (523,), outliers=True)
    # The result is what the other keys give, each of about 2 ** -16 of the largest weight.
    yield Case("a key that all queries look at", 130, heads, 700, (523,), sink=True)
    yield Case("own keys that are no queries", 130, heads, 700, (1, 523), more_own=301)
    yield Case("strided tokens", 200, heads, 1000, (523, 1000), more_own=3, strided=True)
    if full is not None:
        _, query_tokens, cache_tokens = full
        yield Case("full size", query_tokens, heads, cache_tokens, (cache_tokens,))
        yield Case("full size, filling", query_tokens, heads, cache_tokens, (cache_tokens * 2 // 5 + 3,))


def make_case(case: Case, head_dim: int, device: str) -> tuple[Tensor, ...]:
    """Return seeded random arguments of `fused_reference.attention_fp8`, with NaN behind the valid tokens and uneven
    scales.

    The values of the chunk's own tokens are strided as in an engine. q and the chunk's own tokens are bfloat16 on
    CUDA, float32 on a CPU.
    """
    generator = torch.Generator(device).manual_seed(case.query_tokens + case.cache_tokens)
    batch, heads = len(case.valid_tokens), case.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q = normal(batch, case.query_tokens, heads, head_dim)
    k = normal(batch, case.cache_tokens, heads, head_dim)
    v = normal(batch, heads, head_dim, v_columns(case.cache_tokens))
    own_tokens = case.query_tokens + case.more_own
    k_own = normal(batch, own_tokens, heads, head_dim)
    v_own = normal(batch, own_tokens, heads, 3 * head_dim)
    q, k, k_own = _made_hard(case, normal, q, (k, k_own), (v.transpose(2, 3), v_own))
    if case.sink:  # what own keys give is exact, and would hide the rest
        v_own.zero_()
    valid = torch.tensor(case.valid_tokens, device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    codes, k_scale = int8_tiles(k, largest_of_tiles(k))
    # Tiles get different scales, so that using the scale of a wrong tile is noticed.
    k_scale = k_scale * (torch.rand(k_scale.shape, generator=generator, device=device) + 0.5)
    v = e4m3_cast(v)
    for row, filled in enumerate(case.valid_tokens):
        codes[row, filled:].fill_(-127)
        k_scale[row, :, key_tiles(filled) :].fill_(torch.nan)
        v[row, ..., filled:].view(torch.uint8).fill_(NAN_BYTE)
    v_scale = 2.0 ** torch.randint(-1, 2, (heads,), generator=generator, device=device).float()
    values = v_own.to(dtype).flatten(2)[..., : heads * head_dim]
    q, k_own = q.to(dtype), k_own.to(dtype)
    if case.strided:
        q, k_own = (torch.stack((x.new_full(x.shape, torch.nan), x), 2)[:, :, 1] for x in (q, k_own))
    return q, codes, k_scale, v, v_scale, valid + case.query_tokens, k_own, values


def expected(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v_t: Tensor,
    v_scale: Tensor,
    valid_tokens: Tensor,
    k_own: Tensor,
    v_own: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the attention in float32, and the attention with the roundings that the kernel makes.

    For scores against cached tokens, queries are rounded to int8. Probabilities are scaled so that the largest
    probability of a query is 256, and rounded: to e4m3 for cached tokens, and to q's dtype for the chunk's own tokens.
    The result of the attention is rounded to bfloat16. The expected attention is computed for one head and row at a
    time, to bound memory.

    Returns
    -------
    truth, rounded : Tensor
        Attention without and with the kernel's roundings, ``[B, T, H * D]`` float32 and bfloat16.
    """
    truth = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    rounded = torch.zeros(q.shape, dtype=torch.bfloat16, device=q.device)
    codes, q_scale = int8_rows(q.float())
    coarse_q = codes.float() * q_scale.unsqueeze(-1)
    own_tokens, key_scale = k_own.shape[1], scale_per_token(k_scale, k.shape[1])
    for row, valid in enumerate(valid_tokens.tolist()):
        filled = valid - q.shape[1]
        for head in range(q.shape[2]):
            cached_keys = k[row, :filled, head].float() * key_scale[row, head, :filled, None]
            keys = torch.cat((cached_keys, k_own[row, :, head].float()))
            own_values = v_own[row].float().unflatten(-1, q.shape[2:])[:, head]
            values = torch.cat((v_t[row, head, :, :filled].float().T * v_scale[head], own_values))
            asks = q[row, :, head].float()
            weights, total = _softmax_parts(asks @ keys.T * q.shape[3] ** -0.5)
            truth[row, :, head] = weights @ values / total
            scores = torch.cat((coarse_q[row, :, head] @ cached_keys.T, asks @ keys[filled:].T), -1)
            weights, total = _softmax_parts(scores * q.shape[3] ** -0.5)
            cached_weights, own = (weights * 256).split((filled, own_tokens), -1)
            coarse = torch.cat((e4m3_cast(cached_weights).float(), own.to(q.dtype).float()), -1)
            rounded[row, :, head] = (coarse @ values / (total * 256)).to(torch.bfloat16)
    return truth.flatten(2), rounded.flatten(2)


def _made_hard(
    case: Case,
    normal: Callable[..., Tensor],
    q: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Return queries and keys [..., H, D] changed to the kind of numbers of the case; outlier channels and the key of
    all weight are written into the last keys and values [..., D] in place."""
    if case.key_offset or case.sink:
        direction = normal(*q.shape[2:])
        direction = direction / direction.norm(dim=-1, keepdim=True)
        q = q * 0.3 + direction * q.shape[-1] ** 0.5 / 2
        keys = tuple(k + direction * case.key_offset for k in keys)
        if case.sink:
            keys[-1][:, 0] = direction * 20
            values[-1][:, 0] = 0
    if case.outliers:
        q[..., 7] *= 5
        for k in keys:
            k[..., 5] *= 20
        for v in values:
            v[..., 3] *= 20
    return q, *keys


def make_case_bf16(case: Case, head_dim: int, device: str) -> tuple[Tensor, ...]:
    """Return seeded random arguments of `fused_reference.attention_bf16`, with NaN behind the valid tokens.

    As in a cache, the tokens of the chunk follow the cached tokens. The tensors of a test case are bfloat16 on CUDA,
    float32 on a CPU.
    """
    generator = torch.Generator(device).manual_seed(case.query_tokens + case.cache_tokens)
    batch, tokens = len(case.valid_tokens), case.cache_tokens + case.query_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q = normal(batch, case.query_tokens, case.heads, head_dim)
    k, v = normal(2, batch, tokens, case.heads, head_dim)
    q, k = _made_hard(case, normal, q, (k,), (v,))
    valid = torch.tensor(case.valid_tokens, device=device) + case.query_tokens
    for row, filled in enumerate(valid.tolist()):
        k[row, filled:].fill_(torch.nan)
        v[row, filled:].fill_(torch.nan)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return q.to(dtype), k.to(dtype), v.to(dtype), valid


def expected_bf16(q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention in float32, and the attention with probabilities and result rounded to bfloat16.

    The expected attention is computed for one head and row at a time, to bound memory.

    Returns
    -------
    truth, rounded : Tensor
        Attention without and with the kernel's roundings, ``[B, T, H * D]`` float32 and bfloat16.
    """
    truth = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    rounded = torch.zeros(q.shape, dtype=torch.bfloat16, device=q.device)
    for row, filled in enumerate(valid_tokens.tolist()):
        for head in range(q.shape[2]):
            asks, keys, values = (x[row, :, head].float() for x in (q, k[:, :filled], v[:, :filled]))
            weights, total = _softmax_parts(asks @ keys.T * q.shape[3] ** -0.5)
            truth[row, :, head] = weights @ values / total
            rounded[row, :, head] = (weights.bfloat16().float() @ values / total).bfloat16()
    return truth.flatten(2), rounded.flatten(2)


def _softmax_parts(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return unnormalised softmax probabilities, and their sum."""
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights, weights.sum(-1, keepdim=True)
