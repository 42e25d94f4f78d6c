"""Dimensions of the text encoder, and what a build asks of any VAE's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from seko_export.errors import UsageError

TOKENIZER_FILE = "text/tokenizer.json"  # in the artifact


@dataclass(frozen=True)
class TextEncoderConfig:
    """Dimensions of a UMT5 encoder, and how prompts are padded and cut.

    Parameters
    ----------
    vocab_size, dim, heads, head_dim, ffn_dim, layers : int
        Tokens, width, attention heads, channels of one, hidden width of the feed-forward, depth.
    buckets, max_distance : int
        Relative position bias: number of buckets, and the distance in tokens from which all share the last bucket.
    norm_eps : float
        Epsilon of every RMSNorm.
    pad_id : int
        The padding token behind a prompt; its embedding is zeros.
    truncate : bool
        Whether a prompt that is too long is cut, as in Wan's pipeline, or refused.

    Raises
    ------
    UsageError
        If two of them contradict each other.
    """

    vocab_size: int = 256_384
    dim: int = 4096
    heads: int = 64
    head_dim: int = 64
    ffn_dim: int = 10_240
    layers: int = 24
    buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    pad_id: int = 0
    truncate: bool = True

    def __post_init__(self) -> None:
        for field in ("vocab_size", "dim", "heads", "head_dim", "ffn_dim", "layers"):
            if getattr(self, field) < 1:
                raise UsageError(f"the text encoder's {field} must be at least 1, got {getattr(self, field)}")
        if self.buckets < 4 or self.buckets % 4:
            raise UsageError(
                f"the text encoder's buckets {self.buckets} must be a multiple of 4: either direction, near and far"
            )
        if self.max_distance <= self.buckets // 4:
            raise UsageError(
                f"the text encoder's max_distance {self.max_distance} must be above {self.buckets // 4}, a quarter of "
                f"its {self.buckets} buckets"
            )
        if not 0 <= self.pad_id < self.vocab_size:
            raise UsageError(f"pad_id {self.pad_id} is no token of a vocabulary of {self.vocab_size}")
        if not self.norm_eps > 0:
            raise UsageError(f"the text encoder's norm_eps must be above 0, got {self.norm_eps}")


@dataclass(frozen=True)
class VaeConfig(ABC):
    """Dimensions of a VAE, of any kind. Each kind derives a frozen dataclass; its fields go into the manifest.

    Strides and channels are of the latents: they must be those of the model's stream and output.
    """

    kind: ClassVar[str]
    """The VAE that it configures, as `media.vaes.vae_named` takes it."""
    encodes: ClassVar[bool] = True
    """Whether there is an encoder, for start pictures; a VAE that only decodes says False."""

    @property
    @abstractmethod
    def latent_channels(self) -> int:
        """Channels of a latent cell."""

    @property
    @abstractmethod
    def spatial_stride(self) -> int:
        """Pixels along one side of a latent cell."""

    @property
    @abstractmethod
    def temporal_stride(self) -> int:
        """Video frames per latent frame, except the first latent frame."""

    def video_frames(self, frames: int, *, first: bool) -> int:
        """Return how many video frames ``frames`` latent frames decode to, at the start of a stream or later."""
        return self.temporal_stride * frames - (self.temporal_stride - 1) * first
