"""Errors of `seko_kernels`, one class for each cause."""

from __future__ import annotations


class KernelsError(Exception):
    """Base of every error that `seko_kernels` raises."""


class KvSchemeError(KernelsError, ValueError):
    """A requested KV scheme does not exist, or does not fit the model's dtype."""


class KvShapeError(KernelsError, ValueError):
    """A tensor's shape, or its layout in memory, is not what the KV format stores."""


class KvDtypeError(KernelsError, TypeError):
    """A tensor's dtype is not what the KV format stores."""


class KvDeviceError(KernelsError, ValueError):
    """Tensors lie on a device that has no kernel here, or on different devices."""


class KvCalibrationError(KernelsError, ValueError):
    """Calibration statistics are not finite float32, or their minimum exceeds their maximum."""


class OpShapeError(KernelsError, ValueError):
    """A tensor's shape, or its layout in memory, is not what an op takes."""


class OpDtypeError(KernelsError, TypeError):
    """A tensor's dtype is not what an op takes."""


class ArchError(KernelsError, RuntimeError):
    """The GPU lacks what a kernel needs, such as fp8 instructions."""


class TilesError(KernelsError, ValueError):
    """Kernel tiles contradict each other, or a table of tiles cannot be read."""


class PluginFormError(KernelsError, ValueError):
    """A kernel takes an argument that TensorRT does not pass to a plugin."""
