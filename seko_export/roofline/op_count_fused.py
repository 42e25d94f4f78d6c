"""Cost-model stand-ins for the fused ops: each records one launch and returns an empty tensor.

The stand-ins replace `fused_block.LayerOps` while `op_count` counts: kernels cannot run on the meta device, and a
kernel keeps intermediate results in registers that the reference implementation writes to memory. The stand-ins count
the bytes of a full cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.utils._pytree import tree_leaves

from seko_export.config.attention import BF16
from seko_export.families.layers.layer_ops import LayerOps
from seko_export.roofline.kinds import BF16_ATTENTION, FP8_ATTENTION, FP8_EXPAND, FP8_MATMUL, ROW_KERNEL
from seko_kernels.attention import OwnTokens
from seko_kernels.formats import KEY_TILE
from seko_kernels.fused_reference import FP8
from seko_kernels.rows import Rows
from seko_kernels.scratch import fp8_expand
from seko_kernels.sparse_past import QUERY_TILE, PastLayout, query_tiles
from seko_kernels.tuned import AttentionTiles


class RecordOp(Protocol):
    """The type of `op_count`'s recording function."""

    def __call__(
        self,
        kind: str,
        ins: Iterable[Tensor],
        outs: Sequence[Tensor],
        *,
        flops: int = 0,
        parts: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        """Record an op that reads ``ins`` and writes ``outs``; ``parts`` gives the bytes of tensors that are accessed
        only in part."""


class CountedOps(LayerOps):
    """`LayerOps` that compute nothing and record their cost.

    Parameters
    ----------
    record : RecordOp
        Function that is called for every launch.
    """

    def __init__(self, record: RecordOp) -> None:
        self._record = record

    def residual_norm_modulate(self, x: Tensor, *given: Any, fp8: bool) -> tuple[Tensor, Rows]:
        """Count the cost of this op and of the others of `rows` that add to ``x`` before a norm; ``given`` are their
        further arguments."""
        return self._rows(x, [x, *tensors_of(given)], fp8=fp8, hidden=True)

    gated_residual_norm = residual_norm_modulate  # type: ignore[assignment]
    gated_residual_norm_modulate = residual_norm_modulate  # type: ignore[assignment]

    def gated_residual(self, x: Tensor, *given: Any) -> Tensor:
        """Count the cost of `rows.gated_residual`."""
        hidden = torch.empty_like(x)
        self._record(ROW_KERNEL, [x, *tensors_of(given)], [hidden])
        return hidden

    def qk_norm_rope(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        write_slots: Tensor,
        frame_tokens: int,  # noqa: ARG002 - of the op
        eps: float,  # noqa: ARG002
        k_out: Tensor,
        plain_keys: str = "none",
    ) -> tuple[Tensor, Tensor]:
        """Count the cost of `qk_norm_rope.qk_norm_rope`."""
        shape = (*qkv.shape[:2], *k_out.shape[2:])
        q = torch.empty(shape, dtype=k_out.dtype, device=qkv.device)
        keys = torch.empty((0,) if plain_keys == "none" else shape, dtype=qkv.dtype, device=qkv.device)
        ins = [qkv[..., : 2 * len(q_weight)], q_weight, k_weight, cos, sin, write_slots]
        outs = [q, *([keys] if keys.numel() else [])]
        self._record(ROW_KERNEL, ins, outs, parts=[(k_out, q.numel() * k_out.itemsize)])
        return q, keys

    def qk_norm_rope_shares(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        shares: int,
        eps: float,  # noqa: ARG002 - of the op
        plain_keys: str = "none",
    ) -> Tensor:
        """Count the cost of `qk_norm_rope.qk_norm_rope_shares`."""
        parts = 3 if plain_keys == "none" else 4
        shape = (shares, *qkv.shape[:2], parts, heads // shares, len(q_weight) // heads)
        sent = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        self._record(ROW_KERNEL, [qkv, q_weight, k_weight, cos, sin], [sent])
        return sent

    def fp8_expand(self, *given: Any) -> None:
        """Count the cost of `scratch.fp8_expand`, which reads all cached tokens except the slots of the call's own
        tokens, and writes them in 8 bits."""
        call = signature(fp8_expand).bind(*given).arguments
        k_out, k_out_scale, v_out = (call.pop(name) for name in ("k_out", "k_out_scale", "v_out"))
        cached = k_out.shape[0] * k_out.shape[1]  # of tokens
        for name in ("k_codes", "k_scales", "v_codes", "v_scales"):
            call[name] = call[name][:cached]
        scales = k_out_scale.numel() * k_out_scale.itemsize
        parts = [(k_out, k_out.numel()), (k_out_scale, scales), (v_out, k_out.numel())]
        self._record(FP8_EXPAND, tensors_of(call), [], parts=parts)

    def attention_fp8(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor,
        v_t: Tensor,
        v_scale: Tensor,
        valid_tokens: Tensor,
        own: OwnTokens,
        tiles: AttentionTiles | None = None,  # noqa: ARG002 - of the op
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Count the cost of `attention.attention_fp8` over the whole cache, or over the tiles of lists: the product q
        k^T, then the weighted sum of v."""
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device).flatten(2)
        tokens = k.shape[1]
        ins = [q, k, k_scale, v_t[..., :tokens], v_scale, valid_tokens, *own]
        seen = tokens
        if chosen is not None:
            ins.append(chosen)
            seen = min(tokens, chosen.shape[3] * KEY_TILE)
        self._record(FP8_ATTENTION, ins, [out], flops=4 * q.numel() * (seen + own.k.shape[1]))
        return out

    def choose_past(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor,
        valid_tokens: Tensor,
        write_slots: Tensor,
        layout: PastLayout,
        count: int,
        query_tile: int = QUERY_TILE,
    ) -> Tensor:
        """Count the cost of `sparse_past.choose_past`: sums of queries, sums of keys, their products, and lists."""
        batch, tokens, heads, head_dim = q.shape

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((batch, *shape), dtype=dtype, device=q.device)

        queries = empty(query_tiles(tokens, query_tile), heads, head_dim)
        keys, scores = (
            empty(layout.tiles, heads, head_dim),
            empty(heads, query_tiles(tokens, query_tile), layout.tiles),
        )
        chosen = empty(heads, query_tiles(tokens, query_tile), count, dtype=torch.int32)
        self._record(ROW_KERNEL, [q], [queries])
        self._record(ROW_KERNEL, [k], [keys])
        self._record(ROW_KERNEL, [queries, keys, k_scale, valid_tokens, write_slots], [scores])
        self._record(ROW_KERNEL, [scores], [chosen])
        return chosen

    def attention_bf16(self, q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> Tensor:
        """Count the cost of `attention_bf16.attention_bf16` over the whole cache."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device).flatten(2)
        self._record(BF16_ATTENTION, [q, k, v, valid_tokens], [out], flops=4 * q.numel() * k.shape[1])
        return out

    def has_attention_bf16(self, q: Tensor) -> bool:
        """Whether a Hopper GPU has the kernel."""
        return q.shape[-1] == BF16.head_dim

    def quantise_rows(self, x: Tensor) -> Rows:
        """Count the cost of `rows.quantise_rows`, or of `rows.gelu_quantise`."""
        return self._rows(x, [x], fp8=True)[1]

    gelu_quantise = quantise_rows

    def quantise_row_shares(self, shares: Tensor) -> Rows:
        """Count the cost of `rows.quantise_row_shares`."""
        count, batch, tokens, own = shares.shape
        return self._rows(shares.view(batch, tokens, count * own), [shares], fp8=True)[1]

    def gelu_linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Count the cost of `matmul.gelu_linear`, which is the cost of the linear layer, because GELU is part of the
        same launch."""
        return F.linear(x, weight, bias)

    def fp8_linear(
        self, rows: Rows, weight: Tensor, weight_scale: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Count the cost of `matmul.fp8_linear`."""
        out = torch.empty((*rows.values.shape[:2], weight.shape[0]), dtype=dtype, device=weight.device)
        flops = 2 * rows.values.numel() * weight.shape[0]
        self._record(FP8_MATMUL, [*rows, weight, weight_scale, bias], [out], flops=flops)
        return out

    def _rows(
        self, x: Tensor, ins: Sequence[Tensor], *, fp8: bool, hidden: bool = False
    ) -> tuple[Tensor, Rows]:
        values = torch.empty(x.shape, dtype=FP8 if fp8 else x.dtype, device=x.device)
        scales = (x.shape[0] * x.shape[1], 1) if fp8 else (0,)
        scale = torch.empty(scales, dtype=torch.float32, device=x.device)
        hidden_out = torch.empty_like(x) if hidden else x
        outs = [*([hidden_out] if hidden else []), values, *([scale] if fp8 else [])]
        self._record(ROW_KERNEL, ins, outs)
        return hidden_out, Rows(values, scale)


def tensors_of(tree: object) -> list[Tensor]:
    """Return the tensors of nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
