"""Early launches: this torch's host code is known, and other code is left alone."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from seko_export.lowering.patches.early_launches import PATCH, with_early_launches
from seko_export.lowering.patches.patch import applied
from seko_kernels.few_rows import EARLY_KERNELS
from seko_kernels.triton import few_rows, few_tokens


def host_code() -> str:
    return CUDADeviceOpOverrides().kernel_driver()


@pytest.mark.skipif(torch.version.hip is not None, reason="another host code")
def test_this_torch_launches_kernels_by_the_code_that_is_replaced():
    known = host_code()
    with applied(PATCH):
        patched = host_code()
    assert host_code() == known
    assert "PROGRAMMATIC" not in known
    assert patched.count("cuLaunchKernelEx") == 1
    assert patched.count("cuLaunchKernel(") == known.count("cuLaunchKernel(") == 1
    assert all(f'"{name}"' in patched for name in EARLY_KERNELS)
    assert patched.count("noted(func, funcName)") == known.count("return func;") == 2


def test_kernels_have_the_names_by_which_they_are_known():
    kernels = {**vars(few_rows), **vars(few_tokens)}
    assert all(kernels[name].fn.__name__ == name for name in EARLY_KERNELS)


def test_unknown_host_code_stays_as_it_is():
    assert with_early_launches("cuLaunchKernel(func, 1, 1, 1);") == "cuLaunchKernel(func, 1, 1, 1);"
