"""Dimensions of a Seko-Talk model: those of a Wan model, of the picture branch, and of the audio adapter."""

from __future__ import annotations

from dataclasses import dataclass, field

from seko_export.config.model import ModelConfig
from seko_export.config.sizes import check_sizes
from seko_export.errors import UsageError

MOST_SPEAKERS = 64  # each one is attention of its own in every layer with audio


@dataclass(frozen=True)
class SekoTalkModel(ModelConfig):
    """Dimensions of a Seko-Talk model.

    Parameters
    ----------
    state_rows, ref_state : int
        Number of rows of the matrix ``state_embedding``, and index of the row that is added to the tokens of the
        reference picture.
    image_dim, image_tokens : int
        Width and number of CLIP's picture features. A model without the picture branch has ``image_dim`` 0.
    audio_dim, audio_frames : int
        Width of HuBERT's features, and number of features for a latent frame.
    audio_width, audio_tokens, audio_layers, audio_heads, audio_ffn : int
        Sizes of the projector from audio to tokens: width, learnt queries for each latent frame, decoder layers, heads,
        and width of the feed-forward.
    audio_freq_dim : int
        Width of the adapter's sinusoidal time embedding.
    audio_eps, image_eps : float
        Epsilon of the adapter's ``norm_kv``, and of the norms of ``img_emb``.
    speakers : int
        Number of voices of a session, each with its own audio features, and with a mask if there are several voices.

    Raises
    ------
    UsageError
        If two sizes of the model contradict each other.
    """

    state_rows: int = 2
    ref_state: int = 1
    image_dim: int = 1280
    image_tokens: int = 257
    audio_dim: int = 1024
    audio_frames: int = 13
    audio_width: int = 1024
    audio_tokens: int = 32
    audio_layers: int = 4
    audio_heads: int = 16
    audio_ffn: int = 4096
    audio_freq_dim: int = 256
    audio_eps: float = 1e-6
    image_eps: float = 1e-6
    speakers: int = 1
    family: str = field(default="seko_talk", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(
            self, ("audio_dim", "audio_frames", "audio_width", "audio_tokens", "audio_layers", "audio_heads")
        )
        check_sizes(self, ("audio_ffn", "image_tokens"))
        if type(self.speakers) is not int or not 1 <= self.speakers <= MOST_SPEAKERS:
            raise UsageError(f"speakers is {self.speakers!r:.60}, expected 1 to {MOST_SPEAKERS}")
        if self.image_dim < 0:
            raise UsageError(f"image_dim must be at least 0, got {self.image_dim}")
        if not 0 <= self.ref_state < self.state_rows:
            raise UsageError(f"ref_state is {self.ref_state}, state_embedding has {self.state_rows} rows")
        if self.audio_width % self.audio_heads:
            raise UsageError(
                f"audio_width {self.audio_width} is no multiple of audio_heads {self.audio_heads}"
            )
        if self.audio_freq_dim < 2 or self.audio_freq_dim % 2:
            raise UsageError(f"audio_freq_dim {self.audio_freq_dim} must be even: cosines, then sines")
        if not self.audio_eps > 0 or not self.image_eps > 0:
            raise UsageError(f"audio_eps {self.audio_eps} and image_eps {self.image_eps} must be above 0")
        if self.in_channels != self.out_channels:
            raise UsageError(
                f"in_channels {self.in_channels}, out_channels {self.out_channels}: the autoregressive model takes the "
                "noise alone; with more channels it is the one that is not autoregressive"
            )

    @property
    def sound_width(self) -> int:
        """Width of HuBERT's audio features."""
        return self.audio_dim

    @property
    def picture_features(self) -> tuple[int, int] | None:
        """Number and width of CLIP's picture features; None for a model without the picture branch."""
        return (self.image_tokens, self.image_dim) if self.image_dim else None
