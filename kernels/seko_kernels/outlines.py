"""Gluon kernels as torch's compiler sees them: by an outline, a Triton kernel with the same parameters.

Torch's compiler learns from a kernel's Triton IR which tensors it changes, and it knows no Gluon. So it is shown an
outline, which reads what the Gluon kernel reads and writes what it writes; `gluon_twin` takes its place before it is
compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from seko_kernels.errors import ArchError

# Each outline's Gluon kernel and its module. Named here, not imported: a triton may be without Gluon.
TWINS = {
    "attention_hopper_outline": ("seko_kernels.gluon.attention_fp8", "attention_hopper_kernel"),
    "attention_bf16_outline": ("seko_kernels.gluon.attention_bf16", "attention_bf16_kernel"),
}


class Outline(JITFunction):  # type: ignore[misc]
    """A Triton kernel that shows what a Gluon kernel reads and writes; run as it is, the Gluon kernel runs."""

    def run(self, *arguments: Any, **named: Any) -> Any:
        return kernel_of(self.__name__).run(*arguments, **named)


def outline(runtime_ints: Sequence[str]) -> Callable[[Callable[..., None]], Outline]:
    """Return the decorator of an outline, whose ``runtime_ints`` are no constants of the compiled kernel."""
    return lambda function: Outline(function, do_not_specialize=runtime_ints)


def gluon_twin(source: Any) -> Any | None:
    """Return the Gluon source that is to be compiled for an outline, or None for any other kernel.

    Parameters
    ----------
    source : triton.compiler.ASTSource
        What Triton is about to compile.

    Returns
    -------
    GluonASTSource or None
        Of the same signature, constants and attributes.

    Raises
    ------
    ArchError
        If this triton has no Gluon as of 3.6.
    """
    if not isinstance(source, ASTSource) or source.fn.__name__ not in TWINS:
        return None
    twin = kernel_of(source.fn.__name__)
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(twin, source.signature, source.constants, source.attrs)


def kernel_of(outline_name: str) -> Any:
    """Return an outline's Gluon kernel.

    Raises
    ------
    ArchError
        If this triton has no Gluon as of 3.6.
    """
    fault = gluon_fault()
    if fault is not None:
        raise ArchError(
            f"triton {triton.__version__} has no Gluon as this kernel takes it from 3.6 ({fault}); build with "
            "--attention torch"
        ) from fault
    module, name = TWINS[outline_name]
    return getattr(importlib.import_module(module), name)


@cache
def gluon_fault() -> ImportError | None:
    """Return why this triton's Gluon is not that of 3.6, or None: an experimental interface may move."""
    try:
        for module, _ in TWINS.values():
            importlib.import_module(module)
    except ImportError as reason:
        return reason
    return None
