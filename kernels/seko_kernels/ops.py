"""Dispatch of an op: to its Triton kernel (CUDA), to its torch reference (CPU), or to a function of the caller.

An op first checks its tensors. While a model is traced, the device of the tensors decides whether the op becomes its
kernel or its reference. The kernel is a `torch.library.triton_op`, which AOTInductor compiles into its package; an
ordinary custom op would be opaque to the compiler and need this module at run time. The reference of an op is plain
torch and is compiled like the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.library import triton_op

from seko_kernels.errors import KernelsError

R = TypeVar("R")
FLOAT_DTYPES = (torch.float32, torch.bfloat16)
KERNEL_OPS: list[Callable[[], Callable[..., Any]]] = []
"""The ops that `kernel_op` makes, each as a function that registers it."""
_PLAIN = ContextVar("seko_plain_torch", default=False)
_STAND_INS: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("seko_stand_ins", default={})  # noqa: B039 - never written


def kernel_op(name: str, *, mutates_args: Collection[str]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that makes a `triton_op` of a function that launches kernels, when it is first called:
    registering an op imports torch's compiler, which takes seconds."""

    def made(function: Callable[..., R]) -> Callable[..., R]:
        @cache
        def registered() -> Callable[..., Any]:
            return triton_op(name, function, mutates_args=mutates_args)

        @wraps(function)
        def op(*arguments: Any, **named: Any) -> R:
            result: R = registered()(*arguments, **named)
            return result

        KERNEL_OPS.append(registered)
        return op

    return made


@contextmanager
def plain_torch() -> Iterator[None]:
    """Context manager in which ops use the torch reference also on CUDA.

    `plain_torch` is for exported programs that are opened where `seko_kernels` is not installed, and therefore must not
    contain its ops. The results of the reference and of the kernels are equal byte for byte, and torch's compiler fuses
    the reference's operations.
    """
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def takes_kernels(*tensors: Tensor) -> bool:
    """Return whether an op on these tensors runs its kernel (CUDA) or its torch reference (CPU, or inside
    `plain_torch`).

    Raises
    ------
    KernelsError
        If the tensors are on different devices, or on a device that is neither CPU nor CUDA.
    """
    return _device_type(*tensors) == "cuda" and not _PLAIN.get()


@contextmanager
def stand_ins(by_name: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which the caller's functions are called instead of ops, after the ops' own checks.

    `stand_ins` is for graphs in another language, such as ONNX, in which an op is one node. The functions that replace
    ops write nothing in place.

    Parameters
    ----------
    by_name : Mapping[str, Callable]
        Functions by the name of the op that they replace. The functions ``nvfp4_write`` and ``fp8_expand`` take the
        op's tensors, and return new tensors where the op would write a tensor in place. The functions ``nvfp4_expand``
        and ``nvfp4_expand_keys`` take codes, scales, global scale, the keys' mean and rotary tables, and the dtype.
        Other functions have the arguments and results of their op.
    """
    token = _STAND_INS.set(by_name)
    try:
        yield
    finally:
        _STAND_INS.reset(token)


def stand_in(name: str) -> Callable[..., Any] | None:
    """Return the function that `stand_ins` set for an op of another module, or None."""
    return _STAND_INS.get().get(name)


def has_stand_ins() -> bool:
    """Return whether `stand_ins` is active: the graph is for another language, which knows fewer of torch's ops."""
    return bool(_STAND_INS.get())


def _device_type(*tensors: Tensor) -> str:
    """Return the type (``cpu`` or ``cuda``) of the device of all tensors, which must be on one device."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise KernelsError(f"tensors lie on {sorted(map(str, devices))}, expected one device")
    kind = devices.pop().type
    if kind not in ("cpu", "cuda"):
        raise KernelsError(f"tensors lie on a {kind} device, expected cpu or cuda")
    return kind
