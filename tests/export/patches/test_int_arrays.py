"""Arrays of sizes in an engine's C++ code are declared where they are used, in every torch that we run on."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import pytest
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.utils import IndentedBuffer
from torch.utils._ordered_set import OrderedSet

from seko_export.lowering.patches.int_arrays import PATCH, arrays_declared_where_used

SHAPES = [f"{{{rows}L, 4680L, 1536L}}" for rows in range(1, 9)]


def compiler() -> Any:
    """The part of the compiler that numbers arrays, without a graph."""
    wrapper = CppWrapperCpu.__new__(CppWrapperCpu)
    wrapper.int_array_id = count()
    wrapper.declared_int_array_vars = OrderedSet()
    wrapper.codegen_int_array_var_cache = {}
    return wrapper


def misplaced_of_two_passes() -> tuple[int, int]:
    """Ask in two passes for arrays of each shape; return how many were not in the asking pass's list, and declared."""
    wrapper = compiler()
    misplaced = declared = 0
    for lines in (IndentedBuffer(), IndentedBuffer()):
        for _ in range(3):
            for shape in SHAPES:
                name = wrapper.codegen_int_array_var(shape, lines.writeline, known_statically=True)
                misplaced += f"{name}[] = {shape};" not in lines.getvalue()
        declared += lines.getvalue().count("static")
    return misplaced, declared


class Reusing:
    """Addresses by an allocator that always gives one again as soon as what lay there is gone."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[Any]] = []

    def address(self, item: Any) -> int:
        """Return where it lies."""
        lists = [reference() for reference in self._given]
        places = [place for wanted in (item, None) for place, other in enumerate(lists) if other is wanted]
        place = places[0] if places else len(lists)
        self._given[place : place + 1] = [weakref.ref(item)]
        return place


def by_address(memory: Reusing) -> Any:
    """Return what asks for an array with the cache's key as torch 2.11 makes it."""

    def ask(
        self: CppWrapperCpu,
        int_array: str,
        writeline: Any,
        known_statically: bool = False,
        graph: object = None,
    ) -> str:
        key = (int_array, memory.address(writeline), known_statically, id(graph) if graph else None)
        if key not in self.codegen_int_array_var_cache:
            self.codegen_int_array_var_cache[key] = self._codegen_int_array_var_impl(
                int_array, writeline, known_statically
            )
        return str(self.codegen_int_array_var_cache[key])

    return ask


def test_the_fault_of_an_older_torch_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    older = by_address(Reusing())
    monkeypatch.setattr(CppWrapperCpu, "codegen_int_array_var", older)
    assert misplaced_of_two_passes()[0] > 0
    with arrays_declared_where_used():
        assert misplaced_of_two_passes() == (0, 2 * len(SHAPES))
    assert CppWrapperCpu.codegen_int_array_var is older  # and nothing of it stays


def test_this_torch_needs_it_if_it_takes_two_methods_of_one_list_for_two_lists() -> None:
    """Each call of this test makes a bound method anew; all live, so that no address is used twice."""
    writer, lines = compiler(), IndentedBuffer()
    methods = [lines.writeline for _ in range(2)]
    names = {writer.codegen_int_array_var(SHAPES[0], method, known_statically=True) for method in methods}
    assert PATCH.is_needed() == (len(writer.codegen_int_array_var_cache) > 1), names


def test_each_array_is_declared_once_a_pass() -> None:
    with arrays_declared_where_used():
        assert misplaced_of_two_passes() == (0, 2 * len(SHAPES))


def test_a_list_that_is_gone_lends_its_address_to_no_other() -> None:
    wrapper = compiler()
    with arrays_declared_where_used():
        for _ in range(50):
            lines: list[str] = []
            name = wrapper.codegen_int_array_var(SHAPES[0], lines.append, known_statically=True)
            assert lines == [f"static constexpr int64_t {name}[] = {SHAPES[0]};"]
