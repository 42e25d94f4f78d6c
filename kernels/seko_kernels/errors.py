"""Error classes of the package `seko_kernels`."""

from __future__ import annotations


class KernelsError(ValueError):
    """A tensor, a device or a set of numbers that a format or a kernel cannot take."""


class KvSchemeError(KernelsError):
    """A requested KV cache format that does not exist, or does not store the model's dtype."""


class TilesError(KernelsError):
    """Kernel tile sizes that contradict each other, or a table of tile sizes that cannot be read."""
