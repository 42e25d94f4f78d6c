"""Dimensions of a lingbot-world model, and the way in which a build computes the model's camera input."""

from __future__ import annotations

from dataclasses import dataclass, field

from seko_export.config.model import ModelConfig
from seko_export.errors import UsageError
from seko_export.families.wan_layout.picture_sizes import check_condition

CONTROLS = {"cam": 6, "act": 7}
"""Number of control values per pixel for each ``control_type`` of a config.json. ``cam`` has origin and direction of
the pixel's camera ray. ``act`` has three numbers of the ray, and four numbers of pressed keys.
"""
CELL = 8  # side of a latent cell in pixels; the 64 pixels of a cell become channels
# pixels of a token, which is also the number of values of a token for each control channel
TOKEN_PIXELS = (2 * CELL) ** 2
PER_CHUNK, PER_PASS, NO_CAMERA = "chunk", "pass", "none"
CAMERAS = (PER_CHUNK, PER_PASS, NO_CAMERA)


@dataclass(frozen=True)
class LingbotModel(ModelConfig):
    """Dimensions of a lingbot-world model.

    Parameters
    ----------
    control_channels : int
        Channels of the camera control for each pixel: 6, for origin and direction of the pixel's camera ray.
    camera : str
        With ``chunk`` the scale and shift of every layer are computed once a chunk and kept for all passes. With
        ``pass`` each layer computes scale and shift in every pass, which saves memory. With ``none`` layers have no
        camera, as in the authors' code without a control; the video differs from that of a camera at rest.

    Raises
    ------
    UsageError
        If the model has another kind of control, no condition channels, or ``camera`` has another value.
    """

    in_channels: int = 36
    control_channels: int = CONTROLS["cam"]
    camera: str = PER_CHUNK
    family: str = field(default="lingbot", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.control_channels != CONTROLS["cam"]:
            kind = next(
                (name for name, width in CONTROLS.items() if width == self.control_channels), "unknown"
            )
            raise UsageError(
                f"the model's control has {self.control_channels} channels ({kind}), expected {CONTROLS['cam']} (cam): "
                "take the checkpoint that a camera steers"
            )
        check_condition(self)
        if self.camera not in CAMERAS:
            raise UsageError(f"camera is {self.camera!r}, expected one of {', '.join(CAMERAS)}")

    @property
    def control_width(self) -> int:
        """Number of camera control values for each token."""
        return self.control_channels * TOKEN_PIXELS
