"""Layers of MiniCPM4, which attend to a KV cache or to a few local tokens, and the module that computes positions for
all layers of a call.

The KV cache [S, K, D] is flat: it has S places, one for each token. Each row has consecutive places, and the host
chooses the first place of a row (``starts``). A call writes the keys and values of its tokens to places of their rows.
A call reads equally many places for every row. This number is the call's read length, and is at least the number of
tokens that any row has in the cache. The last place of the cache belongs to no row: padding is written there.

In shapes B is the number of rows, T the number of tokens of a row in one call, S the number of places of the cache, H
the number of query heads, K the number of heads of keys and values, and D the number of channels of a head. L is the
read length, and d the width. Matmuls run in the weights' dtype, norms and RoPE in float32 as in the original code of
VoxCPM2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.families.voxcpm2.config import LongRope, NetConfig
from seko_kernels.few_rows_reference import rotate, split_heads
from seko_kernels.few_tokens import QuantisedCache
from seko_kernels.formats import NumberFormat
from seko_kernels.fused_reference import FP8


class Norm(nn.Module):
    """RMSNorm that rounds its result to the weights' dtype before it multiplies by the weight."""

    def __init__(self, net: NetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = net.norm_eps
        self.weight = nn.Parameter(torch.empty(net.dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, with the shape [..., d] and dtype of ``x``."""
        mean = x.float().square().mean(-1, keepdim=True)
        return (x * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class Fp8Weight(nn.Module):
    """A linear layer whose weight is e4m3 with a factor for each output channel. The activations of the fp8 linear
    layer are not quantised."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight_fp8 = nn.Parameter(torch.empty(outer, inner, dtype=FP8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(outer, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear layer's result [..., outer] for ``x`` [..., inner]."""
        return F.linear(x, (self.weight_fp8.float() * self.weight_scale).to(x.dtype))


def matrix(inner: int, outer: int, dtype: torch.dtype, *, fp8: bool) -> nn.Module:
    """Return a linear layer without a bias, in the requested dtype or in fp8."""
    return Fp8Weight(inner, outer) if fp8 else nn.Linear(inner, outer, bias=False, dtype=dtype)


class Attention(nn.Module):
    """The projections of an attention. The matrices of q, k and v are joined to one matrix."""

    def __init__(self, net: NetConfig, dtype: torch.dtype, *, fp8: bool) -> None:
        super().__init__()
        self.qkv_proj = matrix(net.dim, net.attention_width + 2 * net.kv_width, dtype, fp8=fp8)
        self.o_proj = matrix(net.attention_width, net.dim, dtype, fp8=fp8)


class FeedForward(nn.Module):
    """A gated feed-forward. The matrices of gate and up are joined to one matrix."""

    def __init__(self, net: NetConfig, dtype: torch.dtype, *, fp8: bool) -> None:
        super().__init__()
        self.gate_up_proj = matrix(net.dim, 2 * net.ffn_dim, dtype, fp8=fp8)
        self.down_proj = matrix(net.ffn_dim, net.dim, dtype, fp8=fp8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward's output, with the shape of ``x`` [..., d]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        result: Tensor = self.down_proj(F.silu(gate) * up)
        return result


class Layer(nn.Module):
    """Base class of layers: the weights, and all computations except attention.

    Parameters
    ----------
    net : NetConfig
        Dimensions of the transformer to which the layer belongs.
    dtype : torch.dtype
        Dtype of weights and activations.
    fp8 : bool
        Whether weight matrices are stored in e4m3, with a factor for each output channel.
    """

    def __init__(self, net: NetConfig, dtype: torch.dtype, *, fp8: bool = False) -> None:
        super().__init__()
        self.net = net
        self.input_layernorm = Norm(net, dtype)
        self.self_attn = Attention(net, dtype, fp8=fp8)
        self.post_attention_layernorm = Norm(net, dtype)
        self.mlp = FeedForward(net, dtype, fp8=fp8)

    def projected(
        self, hidden: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, H, D] and k, v [B, T, K, D] of ``hidden`` [B, T, d]; q and k are rotated if rotary tables are
        passed.
        """
        net = self.net
        qkv = self.self_attn.qkv_proj(self.input_layernorm(hidden))
        q, k, v = split_heads(qkv, net.heads, net.kv_heads)
        if cos is None or sin is None:
            return q, k, v
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finished(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [B, T, d] from the layer's input and the result of its attention [B, T, H*D]."""
        hidden = self._added(hidden, self.self_attn.o_proj(attended))
        return self._added(hidden, self.mlp(self.post_attention_layernorm(hidden)))

    def _added(self, hidden: Tensor, branch: Tensor) -> Tensor:
        return hidden + (branch if self.net.scale_depth is None else branch * self.net.branch_scale)


class LocalLayer(Layer):
    """A layer of a local transformer (encoder or diffusion transformer of one patch): every token attends to every
    other token."""

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output [B, T, d] for ``hidden`` [B, T, d] and rotary tables [T, D] float32."""
        q, k, v = (part.transpose(1, 2) for part in self.projected(hidden, cos, sin))
        attended = F.scaled_dot_product_attention(q, *self._for_queries(k, v))
        return self.finished(hidden, attended.transpose(1, 2).flatten(2))

    def _for_queries(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v [B, K, T, D] with each head repeated for its heads of queries, [B, H, T, D]."""
        shared = self.net.heads // self.net.kv_heads
        return k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)


class CachedLayer(Layer):
    """A layer with a KV cache: writes the call's keys and values, and attends to all tokens that the call's rows have
    in the cache.
    """

    def forward(
        self,
        hidden: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        write_index: Tensor,
        read_index: Tensor,
        mask: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output [B, T, d], and write the tokens' keys and values to the cache.

        Parameters
        ----------
        hidden : Tensor
            The hidden state, [B, T, d].
        k_cache, v_cache : Tensor
            Keys and values of S cache places, [S, K, D]; written in place.
        write_index, read_index, mask : Tensor
            The results of `Positions` with the same names.
        cos, sin : Tensor, optional
            Rotary tables, float32 [B, T, D]; None for a transformer without positions.
        """
        q, k, v = self.projected(hidden, cos, sin)
        k_cache.index_copy_(0, write_index, k.flatten(0, 1))
        v_cache.index_copy_(0, write_index, v.flatten(0, 1))
        keys, values = (cache.index_select(0, read_index) for cache in (k_cache, v_cache))
        return self.over(hidden, q, keys, values, mask)

    def over(self, hidden: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the layer's output from the queries and from the keys and values read from the cache, [B*L, K, D]
        each.
        """
        rows = (hidden.shape[0], -1)
        k, v = (read.unflatten(0, rows).transpose(1, 2) for read in (keys, values))
        return self.finished(hidden, self.attend(q, k, v, mask))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Return the attention [B, T, H*D] of q [B, T, H, D] to k and v [B, K, L, D] under ``mask`` [B, T, L].

        If T is 1, the query heads that share keys become the queries of one attention, so that keys are read once.
        """
        net, (batch, tokens) = self.net, q.shape[:2]
        shared = net.heads // net.kv_heads
        if tokens == 1:
            grouped = q.view(batch, net.kv_heads, shared, net.head_dim)
            return F.scaled_dot_product_attention(grouped, k, v, mask[:, None]).reshape(batch, 1, -1)
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask[:, None])
        return attended.transpose(1, 2).flatten(2)


class QuantisedCachedLayer(CachedLayer):
    """A layer with a quantised KV cache.

    Parameters
    ----------
    net, dtype, fp8
        The parameters of `Layer` with the same names.
    form : NumberFormat
        Number format of keys, which are stored after RoPE, and of values.
    """

    def __init__(self, net: NetConfig, dtype: torch.dtype, *, form: NumberFormat, fp8: bool = False) -> None:
        super().__init__(net, dtype, fp8=fp8)
        self.form = form

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        k_codes: Tensor,
        k_scales: Tensor,
        v_codes: Tensor,
        v_scales: Tensor,
        write_index: Tensor,
        read_index: Tensor,
        mask: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output [B, T, d]; the arguments are those of `CachedLayer.forward`, with caches as in
        `QuantisedCache`."""
        q, k, v = self.projected(hidden, cos, sin)
        caches = QuantisedCache(self.form, k_codes, k_scales), QuantisedCache(self.form, v_codes, v_scales)
        for cache, x in zip(caches, (k, v), strict=True):
            cache.write(x.flatten(0, 1), write_index)
        keys, values = (cache.read(read_index, hidden.dtype) for cache in caches)
        return self.over(hidden, q, keys, values, mask)


class Positions(nn.Module):
    """Computes the cache places of a call's tokens, the tokens to which they attend, and their rotary tables.

    Parameters
    ----------
    tokens, length, places : int
        Number T of tokens of a row in one call, read length L, and number S of cache places.
    amplitude : float
        Factor by which cosines and sines are multiplied; see `LongRope.amplitude`.
    """

    def __init__(self, tokens: int, length: int, places: int, amplitude: float) -> None:
        super().__init__()
        self.tokens, self.length, self.places, self.amplitude = tokens, length, places, amplitude

    def forward(
        self, starts: Tensor, first: Tensor, count: Tensor, inverse_factors: Tensor, frequencies: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the cache places that a call writes and reads, the attention mask, and the rotary tables.

        Parameters
        ----------
        starts : Tensor
            First cache place of each row, int64 [B]; ``places - 1`` for a batch index without a session.
        first, count : Tensor
            Position of each row's first token, and number of its tokens without padding, 1 to T; int64 [B].
        inverse_factors, frequencies : Tensor
            The two tables that `rope_tables` returns, float32 [D/2].

        Returns
        -------
        write_index : Tensor
            Cache place of each token, int64 [B*T]; for padding the cache's last place.
        read_index : Tensor
            Cache places of each row's positions, int64 [B*L]. Behind a row's last token the place of the last token is
            repeated, so that no other row's places are read.
        mask : Tensor
            Whether a token attends to a position, bool [B, T, L].
        cos, sin : Tensor
            Rotary tables (cosines and sines), float32 [B, T, D].
        """
        steps = torch.arange(self.tokens, device=starts.device)
        read = torch.arange(self.length, device=starts.device)
        positions = first[:, None] + steps  # [B, T]
        write = torch.where(steps < count[:, None], starts[:, None] + positions, self.places - 1)
        last = (first + count - 1)[:, None]
        mask = read <= positions[..., None]
        angles = positions[..., None].float() * inverse_factors * frequencies
        cos, sin = rotary(angles, self.amplitude)
        return write.flatten(), (starts[:, None] + torch.minimum(read, last)).flatten(), mask, cos, sin


def rotary(angles: Tensor, amplitude: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [..., D] of angles [..., D/2], for both halves of the channels."""
    both = torch.cat((angles, angles), dim=-1)
    return both.cos() * amplitude, both.sin() * amplitude


def rope_tables(rope: LongRope) -> tuple[Tensor, Tensor]:
    """Return the inverse of each frequency factor, and the frequencies, [D/2] float32 each. The rotary angle of a
    position is position * inverse * frequency, multiplied from left to right, as in the original.
    """
    pairs = len(rope.factors)
    inverse = 1.0 / torch.tensor(rope.factors, dtype=torch.float32)
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, 2 * pairs, 2).float() / (2 * pairs)))
    return inverse, frequencies


def local_rotary(rope: LongRope, tokens: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [tokens, D] float32 for the positions 0, 1, ... of a local transformer."""
    inverse, frequencies = rope_tables(rope)
    return rotary(torch.arange(tokens)[:, None].float() * inverse * frequencies, rope.amplitude)
