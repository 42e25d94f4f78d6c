"""Dimensions of an image-to-video model: those of a Wan model, and those of the picture branch."""

from __future__ import annotations

from dataclasses import dataclass, field

from seko_export.config.model import ModelConfig
from seko_export.errors import UsageError
from seko_export.families.wan_layout.picture_sizes import check_condition


@dataclass(frozen=True)
class WanI2vModel(ModelConfig):
    """Dimensions of an image-to-video model.

    Parameters
    ----------
    pictures : int
        Number of pictures that the model takes: 1, the first picture; or 2, the first and the last picture.
    image_dim, image_tokens : int
        Width and number of CLIP's features of a picture. A model without the picture branch, such as Wan 2.2 A14B, has
        ``image_dim`` 0.
    image_eps : float
        Epsilon of the norms of ``img_emb``.

    Raises
    ------
    UsageError
        If two sizes of the model contradict each other.
    """

    in_channels: int = 36
    pictures: int = 1
    image_dim: int = 1280
    image_tokens: int = 257
    image_eps: float = 1e-5
    family: str = field(default="wan_i2v", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_condition(self)
        if self.image_dim < 0:
            raise UsageError(f"image_dim must be at least 0, got {self.image_dim}")
        if self.image_tokens < 1:
            raise UsageError(f"image_tokens must be at least 1, got {self.image_tokens}")
        if self.pictures not in (1, 2):
            raise UsageError(f"pictures is {self.pictures}, expected 1 or 2")
        if not self.image_eps > 0:
            raise UsageError(f"image_eps {self.image_eps} must be above 0")

    @property
    def last_picture(self) -> bool:
        """Whether the model takes a last picture in addition to the first."""
        return self.pictures > 1

    @property
    def seen_pictures(self) -> int:
        """Number of pictures whose CLIP features the picture branch takes."""
        return self.pictures

    @property
    def picture_features(self) -> tuple[int, int] | None:
        """Number and width of CLIP's features of all pictures; None for a model without the picture branch."""
        return (self.pictures * self.image_tokens, self.image_dim) if self.image_dim else None
