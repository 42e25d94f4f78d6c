"""One transformer layer of the causal DiT in plain torch: self-attention over the KV cache and the chunk,
cross-attention to the text, feed-forward.

Letters in shapes are those of `causal_dit`: B is the number of rows, T the number of tokens, H the number of heads, D
the number of channels of a head, and d the width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.attention_waves import cut_attention, waves_on
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.layers.ring_positions import (
    rows_of,
    token_index,
    token_index_of_call,
)
from seko_export.families.layers.rotary import no_rotation, rotate
from seko_kernels.kv_formats import KvFormat

FRONT_K, FRONT_V = "front_k", "front_v"  # keys and values of tokens before the stream, among a layer's caches


class Recall(NamedTuple):
    """A layer's tensors of a model family that are kept for each latent frame, in the slots of self-attention's cache.

    Parameters
    ----------
    caches : mapping of str to Tensor
        The tensors by name, each [S*cache_frames, ...] with S rows of the pool; written in place.
    write_slots : Tensor
        The slot of each latent frame of the chunk, int64 [B, F].
    valid_tokens : Tensor
        Number of filled tokens in each row's cache of self-attention, including this chunk, int64 [B].
    rows : Tensor or None
        The row of the pool for each batch index, int64 [B]; None without a pool, and S is then B.
    """

    caches: Mapping[str, Tensor]
    write_slots: Tensor
    valid_tokens: Tensor
    rows: Tensor | None

    def keep(self, new: Mapping[str, Tensor], slots: int) -> None:
        """Write the chunk's tensors [B, F, ...], by name, to the caches, each of which has so many slots a row."""
        own = self.write_slots
        row = torch.arange(own.shape[0], device=own.device) if self.rows is None else self.rows
        index = (row.unsqueeze(1) * slots + own).flatten()
        for name, values in new.items():
            cache = self.caches[name]
            cache.index_copy_(0, index, values.flatten(0, 1).to(cache.dtype))


class LayerInputs(NamedTuple):
    """What a layer takes besides the chunk's hidden state, modulation and rotary tables. `Block.forward` and
    `fused_block.FusedLayer.forward` document the fields; mappings that a layer does not take are empty."""

    text_k: Tensor
    text_v: Tensor
    caches: Mapping[str, Tensor]
    rows: Tensor | None
    valid: Tensor | None
    scales: Mapping[str, Tensor]
    places: Mapping[str, Tensor]
    window: Mapping[str, Tensor]
    token_index: Tensor | None
    write_slots: Tensor | None
    conditioning: Mapping[str, Tensor]
    recall: Mapping[str, Tensor]

    @property
    def valid_tokens(self) -> Tensor:
        """Return the number of filled tokens in each row's cache, int64 [B]."""
        if self.valid is None:
            raise TypeError("a layer that attends to a cache takes valid_tokens")
        return self.valid

    @property
    def of_rows(self) -> Mapping[str, Tensor]:
        """Return the parts of the caches that belong to the rows of the call."""
        if self.rows is None:
            return self.caches
        in_caches = self.text_k.shape[0]
        return {
            name: rows_of(cache, self.rows, len(cache) // in_caches) for name, cache in self.caches.items()
        }

    @property
    def kept(self) -> Recall:
        """Return the family's tensors that are kept for each latent frame.

        Raises
        ------
        TypeError
            If the layer got no slots for them.
        """
        if self.write_slots is None:
            raise TypeError("a layer that keeps tensors for each latent frame takes write_slots")
        return Recall(self.recall, self.write_slots, self.valid_tokens, self.rows)


class Turn(Protocol):
    """How an extra attention changes the keys and values of a latent frame. It has no weights."""

    def of_slots(self, conditioning: Mapping[str, Tensor], recall: Recall) -> Tensor:
        """Return what `turned` takes for every slot of the cache, [B, S, ...], from what is cached for the frames
        there. The slots of the chunk itself may or may not be written yet."""

    def turned(self, of_frames: Tensor, x: Tensor) -> Tensor:
        """Return keys or values [B, F*n, H, D] of F frames, changed by ``of_frames`` [B, F, ...], in the dtype of
        ``x``."""


class Unturned(NamedTuple):
    """A layer's queries without RoPE, and its attention to keys and values without RoPE.

    Parameters
    ----------
    q : Tensor
        Queries of the chunk, [B, T, H, D].
    attend : callable
        Function that maps queries [B, T, H, D], and what the family's `Turn` takes for every slot of the cache [B, S,
        ...], to their attention [B, T, d] over the filled slots, whose keys and values are changed by the `Turn`.
    """

    q: Tensor
    attend: Callable[[Tensor, Tensor], Tensor]


class BlockWeights(Ranked):
    """The parameters of one transformer layer, shared by its plain and fused implementations.

    Attributes
    ----------
    extra_attention : nn.Module or None
        Module of a model family that attends to the window in a way of its own: it maps `Unturned`, the tensors that
        `LayerChoice` names for it and the `Recall` to [B, T, d], which is added to the result of self-attention's last
        projection.
    extra_turn : Turn or None
        How the extra attention changes keys and values.
    after_attention, after_cross, tail : nn.Module or None
        Modules that a model family adds after self-attention, after cross-attention and after the feed-forward. Each
        maps the hidden state [B, T, d], and the tensors [B, ...] that `LayerChoice` names for the module, to the next
        hidden state; `after_cross` to the hidden state and a residual that is not added yet. If the family keeps
        tensors for each latent frame, `after_cross` also takes the `Recall`.
    extra_text : tuple of str
        Names of further keys and values to which cross-attention attends, besides the keys and values of the text; may
        be empty.
    """

    # names of the arguments of `forward` that are mappings
    groups: tuple[str, ...] = ("caches", "scales", "places", "conditioning", "recall")

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        kv: KvFormat,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.model, self.stream, self.kv = model, stream, kv
        d = model.dim
        self.modulation = nn.Parameter(torch.empty(1, 6, d))
        self.self_attn = SelfAttentionWeights(model, dtype)
        self.norm3 = nn.LayerNorm(d, model.norm_eps)
        self.cross_attn = CrossAttentionWeights(model, dtype)
        self.ffn = nn.Sequential(
            nn.Linear(d, model.ffn_dim, dtype=dtype),
            nn.GELU(approximate="tanh"),
            nn.Linear(model.ffn_dim, d, dtype=dtype),
        )
        self.extra_attention: nn.Module | None = None
        self.extra_turn: Turn | None = None
        self.after_attention: nn.Module | None = None
        self.after_cross: nn.Module | None = None
        self.tail: nn.Module | None = None
        self.extra_text: tuple[str, ...] = ()

    def add(self, modules: Mapping[str, nn.Module | None], extra_text: tuple[str, ...]) -> None:
        """Add the modules of a model family to the layer, by the names of the attributes above."""
        for name, module in modules.items():
            setattr(self, name, module)
        self.extra_text = extra_text

    def added_attention(self, qkv: Tensor, inputs: LayerInputs) -> Tensor | None:
        """Return what the family's module adds to self-attention, [B, T, d], from the chunk's queries, keys and values
        before their norms, [B, T, 3*d]; None without such a module. The chunk's slots of the cache are not read, so
        they may or may not be written yet."""
        if self.extra_attention is None:
            return None
        if not self.kv.keys_before_rope:
            raise TypeError("an extra attention takes a cache with keys before RoPE")
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = (
            self.split_heads(rms_norm(x, norm).to(qkv.dtype))
            for x, norm in ((q, self.self_attn.norm_q), (k, self.self_attn.norm_k))
        )
        own = (k, self.split_heads(v))
        seen = Unturned(q, lambda q, of_slots: self.attend_turned(q, *own, of_slots, inputs))
        result: Tensor = self.extra_attention(seen, inputs.conditioning, inputs.kept)
        return result

    def attend_turned(self, q: Tensor, k: Tensor, v: Tensor, of_slots: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the extra attention [B, T, d] of queries [B, T, H, D] to the filled slots of the cache, with the
        chunk's own keys and values [B, T, H, D] in their slots, all changed by `extra_turn`."""
        if self.extra_turn is None:
            raise TypeError("an extra attention has a Turn")
        batch, s = q.shape[0], self.stream
        index = token_index(
            inputs.kept.write_slots, s
        )  # of the chunk's tokens in the caches of the call's rows
        plain = no_rotation(batch, self.model, s, q.device)
        past = self.kv.expand(inputs.of_rows, inputs.scales, plain, k.dtype)  # each [B*N, H, D]
        keys, values = (
            self.extra_turn.turned(
                of_slots, window.index_copy(0, index, x.flatten(0, 1)).unflatten(0, (batch, -1))
            )
            for window, x in zip(past, (k, v), strict=True)
        )
        return self.attend_window(q, keys, values, inputs.valid_tokens)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> Tensor:
        """Return the attention [B, T, d] of q [B, T, H, D] to the first ``valid_tokens`` [B] of k and v [B, N, H, D],
        in 16 bits on a GPU."""
        return window_attention(q, k, v, valid_tokens)

    def attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, unturned: Tensor | None, inputs: LayerInputs
    ) -> Tensor:
        """Write the chunk's keys and values, and return the attention [B, T, d] of its queries to cache and chunk.

        Queries, keys and values are [B, T, H, D]; ``unturned`` are the keys before RoPE, if the cache stores them so.
        """
        if inputs.token_index is None:
            raise TypeError("a layer with 16-bit attention always writes: it takes token_index")
        index, own = inputs.token_index, (k.flatten(0, 1), v.flatten(0, 1))  # [B*T, H, D]
        stored = own[0] if unturned is None else unturned.flatten(0, 1)
        self.kv.write(inputs.caches, inputs.scales, index, stored, own[1])
        if inputs.rows is not None:
            index = token_index_of_call(index, inputs.rows, self.stream)
        caches, by_row = inputs.of_rows, (q.shape[0], self.stream.cache_tokens)
        windows = self.kv.expand(caches, inputs.scales, inputs.places, q.dtype)  # each [B*N, H, D]
        # the chunk's own keys and values are unquantised: only cached frames went through the cache format
        keys, values = (
            (window if exact else window.index_copy(0, index, x)).unflatten(0, by_row)
            for window, x, exact in zip(windows, own, self.kv.exact, strict=True)
        )
        keys, values, valid = behind_front(caches, keys, values, inputs.valid_tokens)
        return self.attend_window(q, keys, values, valid)

    def behind_cross(self, hidden: Tensor, y: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """Return the hidden state and what is added to it behind cross-attention, whose result is ``y``, and the
        family's module after it."""
        if self.after_cross is None:
            return hidden, y
        kept = (inputs.kept,) if inputs.recall else ()
        advanced: tuple[Tensor, Tensor] = self.after_cross(hidden + y, inputs.conditioning, *kept)
        return advanced

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the last axis into heads, so that [..., d] becomes [..., H, D]."""
        return x.reshape(*x.shape[:-1], self.model.heads, self.model.head_dim)

    def cross_attend(self, q: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the cross-attention of q [B, T, H, D] to the text, plus the cross-attention to the keys and values
        that `extra_text` names, as [B, T, d].

        The keys and values of cross-attention are [B, N, H, D] for N tokens. In a pool they have an entry for each pool
        row, from which the call's rows are selected.
        """
        pairs = [(inputs.text_k, inputs.text_v)]
        if self.extra_text:
            k, v = (inputs.conditioning[name] for name in self.extra_text)
            pairs.append((k, v))
        if inputs.rows is not None:
            pairs = [(k.index_select(0, inputs.rows), v.index_select(0, inputs.rows)) for k, v in pairs]
        results = [attention(q, k, v, bias=None) for k, v in pairs]
        return results[0] if len(results) == 1 else results[0] + results[1]


class Block(BlockWeights):
    """One transformer layer: self-attention over the cache, cross-attention to the text, feed-forward.

    `Block` is written in plain torch; `fused_block.FusedBlock` is the same layer with Seko's own kernels.

    Parameters
    ----------
    masked : bool
        If True, attention sees only the first ``valid_tokens`` tokens of each row's cache, for caches that are still
        filling. If False, attention sees the whole cache without a bias, for full caches. On an H200 a bias takes half
        of the speed of cuDNN's attention (docs/adr/0002).
    """

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        kv: KvFormat,
        dtype: torch.dtype,
        *,
        masked: bool,
    ) -> None:
        super().__init__(model, stream, kv, dtype)
        self.masked = masked

    def forward(
        self,
        hidden: Tensor,
        modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        token_index: Tensor,
        valid_tokens: Tensor,
        text_k: Tensor,
        text_v: Tensor,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        rows: Tensor | None = None,
        conditioning: Mapping[str, Tensor] | None = None,
        recall: Mapping[str, Tensor] | None = None,
        write_slots: Tensor | None = None,
        rank: Tensor | None = None,
    ) -> Tensor:
        """Advance the hidden state by one layer, and write this layer's keys and values to the cache.

        If several ranks (GPUs) share a chunk (`split`), hidden state and rotary tables have one rank's tokens only, and
        caches have one rank's heads only.

        Parameters
        ----------
        hidden, modulation, cos, sin, token_index : Tensor
            The results of `Embed` with the same names.
        valid_tokens : Tensor
            Number of filled tokens in each row's cache, including this chunk, int64 [B].
        text_k, text_v : Tensor
            Keys and values of the text, [B, text tokens, H, D], from `PromptKv`.
        caches : Mapping[str, Tensor]
            This layer's cache tensors by their names in the cache format (`kv`), each [B*N, ...] with N cache tokens
            for each of B rows; written in place.
        scales : Mapping[str, Tensor]
            The layer's constants of the cache format, such as quantisation scales, by their names in `kv`.
        places : Mapping[str, Tensor]
            The rotary tables ``slot_rotary`` and ``patch_rotary`` from `Embed` if the cache format stores keys before
            RoPE, else empty.
        rows : Tensor, optional
            The row of the pool for each batch index, int64 [B], which selects from the caches, ``text_k`` and
            ``text_v``; None without a pool.
        conditioning : mapping of str to Tensor, optional
            Tensors of the model family by name: inputs of the modules `after_attention`, `after_cross` and `tail`, and
            the further keys and values that `extra_text` names.
        recall, write_slots : mapping of str to Tensor, and Tensor, optional
            The family's tensors that are kept for each latent frame, and the slots of the chunk's frames; see `Recall`.
        rank : Tensor, optional
            Number of this rank, int64 [1]; only if several ranks (GPUs) share a chunk.

        Returns
        -------
        Tensor
            The next hidden state, [B, T, d]; [B, T/R, d] if R ranks share the chunk.
        """
        if self.split is not None and rank is not None:
            scales = self.split.heads_of_each(scales, rank)
        more, kept = conditioning or {}, recall or {}
        inputs = LayerInputs(
            *(text_k, text_v, caches, rows, valid_tokens, scales, places, {}),
            *(token_index, write_slots, more, kept),
        )
        return self._layer(hidden, modulation, inputs, lambda qkv: self._attend(qkv, cos, sin, inputs))

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> Tensor:
        """Return the attention [B, T, d] to the filled part of the cache, which is all of it without a mask."""
        return window_attention(q, k, v, valid_tokens if self.masked else None)

    def _layer(
        self, hidden: Tensor, modulation: Tensor, inputs: LayerInputs, attend: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the next hidden state. ``attend`` maps q, k and v [B, T, 3*d] to the self-attention [B, T, d], before
        the last projection."""
        per_frame = (self.modulation.unsqueeze(0) + modulation).unsqueeze(3)  # [B, F, 6, 1, d] float32
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = per_frame.unbind(2)  # each [B, F, 1, d]
        dtype = hidden.dtype

        qkv = self.self_attn.qkv(modulate(self._plain_norm(hidden), shift_1, scale_1).to(dtype))
        added = self.added_attention(qkv, inputs)
        y = attend(qkv)
        y = self.self_attn.o(y if self.split is None else self.split.to_tokens(y))
        y = y if added is None else y + added
        hidden = gated_residual(hidden, y, gate_1)
        if self.after_attention is not None:
            hidden = self.after_attention(hidden, inputs.conditioning)

        q = rms_norm(self.cross_attn.q(self._affine_norm(hidden).to(dtype)), self.cross_attn.norm_q)
        y = self.cross_attend(self.split_heads(q).to(dtype), inputs)
        hidden, y = self.behind_cross(hidden, self.cross_attn.o(y), inputs)
        hidden = hidden + y

        x = modulate(self._plain_norm(hidden), shift_2, scale_2).to(dtype)
        hidden = gated_residual(hidden, self.ffn(x), gate_2)
        return hidden if self.tail is None else self.tail(hidden, inputs.conditioning)

    def _norm_rope(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v for attention, and the keys before RoPE, [B, T, H, D] each, from q, k and v [B, T, 3*d]."""
        q, k, v = qkv.chunk(3, dim=-1)  # each [B, T, d]
        q = rotate(self.split_heads(rms_norm(q, self.self_attn.norm_q)), cos, sin).to(qkv.dtype)
        unturned = self.split_heads(rms_norm(k, self.self_attn.norm_k))
        return q, rotate(unturned, cos, sin).to(qkv.dtype), self.split_heads(v), unturned.to(qkv.dtype)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, inputs: LayerInputs) -> Tensor:
        q, k, v, unturned = self._norm_rope(qkv, cos, sin)
        keys: tuple[Tensor, ...] = (unturned,) if self.kv.keys_before_rope else ()
        if self.split is not None:
            q, k, v, *rest = self.split.to_heads((q, k, v, *keys))
            keys = tuple(rest)
        return self.attend_cached(q, k, v, keys[0] if keys else None, inputs)

    def _plain_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (self.model.dim,), eps=self.model.norm_eps)

    def _affine_norm(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm3(x.float())
        return y


class SelfAttentionWeights(nn.Module):
    """The weights of a layer's self-attention. The matrices of q, k and v are joined to one matrix, because one large
    product uses the GPU better than three products."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv: nn.Module = nn.Linear(model.dim, 3 * model.dim, dtype=dtype)
        self.norm_q, self.norm_k = RmsNormWeight(model), RmsNormWeight(model)
        self.o: nn.Module = nn.Linear(model.dim, model.dim, dtype=dtype)


class CrossAttentionWeights(nn.Module):
    """Weights of the query side of cross-attention. The weights of keys and values belong to `PromptKv`."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.q: nn.Module = nn.Linear(model.dim, model.dim, dtype=dtype)
        self.norm_q = RmsNormWeight(model)
        self.o: nn.Module = nn.Linear(model.dim, model.dim, dtype=dtype)


class RmsNormWeight(nn.Module):
    """The weight of an RMSNorm over the full width, before the split into heads."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(model.dim))


def rms_norm(x: Tensor, norm: RmsNormWeight) -> Tensor:
    """Return x / rms(x) * weight in float32, over the last axis."""
    return F.rms_norm(x.float(), (x.shape[-1],), norm.weight, norm.eps)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x * (1 + scale) + shift; x [B, T, d] float32, shift and scale [B, F, 1, d]."""
    per_frame = x.reshape(x.shape[0], shift.shape[1], -1, x.shape[-1])  # [B, F, n, d]
    return (per_frame * (1 + scale) + shift).flatten(1, 2)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Return x + y * gate, summed in float32, in x's dtype; x and y [B, T, d], gate [B, F, 1, d]."""
    per_frame = y.float().reshape(y.shape[0], gate.shape[1], -1, y.shape[-1])  # [B, F, n, d]
    step = (per_frame * gate).flatten(1, 2)
    return (x.float() + step).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias) v as [B, T, H*D]; q [B, T, H, D], k and v [B, N, H, D]."""
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias
    )
    return y.transpose(1, 2).flatten(2)


def behind_front(
    caches: Mapping[str, Tensor], k: Tensor, v: Tensor, valid_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [B, N, H, D] behind those of the tokens before the stream, if ``caches`` (of the call's
    rows) have any, and the number of filled tokens [B] of both together."""
    if FRONT_K not in caches:
        return k, v, valid_tokens
    front_k, front_v = (caches[name].unflatten(0, (k.shape[0], -1)) for name in (FRONT_K, FRONT_V))
    return torch.cat((front_k, k), 1), torch.cat((front_v, v), 1), valid_tokens + front_k.shape[1]


def window_attention(q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor | None) -> Tensor:
    """Return `attention` to the first ``valid_tokens`` [B] keys of each row, or to all keys without a bias if
    ``valid_tokens`` is None.
    """
    if valid_tokens is None:
        waves = waves_on(q.device, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        return attention(q, k, v, None) if waves is None else cut_attention(q, k, v, waves).flatten(2)
    # A bias alone would not mask a NaN: NaN - inf is NaN, and so is 0 * NaN.
    tokens = k.shape[1]
    empty = ~is_filled(valid_tokens, tokens)[:, :, None, None]
    return attention(
        q, k.masked_fill(empty, 0), v.masked_fill(empty, 0), fill_bias(valid_tokens, tokens, q.dtype)
    )


def is_filled(valid_tokens: Tensor, tokens: int) -> Tensor:
    """Return [B, N] bool: whether each cache token lies below ``valid_tokens`` [B]."""
    return torch.arange(tokens, device=valid_tokens.device) < valid_tokens[:, None]


def fill_bias(valid_tokens: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return [B, 1, 1, N]: 0 for cache tokens below ``valid_tokens`` [B], -inf for all other tokens.

    Slots are filled in order, so the number of filled tokens determines which tokens are filled.
    """
    filled = is_filled(valid_tokens, tokens)
    zero = torch.zeros((), dtype=dtype, device=valid_tokens.device)
    return torch.where(filled, zero, float("-inf")).to(dtype)[:, None, None, :]
