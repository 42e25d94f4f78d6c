"""The ops of fused transformer layers, as methods of a class that the cost model can replace."""

from __future__ import annotations

from torch import Tensor

from seko_kernels.attention import attention_fp8
from seko_kernels.attention_bf16 import attention_bf16, no_kernel
from seko_kernels.matmul import fp8_linear, gelu_linear
from seko_kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_shares
from seko_kernels.rows import (
    gated_residual,
    gated_residual_norm,
    gated_residual_norm_modulate,
    gelu_quantise,
    quantise_row_shares,
    quantise_rows,
    residual_norm_modulate,
)
from seko_kernels.scratch import fp8_expand
from seko_kernels.sparse_past import choose_past


class LayerOps:
    """The ops of a fused transformer layer. `op_count` replaces the ops by stand-ins that record each op's cost."""

    gated_residual_norm = staticmethod(gated_residual_norm)
    residual_norm_modulate = staticmethod(residual_norm_modulate)
    gated_residual = staticmethod(gated_residual)
    gated_residual_norm_modulate = staticmethod(gated_residual_norm_modulate)
    qk_norm_rope = staticmethod(qk_norm_rope)
    qk_norm_rope_shares = staticmethod(qk_norm_rope_shares)
    fp8_expand = staticmethod(fp8_expand)
    attention_fp8 = staticmethod(attention_fp8)
    choose_past = staticmethod(choose_past)
    attention_bf16 = staticmethod(attention_bf16)
    quantise_rows = staticmethod(quantise_rows)
    quantise_row_shares = staticmethod(quantise_row_shares)
    gelu_quantise = staticmethod(gelu_quantise)
    gelu_linear = staticmethod(gelu_linear)
    fp8_linear = staticmethod(fp8_linear)

    def has_attention_bf16(self, q: Tensor) -> bool:
        """Whether `attention_bf16` has a kernel for the queries ``q`` [B, T, H, D] where they lie."""
        return q.is_cuda and no_kernel(q) is None
