# ruff: noqa: N803, ARG001 - the outline has all of the kernel's parameters, in capitals
"""Hopper's 8-bit attention as torch's compiler and the op see it: an outline, its Gluon kernel, what it takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from seko_kernels.errors import ArchError

QUERIES = 192  # of a program
KEY_GROUP = 16  # tokens whose order among themselves a tile changes: a scratch holds a multiple of them
HEAD_DIM = 128
OWN_KEYS = 64  # of a tile: bf16 takes twice the memory
STAGES = 4  # of the ring: 128 KiB of 227
WARPS = 4  # Gluon's number of warps, which fetch; the three other warpgroups come on top
RUNTIME_INTS = (
    "query_tokens",
    "cache_tokens",
    "v_columns",
    "v_own_stride",
    "tiles",
    "whole_ctas",
    "first_query",
    "splits",
    "rest_tokens",
)


class _Outline(JITFunction):  # type: ignore[misc]
    """A Triton kernel that shows what a Gluon kernel reads and writes; run as it is, the Gluon kernel runs."""

    def run(self, *arguments: Any, **named: Any) -> Any:
        return kernel().run(*arguments, **named)


def _outline(function: Callable[..., None]) -> _Outline:
    return _Outline(function, do_not_specialize=RUNTIME_INTS)


@_outline
def attention_hopper_outline(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    K_OWN,
    V_OWN,
    V_SCALE,
    VALID_TOKENS,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    OWN_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read what `attention_hopper_kernel` reads and write what it writes; never compiled as it is.

    torch's compiler learns from a kernel's Triton IR which tensors it changes, and it knows no Gluon. So it is shown
    this kernel, and `gluon_twin` takes its place before it is compiled.
    """
    x = tl.load(Q).to(tl.float32) + tl.load(K).to(tl.float32) + tl.load(K_SCALE) + tl.load(V_T).to(tl.float32)
    x += tl.load(K_OWN).to(tl.float32) + tl.load(V_OWN).to(tl.float32) + tl.load(V_SCALE)
    x += tl.load(VALID_TOKENS).to(tl.float32)
    tl.store(OUT, x.to(OUT.dtype.element_ty))
    tl.store(PART_OUT, x.to(PART_OUT.dtype.element_ty))
    tl.store(PART_LSE, x)


def gluon_twin(source: Any) -> Any | None:
    """Return the Gluon source that is to be compiled for `attention_hopper_outline`, or None for any other kernel.

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
    if not isinstance(source, ASTSource) or source.fn.__name__ != attention_hopper_outline.__name__:
        return None
    twin = kernel()
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(twin, source.signature, source.constants, source.attrs)


def takes(head_dim: int, cache_tokens: int) -> bool:
    """Tell whether the kernel is there and can read a scratch of so many tokens."""
    return gluon_fault() is None and head_dim == HEAD_DIM and cache_tokens % KEY_GROUP == 0


@cache
def gluon_fault() -> ImportError | None:
    """Return why this triton's Gluon is not that of 3.6, or None: an experimental interface may move."""
    try:
        from seko_kernels.gluon import attention_fp8  # noqa: F401
    except ImportError as reason:
        return reason
    return None


def kernel() -> Any:
    """Return the Gluon kernel.

    Raises
    ------
    ArchError
        If this triton has no Gluon as of 3.6.
    """
    fault = gluon_fault()
    if fault is not None:
        raise ArchError(
            f"triton {triton.__version__} has no Gluon as this kernel takes it from 3.6 ({fault}); use "
            "attention.attention_fp8"
        ) from fault
    from seko_kernels.gluon.attention_fp8 import attention_hopper_kernel

    return attention_hopper_kernel
