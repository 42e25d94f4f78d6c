"""Dimensions of a minWM model. Listing them imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from seko_export.config.model import ModelConfig
from seko_export.errors import UsageError

PER_CHUNK, NO_CAMERA = "chunk", "none"
CAMERAS = (PER_CHUNK, NO_CAMERA)


@dataclass(frozen=True)
class MinwmModel(ModelConfig):
    """Dimensions of a minWM model.

    Parameters
    ----------
    camera : str
        With ``chunk`` a camera's matrices are computed once a chunk. With ``none`` layers have no second attention, as
        in the authors' code without a camera; the video differs from that of a camera at rest.

    Raises
    ------
    UsageError
        If ``camera`` has another value.
    """

    camera: str = PER_CHUNK
    family: str = field(default="minwm", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.camera not in CAMERAS:
            raise UsageError(f"camera is {self.camera!r}, expected one of {', '.join(CAMERAS)}")

    @property
    def keys_before_rope(self) -> bool:
        """Whether the cache stores keys before RoPE: the second attention reads them so."""
        return self.camera != NO_CAMERA
