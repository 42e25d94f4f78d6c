"""Patches of private parts of torch and triton, one a module.

A module's docstring gives the fault. Its `PATCH` mends it, and gives the torch that has no such fault. Tests in
`tests/export/patches/` compare that with the installed torch: a patch that is no longer needed fails them.
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
)

AOTI = (  # while a module becomes an AOTInductor package
    precompiled_headers.PATCH,
    descriptor_scratch.PATCH,
    int_arrays.PATCH,
    container_code.PATCH,
    dtype_rules.PATCH,
    outlined_kernels.PATCH,
)
CACHE = (  # while torch.compile fills the cache that an artifact ships
    precompiled_headers.PATCH,
    saved_environment.PATCH,
)
