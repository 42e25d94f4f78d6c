"""The protocol of weights that are read by name, from a checkpoint on disk or a dictionary."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class WeightSource(Protocol):
    """Weights of a model, by the exporter's names."""

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight as a tensor on the CPU."""


@runtime_checkable
class CodedWeights(Protocol):
    """Weights of a model, of which some are stored in e4m3 (fp8)."""

    def row_codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the e4m3 codes of a matrix [out, in] and a float32 scale for each row [out, 1]; None if the matrix is
        not stored in e4m3.
        """
