"""The ops of fused layers on few rows and few tokens, as methods of a class that the cost model can replace."""

from __future__ import annotations

from seko_kernels.few_rows import linear_added, norm_gated_linear, norm_linear
from seko_kernels.few_tokens import (
    QuantisedCache,
    decode_attention,
    local_attention,
    quantised_decode_attention,
)


class FewRowOps:
    """The ops of a fused layer on few rows. `op_count` replaces the ops by stand-ins that record each op's cost."""

    norm_linear = staticmethod(norm_linear)
    norm_gated_linear = staticmethod(norm_gated_linear)
    linear_added = staticmethod(linear_added)
    local_attention = staticmethod(local_attention)
    decode_attention = staticmethod(decode_attention)
    quantised_decode_attention = staticmethod(quantised_decode_attention)
    write = staticmethod(QuantisedCache.write)
