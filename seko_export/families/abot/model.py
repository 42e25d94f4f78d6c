"""Dimensions of an ABot-World model: those of a Wan model, of the adapter of keys, and of the reference tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from seko_export.config.model import ModelConfig
from seko_export.errors import UsageError

KEY_BITS = ("W", "A", "S", "D", "I", "J", "K", "L")
"""The keys of the model, in the order of its bits."""
COPIES = 4  # channels of each bit in the adapter's picture


@dataclass(frozen=True)
class AbotModel(ModelConfig):
    """Dimensions of an ABot-World model.

    Parameters
    ----------
    key_channels : int
        Input channels of the adapter's first convolution: the channels of the keys times the pixels of an unshuffled
        cell.
    references, reference_side : int
        Number of reference pictures, and tokens of each along a side. Without pictures of a person their tokens are
        zeros, which the model still attends to.

    Raises
    ------
    UsageError
        If a size of the model is impossible.
    """

    in_channels: int = 48
    out_channels: int = 48
    key_channels: int = 8192
    references: int = 5
    reference_side: int = 16
    family: str = field(default="abot", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        channels = len(KEY_BITS) * COPIES
        if self.key_channels < channels or self.key_channels % channels:
            raise UsageError(
                f"the adapter of keys takes {self.key_channels} channels, expected a multiple of {channels}: "
                f"{len(KEY_BITS)} keys, {COPIES} channels of each"
            )
        if self.references < 0 or self.reference_side < 1:
            raise UsageError(
                f"references {self.references} must be at least 0 and reference_side {self.reference_side} at least 1"
            )

    @property
    def front_tokens(self) -> int:
        """Number of reference tokens."""
        return self.references * self.reference_side**2
