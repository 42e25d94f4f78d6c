"""A patch with which AOTInductor engines launch a kernel before the previous launch has ended.

On sm_90 and later a launch may carry an attribute with which it begins early; the kernel itself then waits for the
previous launch. A chain of kernels of 5 us each takes a fifth less time with the attribute. The compiler's host code
cannot set it. The patch changes two functions of the compiler: the function that loads a kernel notes, by their names,
the kernels that wait; the function that launches sets the attribute for these kernels. A kernel that does not wait must
not begin early. CUDA graphs keep the attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from seko_export.lowering.patches.patch import Patch
from seko_kernels.few_rows import EARLY_KERNELS

_CALL = re.compile(
    r"CUDA_DRIVER_CHECK\(cuLaunchKernel\(\s*func, gridX, gridY, gridZ, 32\*numWarps, 1, 1, sharedMemBytes, stream, "
    r"args, nullptr\s*\)\);"
)
_LOADER, _LOADED = "static inline CUfunction loadKernel(", "return func;"
_KNOWN = """static std::vector<CUfunction> earlyKernels;

            static inline CUfunction noted(CUfunction func, const std::string &funcName) {{
                if ({condition}) {{
                    earlyKernels.push_back(func);
                }}
                return func;
            }}

            """
_EARLY = """for (CUfunction known : earlyKernels) {
                    if (known != func) {
                        continue;
                    }
                    CUlaunchAttribute early = {};
                    early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                    early.value.programmaticStreamSerializationAllowed = 1;
                    CUlaunchConfig config = {};
                    config.gridDimX = gridX;
                    config.gridDimY = gridY;
                    config.gridDimZ = gridZ;
                    config.blockDimX = 32*numWarps;
                    config.blockDimY = 1;
                    config.blockDimZ = 1;
                    config.sharedMemBytes = sharedMemBytes;
                    config.hStream = stream;
                    config.attrs = &early;
                    config.numAttrs = 1;
                    CUDA_DRIVER_CHECK(cuLaunchKernelEx(&config, func, args, nullptr));
                    return;
                }
                """


@contextmanager
def early_where_kernels_wait() -> Iterator[None]:
    """Context manager in which engines launch the kernels `EARLY_KERNELS` before the previous launch has ended."""
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    known = CUDADeviceOpOverrides.kernel_driver

    def kernel_driver(self: CUDADeviceOpOverrides) -> str:
        return with_early_launches(known(self))

    CUDADeviceOpOverrides.kernel_driver = kernel_driver  # type: ignore[method-assign]
    try:
        yield
    finally:
        CUDADeviceOpOverrides.kernel_driver = known  # type: ignore[method-assign]


def with_early_launches(source: str) -> str:
    """Return the compiler's host code that launches kernels, with the attribute for early launches in it.

    Host code that the patch does not know is not changed: kernels then begin one after another, with the same results.
    A test checks that the installed torch generates host code that the patch knows.
    """
    found = _CALL.findall(source)
    if len(found) != 1 or not 1 <= source.count(_LOADER) == source.count(_LOADED):
        return source
    named = 'funcName.find("{}") != std::string::npos'  # torch may number kernels
    condition = " || ".join(named.format(name) for name in EARLY_KERNELS)
    source = source.replace(_LOADED, "return noted(func, funcName);").replace(found[0], _EARLY + found[0])
    return source.replace(_LOADER, _KNOWN.format(condition=condition) + _LOADER, 1)


PATCH = Patch(early_where_kernels_wait)
