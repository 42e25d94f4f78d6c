"""Functions for builds whose processes share the memory of one GPU: they recognise errors about too little GPU memory,
and release GPU memory that torch keeps."""

from __future__ import annotations

import gc
import sys

_SHORT = ("out of memory", "alloc_failed")  # of torch, CUDA, Triton; of cuBLAS and cuDNN


def lacks_gpu_memory(fault: Exception) -> bool:
    """Return whether an exception says that the GPU had too little free memory. Compilers and the runtime wrap torch's
    exceptions, so the message decides."""
    message = str(fault).lower()
    return type(fault).__name__ == "OutOfMemoryError" or any(words in message for words in _SHORT)


def release_gpu_memory() -> None:
    """Release the GPU memory that torch keeps for later tensors of this process, if the process uses a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()  # of exceptions whose tracebacks hold tensors
        torch.cuda.empty_cache()
