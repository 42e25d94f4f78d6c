"""The protocol of weights by name, from a checkpoint on disk or a dictionary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Weights by the exporter's names."""

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
