"""Engines allocate descriptor memory for a whole launch, in every torch that this project runs on."""

from __future__ import annotations

import pytest
from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from seko_export.errors import LoweringError
from seko_export.lowering.patches.descriptor_scratch import GRID, PATCH, scratch_of_the_whole_grid

WORKSPACE = TritonScratchWorkspace(768, lambda: "cached_torch_dtype_uint8")
NONE = TritonScratchWorkspace(0, lambda: "cached_torch_dtype_uint8")
WHOLE = "int64_t global_scratch_scratch_7_size[] = {static_cast<int64_t>(768) * grid_0 * grid_1 * grid_2};"


def lines_of(workspace: TritonScratchWorkspace) -> list[str]:
    scratch = CUDADeviceOpOverrides().cpp_scratch(7, workspace, "global_scratch")
    assert scratch is not None
    assert scratch[1] == "global_scratch_scratch_7"
    return scratch[0]


def test_this_torch_needs_it_if_it_allocates_for_one_program() -> None:
    assert PATCH.is_needed() == (GRID not in lines_of(WORKSPACE)[0])


def test_memory_is_allocated_for_the_whole_grid() -> None:
    plain, plain_none = lines_of(WORKSPACE), lines_of(NONE)
    with scratch_of_the_whole_grid():
        mended, none = lines_of(WORKSPACE), lines_of(NONE)
    assert mended[0] == WHOLE
    assert mended[1:] == plain[1:]
    assert none == plain_none
    assert lines_of(WORKSPACE) == plain  # and nothing of it stays


@pytest.mark.parametrize("size", ["768", "static_cast<int64_t>(768) * grid_0 * grid_1 * grid_2"])
def test_both_forms_of_torch_are_known(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    """2.11 allocates for one program, 2.13 for all."""
    lines = [f"int64_t global_scratch_scratch_7_size[] = {{{size}}};", "AtenTensorHandle handle;"]
    monkeypatch.setattr(CUDADeviceOpOverrides, "cpp_scratch", lambda *_: (lines, "global_scratch_scratch_7"))
    with scratch_of_the_whole_grid():
        assert lines_of(WORKSPACE) == [WHOLE, lines[1]]


def test_an_unknown_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CUDADeviceOpOverrides,
        "cpp_scratch",
        lambda *_: (["auto x = allocate(768);"], "global_scratch_scratch_7"),
    )
    with scratch_of_the_whole_grid(), pytest.raises(LoweringError, match="unknown way"):
        lines_of(WORKSPACE)
