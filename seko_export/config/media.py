"""Dimensions of text, audio and image encoders, and the base class of a VAE's dimensions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from seko_export.config.sizes import check_sizes
from seko_export.errors import UsageError
from seko_runtime.controls.voice import WINDOW

TOKENIZER_FILE = "text/tokenizer.json"  # file names in the artifact


@dataclass(frozen=True)
class TextEncoderConfig:
    """Dimensions of a UMT5 encoder, and how prompts are padded and cut.

    Parameters
    ----------
    vocab_size, dim, heads, head_dim, ffn_dim, layers : int
        Size of the vocabulary, width, attention heads, channels of a head, hidden width of the feed-forward, number of
        layers.
    buckets, max_distance : int
        Relative position bias: number of buckets, and the distance in tokens from which all distances share the last
        bucket.
    norm_eps : float
        Epsilon of every RMSNorm of the encoder.
    pad_id : int
        Id of the padding token after a prompt, whose embedding is zeros.
    truncate : bool
        Whether a prompt that is too long is cut, as in Wan's pipeline; otherwise the prompt is refused.

    Raises
    ------
    UsageError
        If two dimensions of the encoder contradict each other.
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
        sizes = ("vocab_size", "dim", "heads", "head_dim", "ffn_dim", "layers", "buckets", "max_distance")
        check_sizes(self, sizes, "the text encoder's ")
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

    @property
    def embedding_parts(self) -> int:
        """In how many equal parts the token embedding is copied to the device, if it stays on the host. A part of
        UMT5's then takes half of a layer's memory."""
        return next(parts for parts in (8, 4, 2, 1) if self.vocab_size % parts == 0)


@dataclass(frozen=True)
class HubertConfig:
    """Dimensions of a HuBERT audio encoder with the layout of the large models.

    Parameters
    ----------
    dim, layers, heads, ffn_dim : int
        Width, number of layers, attention heads, hidden width of the feed-forward.
    conv_dims, conv_kernels, conv_strides : tuple of int
        Channels, kernels and strides of the convolutions that turn samples into frames.
    conv_bias : bool
        Whether the convolutions have biases.
    position_kernel, position_groups : int
        Kernel size and number of groups of the convolution that encodes the positions of frames.
    norm_eps : float
        Epsilon of every LayerNorm after the convolutions.
    normalised : bool
        Whether samples are normalised to mean 0 and variance 1, as stated in preprocessor_config.json.

    Raises
    ------
    UsageError
        If two dimensions of the encoder contradict each other.
    """

    dim: int = 1024
    layers: int = 24
    heads: int = 16
    ffn_dim: int = 4096
    conv_dims: tuple[int, ...] = (512,) * 7
    conv_kernels: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    conv_strides: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
    conv_bias: bool = True
    position_kernel: int = 128
    position_groups: int = 16
    norm_eps: float = 1e-5
    normalised: bool = True

    def __post_init__(self) -> None:
        sizes = ("dim", "layers", "heads", "ffn_dim", "position_kernel", "position_groups")
        check_sizes(self, sizes, "the audio encoder's ")
        convolutions = (self.conv_dims, self.conv_kernels, self.conv_strides)
        if min(size for size_list in convolutions for size in (1, *size_list)) < 1 or not self.norm_eps > 0:
            raise UsageError("a size of the audio encoder is below 1, or its norm_eps is not above 0")
        if len({len(sizes) for sizes in convolutions}) > 1 or not self.conv_dims:
            raise UsageError(
                f"the audio encoder has {len(self.conv_dims)} channels, {len(self.conv_kernels)} kernels and "
                f"{len(self.conv_strides)} strides of convolutions: expected as many of each"
            )
        if self.dim % self.heads or self.dim % self.position_groups:
            raise UsageError(
                f"the audio encoder's width {self.dim} is no multiple of its {self.heads} heads and "
                f"{self.position_groups} groups"
            )

    def feature_count(self, samples: int) -> int:
        """Return the number of features that the convolutions compute from a number of samples."""
        for kernel, stride in zip(self.conv_kernels, self.conv_strides, strict=True):
            samples = (samples - kernel) // stride + 1
        return samples

    def first_frame(self, count: int) -> int:
        """Return the index of the first of the ``count`` frames in the middle of a window of audio.

        Raises
        ------
        UsageError
            If the window has fewer than ``count`` frames.
        """
        frames = self.feature_count(WINDOW)
        if count > frames:
            raise UsageError(
                f"the audio encoder makes {frames} frames of {WINDOW} samples, the model takes {count} of them"
            )
        return frames // 2 - count // 2


@dataclass(frozen=True)
class ClipConfig:
    """Dimensions of a CLIP image encoder (open_clip's ViT).

    Parameters
    ----------
    dim, layers, heads, ffn_dim : int
        Width, number of blocks that are run, attention heads, hidden width of the feed-forward. The file of the encoder
        has one more block, which is not run.
    patch, side : int
        Number of pixels along a patch, and along the square picture that the encoder takes.
    norm_eps : float
        Epsilon of every LayerNorm of the encoder.

    Raises
    ------
    UsageError
        If two dimensions of the encoder contradict each other.
    """

    dim: int = 1280
    layers: int = 31
    heads: int = 16
    ffn_dim: int = 5120
    patch: int = 14
    side: int = 224
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, ("dim", "layers", "heads", "ffn_dim", "patch", "side"), "the image encoder's ")
        if self.dim % self.heads or self.side % self.patch or not self.norm_eps > 0:
            raise UsageError(
                f"the image encoder's width {self.dim} is no multiple of {self.heads} heads, its {self.side} pixels "
                f"are none of patches of {self.patch}, or its norm_eps {self.norm_eps} is not above 0"
            )

    @property
    def tokens(self) -> int:
        """Number of features of a picture: one for each patch, and the class token."""
        return (self.side // self.patch) ** 2 + 1


@dataclass(frozen=True)
class VaeConfig(ABC):
    """Base class of the dimensions of a VAE. Each kind of VAE derives a frozen dataclass from this class. The fields go
    into the manifest.

    Strides and channels describe the latents, and must equal the strides and channels of the model's stream and output.
    """

    kind: ClassVar[str]
    """Name of the kind of VAE, for `media.vaes.vae_named`."""
    encodes: ClassVar[bool] = True
    """Whether the VAE has an encoder, which encodes start pictures. False for a VAE that only decodes."""
    shares_rows: ClassVar[bool] = False
    """Whether each rank (GPU) can decode some pixel rows of a picture; see `Vae.shared_decoder`."""
    encodes_on: ClassVar[bool] = False
    """Whether the encoder can encode grey frames after a picture; see `Vae.picture_encoder`."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Name of the VAE in words, for people. The manifest, the notes of a build and `inspect` show this name."""

    @property
    @abstractmethod
    def latent_channels(self) -> int:
        """Number of channels of a latent."""

    @property
    @abstractmethod
    def spatial_stride(self) -> int:
        """Number of pixels along one side of a latent cell."""

    @property
    @abstractmethod
    def temporal_stride(self) -> int:
        """Number of video frames to which a latent frame is decoded; the first latent frame of a stream is decoded to
        one."""

    @property
    def encodes_video(self) -> bool:
        """Whether the VAE can encode a video chunk by chunk; see `Vae.video_encoder`."""
        return False

    @property
    def computes_fp8(self) -> bool:
        """Whether the decoder multiplies fp8 numbers in those convolutions for which fp8 tile sizes were measured on
        the GPU."""
        return False

    def with_fp8(self) -> VaeConfig | None:
        """Return the config of this VAE with fp8 in its decoder; None if the decoder cannot use fp8."""
        return None

    @property
    def fp8_channels(self) -> frozenset[int]:
        """Channel counts for fp8: a convolution of the decoder can multiply fp8 numbers if its input and output channel
        counts are both in this set."""
        return frozenset()

    def video_frames(self, frames: int, *, first: bool) -> int:
        """Return the number of video frames to which ``frames`` latent frames are decoded, at the start of a stream or
        later in it."""
        return self.temporal_stride * frames - (self.temporal_stride - 1) * first

    def decode_parts(self, frames: int, rows: int, columns: int, itemsize: int) -> int:
        """Return the number of equal parts in which a chunk of ``frames`` latent frames is decoded. Each part is one
        engine call, so that the memory of a call is bounded. A latent frame has ``rows`` times ``columns`` cells, and a
        number of an activation has ``itemsize`` bytes.
        """
        del frames, rows, columns, itemsize
        return 1
