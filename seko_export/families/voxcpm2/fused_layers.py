"""The transformer layers of `layers.py` with Seko's own kernels: five launches for each layer if a call has few rows. A
fused layer has the same weights, and up to rounding the same results, as the corresponding layer of `layers.py`.

In a step, a fused layer reads a row's cached tokens in place and needs no read length, so one engine serves any number
of cached tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seko_export.families.layers.few_row_ops import FewRowOps
from seko_export.families.voxcpm2.config import NetConfig
from seko_export.families.voxcpm2.layers import Fp8Weight, Layer, rotary
from seko_kernels.few_rows import Weight
from seko_kernels.few_rows_reference import rotate, split_heads
from seko_kernels.few_tokens import QuantisedCache
from seko_kernels.formats import NumberFormat


class FusedLayer(Layer):
    """Base class of the fused layers; subclasses add the attention."""

    def __init__(self, net: NetConfig, dtype: torch.dtype, *, fp8: bool = False) -> None:
        super().__init__(net, dtype, fp8=fp8)
        self.ops = FewRowOps()

    def fused_qkv(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return q, k and v as one tensor [..., (H + 2K)*D] before rotation, and the layer's tickets (counters that
        kernels use to wait for each other)."""
        norm = self.input_layernorm
        return self.ops.norm_linear(hidden, norm.weight, norm.eps, _weight(self.self_attn.qkv_proj))

    def fused_rest(self, hidden: Tensor, attended: Tensor, tickets: Tensor) -> Tensor:
        """Return the layer's output [..., d] from the layer's input and the result of its attention [..., H*D]."""
        norm, scale, mlp = self.post_attention_layernorm, self.net.branch_scale, self.mlp
        hidden = self.ops.linear_added(attended, _weight(self.self_attn.o_proj), hidden, scale, tickets)
        inner = self.ops.norm_gated_linear(hidden, norm.weight, norm.eps, _weight(mlp.gate_up_proj), tickets)
        return self.ops.linear_added(inner, _weight(mlp.down_proj), hidden, scale, tickets)


class FusedLocalLayer(FusedLayer):
    """The layer `LocalLayer` with Seko's own kernels."""

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output [B, T, d] for ``hidden`` [B, T, d] and rotary tables [T, D] float32."""
        qkv, tickets = self.fused_qkv(hidden)
        attended = self.ops.local_attention(qkv, cos, sin, self.net.heads, self.net.kv_heads)
        return self.fused_rest(hidden, attended, tickets)


class FusedStepLayer(FusedLayer):
    """The layer `CachedLayer` for one token a row, with Seko's own kernels."""

    def forward(
        self,
        hidden: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        starts: Tensor,
        first: Tensor,
        write_index: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output [B, 1, d], and write the token's key and value to the cache.

        Parameters
        ----------
        hidden : Tensor
            The hidden state of one token a row, [B, 1, d].
        k_cache, v_cache : Tensor
            Keys and values of S cache places, [S, K, D]; written in place.
        starts, first : Tensor
            First cache place of each row, and position of the row's token, int64 [B]; see `Positions`.
        write_index, cos, sin : Tensor
            The results of `StepPositions` with the same names; ``cos`` and ``sin`` are None for a transformer without
            positions.
        """
        qkv, tickets = self.fused_qkv(hidden)
        cos, sin = (None if table is None else table.flatten(0, 1) for table in (cos, sin))
        attended = self.ops.decode_attention(
            qkv.flatten(0, 1), cos, sin, k_cache, v_cache, starts, first, write_index, tickets
        )
        return self.fused_rest(hidden, attended.unflatten(0, (-1, 1)), tickets)


class FusedQuantisedStepLayer(FusedLayer):
    """The layer `QuantisedCachedLayer` for one token a row, with Seko's own kernels; ``form`` is the number format of
    keys and values.
    """

    def __init__(self, net: NetConfig, dtype: torch.dtype, *, form: NumberFormat, fp8: bool = False) -> None:
        super().__init__(net, dtype, fp8=fp8)
        self.form = form

    def forward(
        self,
        hidden: Tensor,
        k_codes: Tensor,
        k_scales: Tensor,
        v_codes: Tensor,
        v_scales: Tensor,
        starts: Tensor,
        first: Tensor,
        write_index: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output [B, 1, d]; the arguments are those of `FusedStepLayer.forward`, with caches as in
        `QuantisedCache`.
        """
        net = self.net
        qkv, tickets = self.fused_qkv(hidden)
        _, k, v = split_heads(qkv, net.heads, net.kv_heads)
        keys, values = (
            QuantisedCache(self.form, k_codes, k_scales),
            QuantisedCache(self.form, v_codes, v_scales),
        )
        rotated = k if cos is None or sin is None else rotate(k, cos, sin)
        self.ops.write(keys, rotated.flatten(0, 1), write_index)
        self.ops.write(values, v.flatten(0, 1), write_index)
        cos, sin = (None if table is None else table.flatten(0, 1) for table in (cos, sin))
        attended = self.ops.quantised_decode_attention(
            qkv.flatten(0, 1), cos, sin, keys, values, starts, first, tickets
        )
        return self.fused_rest(hidden, attended.unflatten(0, (-1, 1)), tickets)


class StepPositions(nn.Module):
    """The module `Positions` for one token a row, for layers that read the cache in place.

    Parameters
    ----------
    amplitude : float
        Factor by which cosines and sines are multiplied; see `LongRope.amplitude`.
    """

    def __init__(self, amplitude: float) -> None:
        super().__init__()
        self.amplitude = amplitude

    def forward(
        self, starts: Tensor, first: Tensor, inverse_factors: Tensor, frequencies: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cache place of each row's token, [B] int64, and its rotary tables (cosines and sines) [B, 1, D]
        float32.

        `Positions.forward` documents the parameters.
        """
        angles = first[:, None, None].to(torch.float32) * inverse_factors * frequencies
        return starts + first, *rotary(angles, self.amplitude)


def _weight(linear: nn.Module) -> Weight:
    if isinstance(linear, Fp8Weight):
        return Weight(linear.weight_fp8, linear.weight_scale)
    assert isinstance(linear, nn.Linear)
    return Weight(linear.weight)
