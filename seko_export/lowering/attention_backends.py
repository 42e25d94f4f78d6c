"""The order in which torch tries its implementations of attention."""

from __future__ import annotations

import contextlib

from torch.nn.attention import SDPBackend, sdpa_kernel

# One is chosen when an engine is compiled. Torch's default order would select FlashAttention-2, which reaches
# 312 TFLOP/s on an H200, where cuDNN reaches 519; FlashAttention supports no bias. The last is for attention that no
# other supports: a head of the VAE may have 384 channels.
CUDA_ATTENTION = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def attention_backends(device: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that fixes which attention implementations torch tries first on a GPU. On a CPU the
    context manager does nothing.
    """
    if device != "cuda":
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = sdpa_kernel(list(CUDA_ATTENTION), set_priority=True)
    return context
