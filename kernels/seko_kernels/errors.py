"""Errors of `seko_kernels`."""

from __future__ import annotations


class KernelsError(ValueError):
    """A tensor, a device or a set of numbers is not what a format or a kernel takes."""


class KvSchemeError(KernelsError):
    """A requested KV scheme does not exist, or does not fit the model's dtype."""


class TilesError(KernelsError):
    """Kernel tiles contradict each other, or a table of tiles cannot be read."""
