"""Argument checks of the ops: shape, dtype, contiguity, device capability."""

from __future__ import annotations

import torch
from torch import Tensor

from seko_kernels.errors import KernelsError

FP8_ARCH = (8, 9)  # the first compute capability with e4m3 numbers


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise an error unless a tensor is contiguous and has the expected shape and one of the allowed dtypes.

    Raises
    ------
    KernelsError
        If the tensor has another shape, is not contiguous, or has a dtype that is not in `dtypes`.
    """
    expect_dtype(name, tensor, *dtypes)
    if tuple(tensor.shape) != shape:
        raise KernelsError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.is_contiguous():
        raise KernelsError(f"{name} is strided {tensor.stride()}, expected contiguous")


def expect_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise `KernelsError` if a tensor's dtype is not in `dtypes`."""
    if tensor.dtype not in dtypes:
        raise KernelsError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")


def expect_dims(name: str, tensor: Tensor, dims: int, axes: str) -> None:
    """Raise `KernelsError` unless a tensor has `dims` axes; `axes` has the axes' names for the message."""
    if tensor.dim() != dims:
        raise KernelsError(f"{name} has shape {tuple(tensor.shape)}, expected {axes}")


def expect_fp8(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; raise an error for a device without e4m3 (fp8) numbers.

    Raises
    ------
    KernelsError
        If the device is older than sm_89 and so has no fp8 numbers.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_ARCH:
        raise KernelsError(
            f"this GPU is sm_{capability[0]}{capability[1]} and has no fp8 numbers, which begin with sm_89; "
            "build without fp8"
        )
    return capability
