"""A patch for the order of size and stride arrays in the C++ that torch 2.11 generates: each array is declared where
it is first used.

The compiler writes C++ code in two passes into two lists. For each list the compiler remembers which arrays are
declared in it, with the list's bound method ``writeline`` as the key. Torch 2.11 identifies the method ``writeline`` by
its address in memory. A bound method of Python lives for one call, so in the second pass ``writeline`` may get an
address that it had in the first pass. The second pass then uses an array that is declared further down in the C++ code,
which does not compile. Torch 2.13 identifies a list of code by the list's own address, and does not have this fault.
With the patch every list has one method object, which lives as long as the compiler's object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from seko_export.lowering.patches.patch import Patch, replaced

Writer = Callable[..., None]
_KEPT = (
    # attribute of the compiler's object: a dict from an owner's address to the owner and its method
    "_seko_writers"
)


@contextmanager
def arrays_declared_where_used() -> Iterator[None]:
    """Context manager in which generated C++ uses no size or stride array before its declaration."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    known = CppWrapperCpu.codegen_int_array_var

    def codegen_int_array_var(
        self: CppWrapperCpu, int_array: str, writeline: Writer, *rest: Any, **more: Any
    ) -> str:
        return known(self, int_array, _lasting(self, writeline), *rest, **more)

    with replaced(CppWrapperCpu, codegen_int_array_var=codegen_int_array_var):
        yield


def _lasting(compiler: object, writeline: Writer) -> Writer:
    """Return one lasting method object for an owner. While owner and method object are alive, no other object has the
    method object's address."""
    writers: dict[tuple[int, str], tuple[object, Writer]] = compiler.__dict__.setdefault(_KEPT, {})
    owner: object = getattr(writeline, "__self__", writeline)
    name: str = getattr(writeline, "__name__", "")
    return writers.setdefault((id(owner), name), (owner, writeline))[1]


PATCH = Patch(arrays_declared_where_used, mended_in=(2, 13))
