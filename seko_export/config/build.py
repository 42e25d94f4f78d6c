"""The whole configuration of one build: model, stream, schedule, cache format, kernels, device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from seko_export.config.attention import ATTENTIONS, TORCH, Attention
from seko_export.config.media import ClipConfig, HubertConfig, TextEncoderConfig, VaeConfig
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import (
    LayerGroup,
    PoolConfig,
    StreamConfig,
    with_commas,
)
from seko_export.errors import UsageError
from seko_kernels.attention import SMALLEST_HEAD_DIM
from seko_kernels.formats import ScaleTensor
from seko_kernels.kv_formats import KvFormat
from seko_kernels.kv_schemes import kv_format
from seko_kernels.lossy_kv import RowLayout
from seko_kernels.matmul import MATRIX_UNIT
from seko_kernels.scratch import scratch_scales

MOST_RANKS = 8  # GPUs of one box


@dataclass(frozen=True)
class BuildConfig:
    """Everything that determines one artifact.

    Parameters
    ----------
    model, stream, schedule
        Dimensions, layout and times.
    kv_scheme : str
        Name of the KV scheme (`seko_kernels.kv_schemes.KvScheme`): ``bf16`` and ``fp32`` are exact, all others
        quantised.
    device : str
        ``cpu`` or ``cuda``.
    text : TextEncoderConfig, optional
        The prompt encoder; without it the artifact takes text embeddings.
    vae : VaeConfig, optional
        Decodes latents and encodes start pictures; without it the artifact returns latents.
    audio : HubertConfig, optional
        Encodes the voice; without it an artifact of a model that hears takes audio features.
    image : ClipConfig, optional
        Encodes the portrait beside the text; without it a model with a picture branch takes CLIP's features.
    pool : PoolConfig, optional
        Sessions that share engine calls; without it every call carries the whole batch.
    fused : bool
        Whether the layers run in Seko's kernels (`families.layers.fused_block`) or in plain torch.
    fp8 : bool
        Whether the matmuls of fused layers are in fp8, weights and activations.
    fp8_except : tuple of int
        Layers whose matmuls are not in fp8, ascending.
    attention : str
        A name of `config.attention.ATTENTIONS`: ``torch``; ``bf16``: Seko's 16-bit kernel; ``fp8``: reads the past of
        an FP4 cache in 8 bits and the chunk's own tokens unquantised.
    resident_window : bool
        Whether the past is converted to 8 bits once a chunk, for all layers at once, instead of in every pass.
    archs : tuple of str
        The GPUs that it is for, ``sm_89`` and the like, where none of them need be here; empty: this machine's device.
    ranks : int
        Processes that make each chunk together, one a GPU: each has a share of the tokens and, in attention and in its
        cache, of the heads.

    Raises
    ------
    UsageError
        If text encoder or VAE do not fit the model, or an option contradicts another.
    """

    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule
    kv_scheme: str
    device: str
    text: TextEncoderConfig | None = None
    vae: VaeConfig | None = None
    pool: PoolConfig | None = None
    fused: bool = False
    fp8: bool = False
    fp8_except: tuple[int, ...] = ()
    attention: str = TORCH.name
    resident_window: bool = False
    archs: tuple[str, ...] = ()
    audio: HubertConfig | None = None
    image: ClipConfig | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if not all(group.layers for group in self.layer_groups):
            raise UsageError(
                f"--layer-rings {','.join(map(str, self.stream.layer_rings))} names rings that none of the "
                f"{self.model.layers} layers has"
            )
        if self.ranks != 1:
            self._check_ranks()
        if self.stream.offload_cache:
            self._check_offloading()
        if self.attention not in ATTENTIONS:
            raise UsageError(
                f"--attention {self.attention!r} is not known: expected one of {', '.join(ATTENTIONS)}"
            )
        if refusal := self.no_attention(self.attention_kind):
            raise UsageError(f"--attention {self.attention}: {refusal}; take --attention torch")
        if self.resident_window and (refusal := self.no_resident_window):
            raise UsageError(f"--resident-window: {refusal}; leave it out")
        if self.fp8 or self.fp8_except:
            self._check_fp8()
        if self.text is not None and self.text.dim != self.model.text_dim:
            raise UsageError(
                f"the text encoder is {self.text.dim} wide, {self.model.name!r} takes {self.model.text_dim}: they are "
                "not of one model"
            )
        if self.audio is not None:
            self._check_audio(self.audio)
        if self.image is not None:
            self._check_image(self.image)
        if self.vae is None:
            return
        strides = (self.vae.spatial_stride, self.vae.temporal_stride)
        expected = (self.stream.spatial_stride, self.stream.temporal_stride)
        if strides != expected:
            raise UsageError(
                f"the VAE's strides are {strides[0]} pixels and {strides[1]} frames, expected {expected[0]} and "
                f"{expected[1]}, which the stream is laid out for"
            )
        if self.vae.latent_channels != self.model.out_channels:  # what goes in may have a condition beside it
            raise UsageError(
                f"the VAE has {self.vae.latent_channels} latent channels, {self.model.name!r} gives "
                f"{self.model.out_channels}: they are not of one model"
            )

    def _check_audio(self, audio: HubertConfig) -> None:
        heard = getattr(self.model, "audio_dim", None)
        if heard is None:
            raise UsageError(f"--audio-encoder: {self.model.name!r} takes no sound; leave it out")
        if audio.dim != heard:
            raise UsageError(
                f"the audio encoder is {audio.dim} wide, {self.model.name!r} takes {heard}: they are not of one model"
            )

    def _check_image(self, image: ClipConfig) -> None:
        taken = tuple(getattr(self.model, name, 0) for name in ("image_tokens", "image_dim"))
        if not taken[1]:
            raise UsageError(
                f"--image-encoder: {self.model.name!r} takes no features of a picture; leave it out"
            )
        if taken != (image.tokens, image.dim):
            raise UsageError(
                f"the image encoder makes {image.tokens} features, each {image.dim} wide; {self.model.name!r} takes "
                f"{taken[0]}, each {taken[1]} wide: they are not of one model"
            )

    def _check_offloading(self) -> None:
        if self.pool is not None:
            raise UsageError(
                "--offload-cache contradicts --sessions: the sessions of a pool move rows to and from the device, not "
                "layers; leave one of them out"
            )
        if not any(self.device_layers(group) for group in self.layer_groups):
            raise UsageError(
                f"--offload-cache: the device would hold all of the {self.model.layers} layers of {self.model.name!r}; "
                "leave it out"
            )

    def _check_ranks(self) -> None:
        heads = self.model.heads
        can = tuple(count for count in range(1, MOST_RANKS + 1) if heads % count == 0)
        if self.ranks not in can:
            raise UsageError(
                f"--ranks {self.ranks}: ranks share the {heads} heads of {self.model.name!r} evenly, and are at most "
                f"{MOST_RANKS}; give one of {with_commas(can)}"
            )

    def _check_fp8(self) -> None:
        layers = self.model.layers
        if not self.fp8:
            raise UsageError(f"--fp8-except {with_commas(self.fp8_except)}: it belongs to --fp8")
        if not all(low < high for low, high in pairwise((-1, *self.fp8_except, layers))):
            raise UsageError(
                f"--fp8-except {with_commas(self.fp8_except)}: expected rising numbers of layers, 0 to {layers - 1}"
            )
        if len(self.fp8_except) == layers:
            raise UsageError(
                f"--fp8-except {with_commas(self.fp8_except)} leaves --fp8 no layer: leave both out"
            )
        if not self.fused:
            raise UsageError(
                "--fp8 takes the fused kernels, and this build's layers are plain: --kernels, the target or the "
                "backend has none"
            )
        sides = (self.model.dim, self.model.ffn_dim)
        if any(side % MATRIX_UNIT for side in sides):
            raise UsageError(
                f"--fp8: both sides of an fp8 matrix must be multiples of {MATRIX_UNIT}, {self.model.name!r} has "
                f"widths {sides[0]} and {sides[1]}"
            )

    @property
    def eager_device(self) -> str:
        """Where goldens are recorded: the CPU, where the GPUs that engines are for need not be here."""
        return "cpu" if self.archs else self.device

    @property
    def rows(self) -> int:
        """Streams for which the artifact holds state."""
        return self.stream.batch if self.pool is None else self.pool.sessions

    @property
    def slots(self) -> int:
        """Rows of the caches. A pool has one more: batch indices of a call without a session write to it."""
        return self.rows + (self.pool is not None)

    @property
    def call_rows(self) -> int:
        """Rows of the largest call."""
        return self.stream.batch if self.pool is None else self.pool.buckets[-1]

    @property
    def as_batch(self) -> BuildConfig:
        """The same model without a pool, as one batch with the rows of the largest call, for one rank. Goldens are
        recorded with it.
        """
        return replace(self.one_rank, pool=None, stream=replace(self.stream, batch=self.call_rows))

    @property
    def one_rank(self) -> BuildConfig:
        """The same build for one rank."""
        return replace(self, ranks=1)

    @property
    def decode_ranks(self) -> int:
        """How many ranks share the decoding of a chunk, each some rows of the pictures; 1: each decodes it whole."""
        return 1 if self.vae is None or self.no_shared_decoding else self.ranks

    @property
    def no_shared_decoding(self) -> str | None:
        """Why each of several ranks decodes whole pictures; None if it does not."""
        if self.vae is None or self.ranks == 1:
            return None
        rows = self.stream.latent_height
        if rows % self.ranks:
            return f"{self.ranks} ranks cannot share the {rows} rows of the latents evenly"
        return (
            None if self.vae.shares_rows else f"the VAE {self.vae.kind!r} has no decoder for a part of them"
        )

    @property
    def attention_kind(self) -> Attention:
        """The attention over the cache."""
        return ATTENTIONS[self.attention]

    def no_attention(self, kind: Attention) -> str | None:
        """Return why an attention does not support this build on any GPU; None if it does."""
        size = self.model.head_dim
        if kind.own_kernel and not self.fused:
            return "it is of fused layers, and this build's are plain"
        if kind.head_dim is not None and self.device == "cuda" and size != kind.head_dim:
            return f"it takes heads of {kind.head_dim} channels, not {size}"
        if not kind.past_in_8_bits:
            return None
        if not self.kv.read_in_8_bits:
            return f"it reads an FP4 cache, this build's is {self.kv_scheme}"
        if size < SMALLEST_HEAD_DIM or size & (size - 1):
            return f"it takes heads of a power of two of at least {SMALLEST_HEAD_DIM} channels, not {size}"
        least = self.stream.pinned_frames + min(group.ring_frames for group in self.layer_groups)
        if least == self.stream.chunk_frames:
            return f"it reads the past in fp8, and a cache of {least} frames holds the chunk alone"
        references, chunk = self.stream.reference_frames, self.stream.chunk_frames
        if references % chunk and (references > chunk or chunk % references):
            # A chunk of references is filled up with copies, or with zeros that no other attention sees.
            return (
                f"a chunk sees all of itself, so as many reference frames as fill chunks of {chunk}, or divide one, "
                f"not {references}"
            )
        return None

    @property
    def no_resident_window(self) -> str | None:
        """Why this build cannot keep the past in 8 bits for all passes of a chunk; None if it can."""
        if not self.attention_kind.past_in_8_bits:
            return (
                "it holds what 8-bit attention reads (--attention fp8, over an FP4 cache), and this build's attention "
                f"is {self.attention}"
            )
        if self.stream.pass_caches:
            return "each denoise pass has a cache of its own, whose past no other pass reads"
        if self.stream.offload_cache:
            return "its cache lies on the host to spare the memory that the window takes"
        return None

    @property
    def lossless(self) -> bool:
        """Whether the cache and all matmuls are exact, so that the engines differ from the eager model by rounding
        only.
        """
        return self.kv_scheme == self.exact_scheme and not self.fp8

    @property
    def scales(self) -> tuple[ScaleTensor, ...]:
        """Constants of one layer: those of the cache format and of the fused kernels."""
        own = scratch_scales(self.model.heads) if self.attention_kind.past_in_8_bits else ()
        return (*self.kv.scale_tensors, *own)

    @property
    def as_exact(self) -> BuildConfig:
        """The same model with an exact cache, in plain torch: lossy builds are calibrated on it and compared with it.

        It runs during the build only, so it may keep its cache on the host or the device.
        """
        return replace(
            self,
            kv_scheme=self.exact_scheme,
            stream=replace(self.stream, offload_cache=False),
            fused=False,
            fp8=False,
            fp8_except=(),
            attention=TORCH.name,
            resident_window=False,
            ranks=1,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype: bfloat16 on a GPU, float32 on a CPU."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def exact_scheme(self) -> str:
        """The exact KV scheme on this device."""
        return exact_scheme_of(self.device)

    @property
    def kv(self) -> KvFormat:
        """The cache format, of a rank's heads."""
        s, n = self.stream, self.stream.frame_tokens
        row = RowLayout(s.pinned_frames * n, s.ring_frames * n, s.chunk_tokens)
        return kv_format(
            self.kv_scheme,
            self.model.heads // self.ranks,
            self.model.head_dim,
            self.dtype,
            row,
            before_rope=s.window_positions,
        )

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups, the one with the largest ring first."""
        s = self.stream
        rings = s.layer_rings or (s.ring_frames,)
        return tuple(
            LayerGroup(
                "" if ring == s.ring_frames else f"ring{ring}",
                ring,
                tuple(layer for layer in range(self.model.layers) if rings[layer % len(rings)] == ring),
            )
            for ring in sorted(set(rings), reverse=True)
        )

    @property
    def cache_passes(self) -> int:
        """How many passes of a chunk have a cache of their own."""
        return len(self.schedule.timesteps) if self.stream.pass_caches else 1

    def device_layers(self, group: LayerGroup) -> int:
        """Layers of a group's offloaded cache that the device holds at a time; 0: so few that all may stay there.

        Two: one that is read and one that is being copied. Three for an odd number of layers, so that the first layer
        can be copied while the last is read.
        """
        layers = len(group.layers) * self.cache_passes
        seats = 2 + layers % 2
        return seats if seats < layers else 0

    def of_layer_group(self, group: LayerGroup) -> BuildConfig:
        """The same build as if all layers were in this group."""
        return replace(self, stream=replace(self.stream, ring_frames=group.ring_frames, layer_rings=()))

    def row_tokens(self, part: str) -> int:
        """Tokens of one row in a cache tensor with this ``part``; see `CacheTensor`."""
        frames = {
            "cache": self.stream.cache_frames,
            "sink": self.stream.pinned_frames,
            "ring": self.stream.ring_frames,
        }
        return frames[part] * self.stream.frame_tokens


def exact_scheme_of(device: str) -> str:
    """Return the exact cache format of a device."""
    return "bf16" if device == "cuda" else "fp32"
