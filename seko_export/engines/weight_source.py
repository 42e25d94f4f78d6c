"""Weights by name, whatever holds them: a checkpoint on disk, or a dictionary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """A checkpoint seen through its family's own names."""

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
