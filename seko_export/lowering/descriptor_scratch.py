"""Memory for the tensor descriptors of Triton kernels in AOTInductor engines: as much as the whole grid writes.

A kernel that makes descriptors on the device writes them to global memory, each program into a part of its own. Before
torch 2.12 the compiler's C++ code allocates one program's part, and all others write behind it, into whatever lies
there (pytorch/pytorch#175385): small grids stay within the allocator's rounding, a full-size engine gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seko_export.errors import LoweringError

GRID = "grid_0 * grid_1 * grid_2"  # what the C++ code around a launch calls its size


@contextmanager
def scratch_of_the_whole_grid() -> Iterator[None]:
    """While entered, engines that are compiled allocate scratch for every program of a launch.

    Raises
    ------
    LoweringError
        While compiling, if torch neither does so itself nor writes what is known how to mend.
    """
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    known = CUDADeviceOpOverrides.cpp_scratch

    def cpp_scratch(
        self: CUDADeviceOpOverrides, idx: int, workspace: Any, prefix: str | None = None
    ) -> tuple[list[str], str] | None:
        made = known(self, idx, workspace, prefix)
        return made if made is None or workspace.size == 0 else (_scaled(made[0], workspace.size), made[1])

    CUDADeviceOpOverrides.cpp_scratch = cpp_scratch  # type: ignore[method-assign]
    try:
        yield
    finally:
        CUDADeviceOpOverrides.cpp_scratch = known  # type: ignore[method-assign]


def _scaled(lines: list[str], size: int) -> list[str]:
    """Return the lines of C++ that allocate ``size`` bytes a program with as many as the grid's programs take."""
    if any(GRID in line for line in lines):
        return lines
    one = f"_size[] = {{{size}}};"
    if sum(one in line for line in lines) != 1:
        raise LoweringError(
            f"this torch allocates descriptor scratch in an unknown way ({lines[0]!r}): engines could write beyond it"
        )
    every = f"_size[] = {{static_cast<int64_t>({size}) * {GRID}}};"
    return [line.replace(one, every) for line in lines]
