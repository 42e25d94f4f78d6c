"""Cost-model stand-ins for the ops on few rows: each records one launch and returns an empty tensor.

The stand-ins replace `few_row_ops.FewRowOps` while `op_count` counts. A linear layer with more rows than Seko's kernels
take runs as torch's op, and is counted as torch's op. A separate launch before such a linear layer converts weights in
e4m3.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.families.layers.few_row_ops import FewRowOps
from seko_export.roofline.kinds import (
    CONVERSION,
    FEW_ROW_FP8_PRODUCT,
    FEW_ROW_PRODUCT,
    LOCAL_ATTENTION,
    TOKEN_ATTENTION,
)
from seko_export.roofline.op_count_fused import RecordOp
from seko_kernels import few_rows_reference as reference
from seko_kernels.few_rows import TICKETS, Weight
from seko_kernels.few_tokens import QuantisedCache
from seko_kernels.tuned_rows import MOST_ROWS


class CountedFewRowOps(FewRowOps):
    """`FewRowOps` that compute nothing and record their cost.

    Parameters
    ----------
    record : RecordOp
        Function that is called for every launch.
    """

    def __init__(self, record: RecordOp) -> None:
        self._record = record

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        """Count the cost of `few_rows.norm_linear`."""
        tickets = torch.empty(TICKETS, dtype=torch.int32, device=x.device)
        if _is_few(x):
            return self._product([x, norm_weight], weight, weight.values.shape[0]), tickets
        return self._linear(reference.rms_norm(x, norm_weight, eps), weight), tickets

    def norm_gated_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, *_: Tensor
    ) -> Tensor:
        """Count the cost of `few_rows.norm_gated_linear`."""
        if _is_few(x):
            return self._product([x, norm_weight], weight, weight.values.shape[0] // 2)
        return reference.gated(self._linear(reference.rms_norm(x, norm_weight, eps), weight))

    def linear_added(self, x: Tensor, weight: Weight, hidden: Tensor, scale: float, *_: Tensor) -> Tensor:
        """Count the cost of `few_rows.linear_added`."""
        if _is_few(x):
            return self._product([x, hidden], weight, hidden.shape[-1])
        return reference.added(hidden, self._linear(x, weight), scale)

    def local_attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
        """Count the cost of `few_tokens.local_attention`."""
        width = qkv.shape[-1] // (heads + 2 * kv_heads) * heads
        out = torch.empty((*qkv.shape[:-1], width), dtype=qkv.dtype, device=qkv.device)
        self._record(LOCAL_ATTENTION, [qkv, cos, sin], [out], flops=4 * out.numel() * qkv.shape[1])
        return out

    def decode_attention(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        *_: Tensor,
    ) -> Tensor:
        """Count the cost of `few_tokens.decode_attention` without reading the cache: the number of cached tokens that
        are read differs between rows."""
        return self._of_tokens(qkv, cos, sin, k_cache, v_cache, k_cache.shape[1] * k_cache.shape[2])

    def quantised_decode_attention(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        keys: QuantisedCache,
        values: QuantisedCache,
        *_: Tensor,
    ) -> Tensor:
        """Count the cost of `few_tokens.quantised_decode_attention`, as of `decode_attention`."""
        width = keys.codes.shape[1] * keys.codes.shape[2] * 8 // keys.form.code_bits
        return self._of_tokens(qkv, cos, sin, keys.codes, values.codes, width)

    def write(self, cache: QuantisedCache, x: Tensor, index: Tensor) -> None:
        """Count the cost of `QuantisedCache.write`."""
        tokens = len(x)
        parts = [(stored, tokens * stored[0].numel() * stored.itemsize) for stored in cache[1:]]
        self._record(TOKEN_ATTENTION, [x, index], [], parts=parts)

    def _of_tokens(
        self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, k: Tensor, v: Tensor, kv_width: int
    ) -> Tensor:
        out = torch.empty((len(qkv), qkv.shape[1] - 2 * kv_width), dtype=qkv.dtype, device=qkv.device)
        tables = [table for table in (cos, sin) if table is not None]
        parts = [(cache, len(qkv) * prod(cache.shape[1:]) * cache.itemsize) for cache in (k, v)]
        self._record(TOKEN_ATTENTION, [qkv, *tables], [out], parts=parts)
        return out

    def _linear(self, x: Tensor, weight: Weight) -> Tensor:
        values = weight.values
        if weight.scale is not None:
            values = torch.empty(values.shape, dtype=x.dtype, device=x.device)
            self._record(CONVERSION, [weight.values, weight.scale], [values])
        return F.linear(x, values)

    def _product(self, ins: list[Tensor], weight: Weight, width: int) -> Tensor:
        x = ins[0]
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
        scales = [] if weight.scale is None else [weight.scale]
        rows = x.numel() // x.shape[-1]
        flops = 2 * rows * weight.values.numel()
        kind = FEW_ROW_FP8_PRODUCT if scales else FEW_ROW_PRODUCT
        self._record(kind, [*ins, weight.values, *scales], [out], flops=flops)
        return out


def _is_few(x: Tensor) -> bool:
    """Return whether a kernel of few rows computes a linear layer; the GPU's table is taken to have all its sizes."""
    return x.numel() // x.shape[-1] <= MOST_ROWS
