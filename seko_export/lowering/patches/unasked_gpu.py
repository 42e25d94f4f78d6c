"""A patch with which torch's compiler is imported without a question to the GPU's driver.

`torch._inductor` asks whether there is a GPU when it is imported, to choose how kernels are timed. The children of a
process that has asked the driver cannot use the GPU, so a fork server must not ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from seko_export.lowering.patches.patch import Patch, replaced


@contextmanager
def gpu_taken_for_granted() -> Iterator[None]:
    """Context manager in which a torch that is made for GPUs says that there is one."""
    with replaced(torch.cuda, is_available=torch.backends.cuda.is_built):
        yield


PATCH = Patch(gpu_taken_for_granted, mended_in=(2, 13))
