"""A patch for the memory of tensor descriptors of Triton kernels in AOTInductor engines (torch 2.11; fixed in 2.13).

A kernel that makes tensor descriptors on the device writes the descriptors to global memory. Each Triton program writes
to its own part of this memory. The C++ that torch 2.11 generates allocates the part of one program only, and the other
programs write out of bounds (pytorch/pytorch#175385). Small grids stay within the allocator's rounding, but a full-size
engine gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seko_export.errors import LoweringError
from seko_export.lowering.patches.patch import Patch, replaced

GRID = "grid_0 * grid_1 * grid_2"  # name of the scratch size in the C++ code around a launch


@contextmanager
def scratch_of_the_whole_grid() -> Iterator[None]:
    """Context manager in which compiled engines allocate scratch memory for every program of a launch.

    Raises
    ------
    LoweringError
        While compiling, if torch does not allocate enough memory itself, and generates code that the patch cannot
        change.
    """
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    known = CUDADeviceOpOverrides.cpp_scratch

    def cpp_scratch(
        self: CUDADeviceOpOverrides, idx: int, workspace: Any, prefix: str | None = None
    ) -> tuple[list[str], str] | None:
        scratch = known(self, idx, workspace, prefix)
        return (
            scratch
            if scratch is None or workspace.size == 0
            else (_scaled(scratch[0], workspace.size), scratch[1])
        )

    with replaced(CUDADeviceOpOverrides, cpp_scratch=cpp_scratch):
        yield


def _scaled(lines: list[str], size: int) -> list[str]:
    """Replace C++ lines that allocate ``size`` bytes by lines that allocate ``size`` bytes for each program of the
    grid."""
    if any(GRID in line for line in lines):
        return lines
    size_of_one = f"_size[] = {{{size}}};"
    if sum(size_of_one in line for line in lines) != 1:
        raise LoweringError(
            f"this torch allocates descriptor scratch in an unknown way ({lines[0]!r}): engines could write beyond it"
        )
    every = f"_size[] = {{static_cast<int64_t>({size}) * {GRID}}};"
    return [line.replace(size_of_one, every) for line in lines]


PATCH = Patch(scratch_of_the_whole_grid, mended_in=(2, 13))
