"""Dimensions of a VoxCPM2 model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from seko_export.config.sizes import check_sizes
from seko_export.errors import UsageError
from seko_export.families.speech.config import SpeechModel
from seko_export.media.audio_vae.config import AudioVaeConfig
from seko_runtime.speech.manifest import Patch, VoiceEncoder


@dataclass(frozen=True)
class LongRope:
    """Rotary frequencies that are divided by a factor for each channel pair (LongRoPE).

    Parameters
    ----------
    theta : float
        Base of the rotary frequencies.
    short_factors, long_factors : tuple of float
        Frequency factors for a model of at most ``original_positions`` positions, and for a longer model.
    max_positions, original_positions : int
        Positions of the model, and positions of its first training. These two numbers choose short or long factors for
        the whole model, whatever the length of a sequence.
    """

    theta: float
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    max_positions: int
    original_positions: int

    def __post_init__(self) -> None:
        factors = (*self.short_factors, *self.long_factors)
        if min(factors, default=0) <= 0 or not all(map(math.isfinite, factors)):
            raise UsageError("a factor of rope_scaling is not above 0")
        if not self.theta > 1 or not math.isfinite(self.theta):
            raise UsageError(f"rope_theta must be above 1, got {self.theta}")
        if min(self.max_positions, self.original_positions) < 2:
            raise UsageError(
                f"max_position_embeddings {self.max_positions} and original_max_position_embeddings "
                f"{self.original_positions} must be at least 2"
            )

    @property
    def factors(self) -> tuple[float, ...]:
        """The frequency factors that the model uses: ``short_factors`` or ``long_factors``."""
        return self.long_factors if self.max_positions > self.original_positions else self.short_factors

    @property
    def amplitude(self) -> float:
        """Factor by which cosines and sines of RoPE are multiplied."""
        growth = math.log(self.max_positions / self.original_positions) / math.log(self.original_positions)
        return math.sqrt(1 + growth)


@dataclass(frozen=True)
class NetConfig:
    """Dimensions of one of VoxCPM2's four transformers.

    Parameters
    ----------
    layers, dim, ffn_dim : int
        Number of layers, width of the hidden state, hidden width of the feed-forward.
    heads, kv_heads, head_dim : int
        Number of query heads, number of heads of keys and values, channels of a head.
    norm_eps : float
        Epsilon of every RMSNorm.
    scale_depth : float or None
        Depth scaling, for a config with ``use_mup``: outputs of attention and feed-forward are multiplied by
        ``scale_depth`` / sqrt(layers) before the residual sum. None: outputs are added without a factor.
    """

    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    scale_depth: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, ("layers", "dim", "ffn_dim", "heads", "kv_heads", "head_dim"))
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads of queries are no multiple of {self.kv_heads} of keys and values"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim {self.head_dim} must be even: RoPE rotates pairs of channels")
        if not self.norm_eps > 0:
            raise UsageError(f"norm_eps must be above 0, got {self.norm_eps}")

    @property
    def branch_scale(self) -> float:
        """Factor of the outputs of attention and feed-forward before the residual sum."""
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.layers)

    @property
    def attention_width(self) -> int:
        """Number of channels of all query heads together, which may differ from ``dim``."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Number of channels of all key heads together, which is also that of all value heads together."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class VoxCpm2Config(SpeechModel):
    """Dimensions of a VoxCPM2 model.

    Parameters
    ----------
    name : str
        Name of the preset, for reports.
    vocab_size : int
        Number of text tokens in the vocabulary.
    base, residual : NetConfig
        The language model over text and patches, and the language model over the first model's quantised hidden states.
    encoder, decoder : NetConfig
        The local encoder of a patch, and the local diffusion transformer.
    rope : LongRope
        Rotary frequencies of all transformers except a residual language model without positions.
    residual_rope : bool
        Whether the residual language model has rotary positions.
    patch_size : int
        Number of latents in a patch.
    fsq_dim, fsq_scale : int
        Finite scalar quantisation: number of quantised channels, and number of levels on either side of zero.
    embed_scale : float
        Factor by which text embeddings are multiplied; 1 unless ``use_mup`` is set.
    mean_mode : bool
        Whether the local transformer also takes the solver's step size as input.
    max_length : int
        Largest number of positions of a sequence in the original implementation, prompt included.
    dtype : str
        Compute dtype that the authors use: ``bfloat16``, ``float16`` or ``float32``.
    vae : AudioVaeConfig
        Dimensions of the audio VAE, which encodes samples to latents and decodes latents to samples.
    family : str
        Name of the model family that builds the model.

    Raises
    ------
    UsageError
        If two dimensions of the model contradict each other.
    """

    vocab_size: int
    base: NetConfig
    residual: NetConfig
    encoder: NetConfig
    decoder: NetConfig
    rope: LongRope
    residual_rope: bool = False
    patch_size: int = 4
    fsq_dim: int = 512
    fsq_scale: int = 9
    embed_scale: float = 1.0
    mean_mode: bool = False
    max_length: int = 8192
    dtype: str = "bfloat16"
    vae: AudioVaeConfig = field(default_factory=AudioVaeConfig)
    family: str = field(default="voxcpm2", kw_only=True)

    def __post_init__(self) -> None:
        check_sizes(self, ("vocab_size", "patch_size", "fsq_dim", "fsq_scale", "max_length"))
        for role in ("base", "residual", "encoder", "decoder"):
            net: NetConfig = getattr(self, role)
            rotated = role != "residual" or self.residual_rope
            if rotated and any(
                len(factors) != net.head_dim // 2
                for factors in (self.rope.short_factors, self.rope.long_factors)
            ):
                raise UsageError(
                    f"rope_scaling has {len(self.rope.short_factors)} short and {len(self.rope.long_factors)} long "
                    f"factors, expected {net.head_dim // 2} of each: half of the {net.head_dim} channels of a head"
                )
        if self.residual.dim != self.base.dim:
            raise UsageError(f"the residual net is {self.residual.dim} wide, the base net {self.base.dim}")
        if self.decoder.dim % 2 or self.decoder.dim < 4:
            raise UsageError(
                f"the local transformer's width {self.decoder.dim} must be even and at least 4: sines, then cosines"
            )
        if not math.isfinite(self.embed_scale):
            raise UsageError(f"embed_scale must be finite, got {self.embed_scale}")

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary: all token ids are below this number."""
        return self.vocab_size

    @property
    def longest(self) -> int:
        """Largest number of positions of a sequence. The rotary frequencies set this number, even if the original
        implementation allows fewer positions.
        """
        return self.rope.max_positions

    @property
    def patch(self) -> Patch:
        """Sizes of the patch (short piece of sound) that a step generates."""
        return Patch(self.patch_size, self.latent_dim, self.patch_samples, self.vae.out_sample_rate)

    def voice_encoder(self, patches: int) -> VoiceEncoder:
        """Return the sizes of a voice encoder that takes this number of patches a call."""
        return VoiceEncoder(patches, self.patch_size * self.vae.encoder_stride, self.vae.sample_rate)

    @property
    def latent_dim(self) -> int:
        """Number of channels of a latent."""
        return self.vae.latent_dim

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Number of latents in a patch, and number of their channels."""
        return (self.patch_size, self.latent_dim)

    @property
    def patch_samples(self) -> int:
        """Number of sound samples to which a patch is decoded."""
        return self.patch_size * self.vae.decoder_stride

    @property
    def patch_tokens(self) -> int:
        """Number of tokens of the local encoder: a learnt token, then the latents of a patch."""
        return 1 + self.patch_size

    @property
    def solver_tokens(self) -> int:
        """Number of tokens of the local transformer: two tokens of hidden states, a token of the time, and the latents
        of the previous and of the new patch."""
        return 3 + 2 * self.patch_size
