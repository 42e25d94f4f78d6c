"""A patch that puts Gluon kernels into AOTInductor engines.

Torch's compiler copies a Triton kernel's source to a file and compiles this file, but does not support Gluon. The
exporter therefore passes an outline to the compiler: a Triton kernel with the same parameters, reads and writes as the
Gluon kernel. When torch compiles the outline, the patch compiles the Gluon kernel instead, with the same signature,
constants and alignments. The package of the engine then contains and launches the Gluon kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

from seko_export.errors import LoweringError
from seko_export.lowering.patches.patch import Patch, replaced
from seko_kernels.outlines import TWINS, gluon_twin

# Sources of outlines whose Gluon kernels this process has compiled. Torch caches compiled kernels and does not
# compile them again.
_COMPILED: set[str] = set()


@contextmanager
def gluon_behind_outlines() -> Iterator[None]:
    """Context manager in which a request to compile an outline (a stand-in Triton kernel) compiles the Gluon kernel
    instead.

    Raises
    ------
    LoweringError
        While compiling, if an outline itself would be compiled.
    """
    from torch._inductor.async_compile import AsyncCompile

    known_compile, known_triton = triton.compile, AsyncCompile.triton

    def compile_twin(source: Any, *rest: Any, **more: Any) -> Any:
        twin = gluon_twin(source)
        compiled = known_compile(source if twin is None else twin, *rest, **more)
        twins.append(twin is not None)
        return compiled

    def compile_here(self: AsyncCompile, kernel_name: str, source_code: str, *rest: Any, **more: Any) -> Any:
        shown = [name for name in TWINS if name in source_code]
        if not shown:
            return known_triton(self, kernel_name, source_code, *rest, **more)
        # torch's pool of compile processes does not know the Gluon kernels
        with replaced(AsyncCompile, use_process_pool=classmethod(lambda _: False)):
            twins.clear()
            result = known_triton(self, kernel_name, source_code, *rest, **more)
        if not all(twins or [source_code in _COMPILED]):
            raise LoweringError(
                f"this torch compiles {shown[0]} in an unknown way: the engine would compute nothing"
            )
        _COMPILED.add(source_code)
        return result

    twins: list[bool] = []
    with replaced(triton, compile=compile_twin), replaced(AsyncCompile, triton=compile_here):
        yield


PATCH = Patch(gluon_behind_outlines)
