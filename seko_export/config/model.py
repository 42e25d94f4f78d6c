"""Dimensions of a causal video transformer of any family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from seko_export.config.build import ModelIdentity
from seko_export.config.sizes import check_sizes
from seko_export.errors import UsageError

# equals `seko_kernels.formats.NVFP4_BLOCK`, which is not imported because presets are read before torch is
# imported
HEAD_UNIT = 16


@dataclass(frozen=True)
class ModelConfig(ModelIdentity):
    """Dimensions of a Wan-family causal video DiT.

    A family whose models have further sizes derives a frozen dataclass from `ModelConfig`, and names this dataclass in
    `Recognised.kind`.

    Parameters
    ----------
    name : str
        Name of the preset, for reports.
    layers, dim, heads, ffn_dim : int
        Number of layers, width, attention heads, hidden width of the feed-forward of the transformer.
    in_channels, out_channels : int
        Input channels of the patch embedding, and channels of the latents. There are more input channels if a family
        concatenates a condition to the latents.
    text_dim, text_tokens : int
        Width and number of tokens of the text encoder's (zero-padded) output; both 0 for a model that takes no text.
    freq_dim : int
        Width of the sinusoidal time embedding.
    norm_eps : float
        Epsilon of every LayerNorm and RMSNorm of the transformer.
    rope_theta : float
        Base of the rotary frequencies.
    family : str
        Name of the family that builds the model, as `families.registry.family_named` takes it.

    Raises
    ------
    UsageError
        If two dimensions of the model contradict each other.
    """

    workload: ClassVar[str] = "video"

    layers: int
    dim: int
    heads: int
    ffn_dim: int
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    text_tokens: int = 512
    freq_dim: int = 256
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    family: str = field(default="wan", kw_only=True)

    def __post_init__(self) -> None:
        check_sizes(self, ("layers", "dim", "heads", "ffn_dim", "in_channels", "out_channels", "freq_dim"))
        if self.text_dim or self.text_tokens:
            check_sizes(self, ("text_dim", "text_tokens"))
        if self.dim % self.heads:
            raise UsageError(f"dim {self.dim} is no multiple of heads {self.heads}")
        if self.head_dim % HEAD_UNIT:
            raise UsageError(f"head_dim {self.head_dim} is no multiple of {HEAD_UNIT}, the FP4 scale block")
        if self.freq_dim % 2:
            raise UsageError(f"freq_dim {self.freq_dim} must be even: cosines, then sines")
        if not self.norm_eps > 0 or not self.rope_theta > 1:
            raise UsageError(
                f"norm_eps {self.norm_eps} must be above 0 and rope_theta {self.rope_theta} above 1"
            )

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """Return the config of a build's model as one of this class.

        Raises
        ------
        TypeError
            If it is of another class.
        """
        if not isinstance(config, cls):
            raise TypeError(f"{config.name!r} is a {type(config).__name__}, expected a {cls.__name__}")
        return config

    @property
    def head_dim(self) -> int:
        """Number of channels of one attention head."""
        return self.dim // self.heads

    @property
    def takes_text(self) -> bool:
        """Whether the model takes a text."""
        return self.text_tokens > 0

    @property
    def keys_before_rope(self) -> bool:
        """Whether layers attend to the cached keys without RoPE, too, so that the cache stores them before it."""
        return False

    @property
    def sound_width(self) -> int | None:
        """Width of the audio features that the model takes; None if the model takes no audio."""
        return None

    @property
    def front_tokens(self) -> int:
        """Number of tokens before a stream that take part in its first chunk's passes, and that all chunks see; see
        `families.layers.front_tokens`."""
        return 0

    @property
    def seen_pictures(self) -> int:
        """Number of pictures whose features the model takes, if it takes any."""
        return 1

    @property
    def picture_features(self) -> tuple[int, int] | None:
        """Number and width of the picture features that the model takes beside the text; None if the model takes no
        picture features."""
        return None
