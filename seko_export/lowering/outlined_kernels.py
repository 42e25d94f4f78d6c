"""Gluon kernels in AOTInductor engines, which torch's compiler knows by an outline alone.

Torch's compiler copies a Triton kernel's source into a file of its own and compiles it there; it knows nothing of
Gluon. So it is given an outline: a Triton kernel with the same parameters, which reads what the kernel reads and writes
what it writes. When that is compiled, the Gluon kernel is, with the same signature, constants and alignments. What goes
into the package and how it is launched comes from the compiled kernel, so nothing else has to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

from seko_export.errors import LoweringError
from seko_kernels.outlines import TWINS, gluon_twin

# Sources of this process whose twins were compiled. Torch keeps what it compiled and does not compile it again.
_COMPILED: set[str] = set()


@contextmanager
def gluon_behind_outlines() -> Iterator[None]:
    """While entered, what is compiled of an outline is its Gluon kernel.

    Raises
    ------
    LoweringError
        While compiling, if an outline would be compiled as it is.
    """
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile  # whose methods are replaced
    known_compile, known_triton = triton.compile, compiler.triton
    pooled = compiler.__dict__["use_process_pool"]

    def compile_twin(source: Any, *rest: Any, **more: Any) -> Any:
        twin = gluon_twin(source)
        compiled = known_compile(source if twin is None else twin, *rest, **more)
        seen.append(twin is not None)
        return compiled

    def compile_here(self: AsyncCompile, kernel_name: str, source_code: str, *rest: Any, **more: Any) -> Any:
        shown = [name for name in TWINS if name in source_code]
        if not shown:
            return known_triton(self, kernel_name, source_code, *rest, **more)
        compiler.use_process_pool = classmethod(lambda _: False)  # a process of the pool knows no twins
        seen.clear()
        try:
            made = known_triton(self, kernel_name, source_code, *rest, **more)
        finally:
            compiler.use_process_pool = pooled
        if not all(seen or [source_code in _COMPILED]):
            raise LoweringError(
                f"this torch compiles {shown[0]} in an unknown way: the engine would compute nothing"
            )
        _COMPILED.add(source_code)
        return made

    seen: list[bool] = []
    triton.compile = compile_twin
    compiler.triton = compile_here
    try:
        yield
    finally:
        triton.compile = known_compile
        compiler.triton = known_triton
