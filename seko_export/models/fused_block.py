"""One transformer layer in kernels of ours: `causal_dit.Block` with fewer launches, and attention in fp8.

The past is expanded from its lossy cache straight to an fp8 scratch, the chunk's own keys and values are put into
their places there without going through the format (docs/adr/0004), and one kernel attends to both. The scratch is
made in each call and let go behind it, so all layers share one; attention reads how far it is filled on the device, so
full and filling rows share one engine.

Shapes as in `causal_dit`. Where there is no GPU each op is its reference in plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seko_export.config import ModelConfig, StreamConfig
from seko_export.models.causal_dit import BlockWeights, attention, rms_norm, rows_of
from seko_kernels.attention import attention_fp8, v_columns
from seko_kernels.fused_reference import FP8
from seko_kernels.kv_formats import KvFormat
from seko_kernels.matmul import fp8_linear
from seko_kernels.qk_norm_rope import qk_norm_rope
from seko_kernels.rows import (
    Modulation,
    Rows,
    gated_residual,
    gated_residual_norm,
    gelu_quantise,
    norm_modulate,
    quantise_rows,
    residual_norm_modulate,
)
from seko_kernels.scratch import KeyRotation, fp8_expand, v_transpose

# Rows of a layer's modulation.
SHIFT_1, SCALE_1, GATE_1, SHIFT_2, SCALE_2, GATE_2 = range(6)


class LayerOps:
    """The ops of a layer; `op_count` puts others in their place, which take down what these would cost."""

    norm_modulate = staticmethod(norm_modulate)
    gated_residual_norm = staticmethod(gated_residual_norm)
    residual_norm_modulate = staticmethod(residual_norm_modulate)
    gated_residual = staticmethod(gated_residual)
    qk_norm_rope = staticmethod(qk_norm_rope)
    v_transpose = staticmethod(v_transpose)
    fp8_expand = staticmethod(fp8_expand)
    attention_fp8 = staticmethod(attention_fp8)
    quantise_rows = staticmethod(quantise_rows)
    gelu_quantise = staticmethod(gelu_quantise)
    fp8_linear = staticmethod(fp8_linear)


class Fp8Linear(nn.Module):
    """Weights of a matmul in fp8: e4m3 with a scale an output channel. What it takes is quantised before, by rows."""

    def __init__(self, inner: int, outer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight_fp8 = nn.Parameter(torch.empty(outer, inner, dtype=FP8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(outer, 1))
        self.bias = nn.Parameter(torch.empty(outer, dtype=dtype))


class FusedBlock(BlockWeights):
    """One transformer layer over an NVFP4 cache.

    Parameters
    ----------
    writes : bool
        Whether the layer writes its keys and values to the cache: the context pass alone does, since nobody reads
        what a denoise pass would write.
    fp8 : bool
        Whether weights and activations of its matmuls are fp8; the text's keys and values are not of the layer.
    """

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        kv: KvFormat,
        dtype: torch.dtype,
        *,
        writes: bool,
        fp8: bool = False,
    ) -> None:
        super().__init__(model, stream, kv, dtype)
        self.writes, self.fp8 = writes, fp8
        self.ops = LayerOps()
        if fp8:
            d, inner = model.dim, model.ffn_dim
            self.self_attn.qkv, self.self_attn.o = Fp8Linear(d, 3 * d, dtype), Fp8Linear(d, d, dtype)
            self.cross_attn.q, self.cross_attn.o = Fp8Linear(d, d, dtype), Fp8Linear(d, d, dtype)
            self.ffn[0], self.ffn[2] = Fp8Linear(d, inner, dtype), Fp8Linear(inner, d, dtype)

    def forward(
        self,
        hidden: Tensor,
        modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        write_slots: Tensor,
        valid_tokens: Tensor,
        text_k: Tensor,
        text_v: Tensor,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        token_index: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Advance the hidden state by one layer; with `writes` put this layer's K and V into the cache.

        Parameters
        ----------
        hidden, modulation, cos, sin : Tensor
            From `Embed`.
        write_slots : Tensor
            [B, F] int64, the ring slot of each latent frame of the chunk, in its own row's cache.
        valid_tokens, text_k, text_v, caches, places, rows : Tensor or mapping
            As `Block` takes them.
        scales : Mapping[str, Tensor]
            The cache format's constants, and those that `scratch.scratch_scales` names.
        token_index : Tensor, optional
            [B*T] int64 from `Embed`, with `writes` alone.

        Returns
        -------
        Tensor
            [B, T, d], the next hidden state.
        """
        ops, eps, dtype = self.ops, self.model.norm_eps, hidden.dtype
        turns = Modulation(modulation, self.modulation.squeeze(0))

        x = ops.norm_modulate(hidden, turns, SHIFT_1, SCALE_1, eps, fp8=self.fp8)
        qkv = self._matmul(self.self_attn.qkv, x, dtype)  # [B, T, 3*d]
        window = caches  # of the call's rows
        if rows is not None:
            window = {name: rows_of(cache, rows, self.stream.cache_tokens) for name, cache in caches.items()}
            text_k, text_v = text_k.index_select(0, rows), text_v.index_select(0, rows)
        y, keys = self._attend(qkv, cos, sin, write_slots, valid_tokens, window, scales, places)
        if token_index is not None:
            values = self.split_heads(qkv.chunk(3, dim=-1)[2])
            self.kv.write(caches, scales, token_index, keys.flatten(0, 1), values.flatten(0, 1))
        y = self._matmul(self.self_attn.o, self._as_rows(y.to(dtype)), dtype)
        hidden, x = ops.gated_residual_norm(
            hidden, y, turns, GATE_1, self.norm3.weight, self.norm3.bias, eps, fp8=self.fp8
        )

        q = rms_norm(self._matmul(self.cross_attn.q, x, dtype), self.cross_attn.norm_q)
        y = attention(self.split_heads(q).to(dtype), text_k, text_v, bias=None)
        y = self._matmul(self.cross_attn.o, self._as_rows(y), dtype)
        hidden, x = ops.residual_norm_modulate(hidden, y, turns, SHIFT_2, SCALE_2, eps, fp8=self.fp8)

        inner = self._matmul(self.ffn[0], x, dtype)
        x = ops.gelu_quantise(inner) if self.fp8 else _plain_rows(self.ffn[1](inner))
        return ops.gated_residual(hidden, self._matmul(self.ffn[2], x, dtype), turns, GATE_2)

    def _matmul(self, layer: nn.Module, x: Rows, dtype: torch.dtype) -> Tensor:
        """Return [B, T, out] of `dtype`."""
        if isinstance(layer, Fp8Linear):
            return self.ops.fp8_linear(x, layer.weight_fp8, layer.weight_scale, layer.bias, dtype)
        y: Tensor = layer(x.values)
        return y

    def _as_rows(self, x: Tensor) -> Rows:
        return self.ops.quantise_rows(x) if self.fp8 else _plain_rows(x)

    def _attend(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        write_slots: Tensor,
        valid_tokens: Tensor,
        window: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return what attention gives, [B, T, d] bfloat16, and with `writes` the keys before RoPE, [B, T, H, D]."""
        ops, s, heads, head_dim = self.ops, self.stream, self.model.heads, self.model.head_dim
        batch, tokens, n = qkv.shape[0], s.cache_tokens, s.frame_tokens
        k_out = torch.empty((batch, tokens, heads, head_dim), dtype=FP8, device=qkv.device)
        v_out = torch.empty((batch, heads, head_dim, v_columns(tokens)), dtype=FP8, device=qkv.device)
        q_scale, k_scale, v_scale = (scales[f"{name}_fp8_scale"] for name in "qkv")
        q, keys = ops.qk_norm_rope(
            qkv,
            self.self_attn.norm_q.weight,
            self.self_attn.norm_k.weight,
            cos,
            sin,
            write_slots,
            q_scale,
            k_scale,
            n,
            self.model.norm_eps,
            k_out,
            "before_rope" if self.writes else "none",
        )
        ops.v_transpose(qkv.chunk(3, dim=-1)[2], write_slots, v_scale, n, v_out)
        ops.fp8_expand(
            window["k_codes"],
            window["k_scales"],
            scales["k_global_scale"],
            window["v_codes"],
            window["v_scales"],
            scales["v_global_scale"],
            k_scale,
            v_scale,
            write_slots,
            valid_tokens,
            n,
            k_out,
            v_out,
            KeyRotation(scales["k_mean"], places["slot_rotary"], places["patch_rotary"]),
        )
        return ops.attention_fp8(q, k_out, v_out, q_scale, k_scale, v_scale, valid_tokens), keys


def _plain_rows(x: Tensor) -> Rows:
    return Rows(x, x.new_empty(0, dtype=torch.float32))
