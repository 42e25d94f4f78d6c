"""Outlines: Triton kernels with the parameters of Gluon kernels, which torch's compiler gets in place of the Gluon
kernels.

Torch's compiler derives from a kernel's Triton IR which tensors the kernel writes, and does not support Gluon.
Therefore torch's compiler gets an outline, which reads and writes the same tensors as the Gluon kernel. `gluon_twin`
substitutes the Gluon kernel before compilation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from seko_kernels.errors import KernelsError

# Name of the Gluon kernel and its module for each outline. The modules are not imported here, because a triton
# release may lack Gluon.
TWINS = {
    "attention_hopper_outline": ("seko_kernels.gluon.attention_fp8", "attention_hopper_kernel"),
    "sparse_attention_hopper_outline": (
        "seko_kernels.gluon.attention_fp8",
        "sparse_attention_hopper_kernel",
    ),
    "attention_bf16_outline": ("seko_kernels.gluon.attention_bf16", "attention_bf16_kernel"),
    "causal_conv_outline": ("seko_kernels.gluon.causal_conv", "causal_conv_hopper_kernel"),
}


class Outline(JITFunction):  # type: ignore[misc]
    """A Triton kernel that declares the reads and writes of a Gluon kernel. A launch of the `Outline` runs the Gluon
    kernel."""

    def run(self, *arguments: Any, **named: Any) -> Any:
        return kernel_of(self.__name__).run(*arguments, **named)


def outline(runtime_ints: Sequence[str]) -> Callable[[Callable[..., None]], Outline]:
    """Return a decorator that makes an outline. Parameters named in ``runtime_ints`` are arguments of the compiled
    kernel, not constants in it."""
    return lambda function: Outline(function, do_not_specialize=runtime_ints)


def gluon_twin(source: Any) -> Any | None:
    """Return the Gluon source to compile instead of an outline, or None for any other kernel.

    Parameters
    ----------
    source : triton.compiler.ASTSource
        Source that Triton is about to compile.

    Returns
    -------
    GluonASTSource or None
        The Gluon source with the same signature, constants and attributes; None for any other kernel.

    Raises
    ------
    KernelsError
        If this triton has no Gluon as of 3.6.
    """
    if not isinstance(source, ASTSource) or source.fn.__name__ not in TWINS:
        return None
    twin = kernel_of(source.fn.__name__)
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(twin, source.signature, source.constants, source.attrs)


def kernel_of(outline_name: str) -> Any:
    """Return the Gluon kernel for which an outline stands.

    Raises
    ------
    KernelsError
        If this triton has no Gluon as of 3.6.
    """
    fault = gluon_fault()
    if fault is not None:
        raise KernelsError(
            f"triton {triton.__version__} has no Gluon as this kernel takes it from 3.6 ({fault}); build with "
            "--attention torch"
        ) from fault
    module, name = TWINS[outline_name]
    return getattr(importlib.import_module(module), name)


@cache
def gluon_fault() -> ImportError | None:
    """Return a description of how the installed triton's Gluon differs from the Gluon of triton 3.6, or None. Gluon is
    experimental and may change with each release of triton.
    """
    try:
        for module, _ in TWINS.values():
            importlib.import_module(module)
    except ImportError as reason:
        return reason
    return None
