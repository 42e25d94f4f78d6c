"""Patches of private parts of torch and triton, one patch in each module.

The docstring of each module describes a fault. The `PATCH` of the module fixes the fault, and names the first torch
release without the fault. Tests in `tests/export/patches/` compare that release with the installed torch, and fail if a
patch is no longer needed.
"""

from __future__ import annotations

from seko_export.lowering.patches import (
    container_code,
    descriptor_scratch,
    dtype_rules,
    int_arrays,
    outlined_kernels,
    precompiled_headers,
    saved_environment,
    unasked_gpu,
)

AOTI = (  # patches that apply while a module is compiled to an AOTInductor package
    precompiled_headers.PATCH,
    descriptor_scratch.PATCH,
    int_arrays.PATCH,
    container_code.PATCH,
    dtype_rules.PATCH,
    outlined_kernels.PATCH,
)
CACHE = (  # patches that apply while torch.compile fills the cache that an artifact ships
    precompiled_headers.PATCH,
    saved_environment.PATCH,
)
IMPORTS = (unasked_gpu.PATCH,)  # patches that apply while a fork server imports the compilers
