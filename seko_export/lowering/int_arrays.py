"""Sizes and strides in the compiler's C++ code: each array is declared in the place that it was asked for.

The compiler writes C++ in two passes, into two lists, and remembers by the `writeline` it is given which arrays stand
in which. Torch 2.11 takes the address of that bound method as its name. Such a method lives for one call, so that the
second pass may meet the address of one of the first: then it uses an array that is declared further down, and the C++
does not compile. 2.13 takes the list's address. Here every list has one method that lives as long as the compiler's
object does, which is right for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Writer = Callable[..., None]
_KEPT = (
    "_seko_writers"  # attribute of the compiler's object: by address of the owner, the owner and its writer
)


@contextmanager
def arrays_declared_where_used() -> Iterator[None]:
    """While entered, an engine's C++ code uses no array of sizes or strides before its declaration."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    known = CppWrapperCpu.codegen_int_array_var

    def codegen_int_array_var(
        self: CppWrapperCpu, int_array: str, writeline: Writer, *rest: Any, **more: Any
    ) -> str:
        return known(self, int_array, _lasting(self, writeline), *rest, **more)

    CppWrapperCpu.codegen_int_array_var = codegen_int_array_var  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppWrapperCpu.codegen_int_array_var = known  # type: ignore[method-assign]


def _lasting(compiler: object, writeline: Writer) -> Writer:
    """Return the one writer that stands for all of an owner's; while both are kept, no other has their address."""
    kept: dict[tuple[int, str], tuple[object, Writer]] = compiler.__dict__.setdefault(_KEPT, {})
    owner: object = getattr(writeline, "__self__", writeline)
    name: str = getattr(writeline, "__name__", "")
    return kept.setdefault((id(owner), name), (owner, writeline))[1]
