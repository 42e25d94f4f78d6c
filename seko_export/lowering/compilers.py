"""All that a process imports to compile AOTInductor engines. The server that worker processes are forked from imports
this module: the imports take 3 s of processor time, and 10 s where there is no bytecode."""

from __future__ import annotations

import seko_export.lowering.agree
import seko_export.lowering.package
import seko_export.lowering.trace  # noqa: F401
from seko_export.lowering import patches
from seko_export.lowering.patches.patch import applied

with applied(*patches.IMPORTS):
    import torch._dynamo
    import torch._inductor.codegen.cpp_wrapper_gpu
    import torch._inductor.codegen.cuda_combined_scheduling
    import torch._inductor.compile_fx
    import torch._inductor.package
    import torch.export._trace  # noqa: F401
