"""Configuration of a video build: layout, schedule, cache format and media, and their checks against model and
target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from seko_export.config.attention import Attention
from seko_export.config.build import BuildConfig, WorkloadConfig
from seko_export.config.media import ClipConfig, HubertConfig, TextEncoderConfig, VaeConfig
from seko_export.config.model import ModelConfig
from seko_export.config.pool import PoolConfig, with_commas
from seko_export.config.schedule import RENOISE, Schedule
from seko_export.config.stream import REBUILD, LayerGroup, StreamConfig
from seko_export.config.target import MOST_RANKS
from seko_export.errors import UsageError
from seko_kernels.attention import SMALLEST_HEAD_DIM
from seko_kernels.formats import ScaleTensor
from seko_kernels.kv_formats import KvFormat
from seko_kernels.kv_schemes import kv_format
from seko_kernels.lossy_kv import RowLayout
from seko_kernels.matmul import MATRIX_UNIT
from seko_kernels.scratch import scratch_scales
from seko_runtime.video.manifest import Viewer
from seko_runtime.video.schedule import UNIPC


@dataclass(frozen=True)
class VideoConfig(WorkloadConfig):
    """The video workload's part of a build.

    Parameters
    ----------
    stream : StreamConfig
        Layout of the video stream.
    schedule : Schedule
        Timesteps of a chunk's passes.
    kv_scheme : str
        Name of the KV scheme (`seko_kernels.kv_schemes.KvScheme`): ``bf16`` and ``fp32`` are exact, all others
        quantised.
    text : TextEncoderConfig, optional
        Dimensions of the text encoder. An artifact without a text encoder takes text embeddings.
    vae : VaeConfig, optional
        Dimensions of the VAE, which decodes latents and encodes start pictures; an artifact without a VAE returns
        latents.
    pool : PoolConfig, optional
        Number of sessions that share engine calls; without a pool every call carries the whole batch.
    audio : HubertConfig, optional
        Dimensions of the audio encoder. Without an audio encoder, an artifact of a model with audio input takes audio
        features.
    image : ClipConfig, optional
        Dimensions of the image encoder for the pictures of a picture branch. Without an image encoder, an artifact of a
        model with a picture branch takes CLIP's features.
    vae_encoder : VaeConfig, optional
        Dimensions of the VAE that encodes pictures, where ``vae`` only decodes.
    viewer : Viewer, optional
        What the artifact brings for the person who meets it.

    Raises
    ------
    UsageError
        If options contradict each other, or a VAE's strides differ from the stream's.
    """

    stream: StreamConfig
    schedule: Schedule
    kv_scheme: str
    text: TextEncoderConfig | None = None
    vae: VaeConfig | None = None
    pool: PoolConfig | None = None
    audio: HubertConfig | None = None
    image: ClipConfig | None = None
    vae_encoder: VaeConfig | None = None
    viewer: Viewer | None = None

    def __post_init__(self) -> None:
        if self.schedule.first_timesteps and self.stream.pass_caches:
            raise UsageError(
                "--first-timesteps: this model has a cache for each pass, so all chunks have the same passes; leave it "
                "out"
            )
        if self.stream.motion_strength and (least := self.schedule.least_strength) > (
            self.stream.strength or 0
        ):
            raise UsageError(
                f"--strength {self.stream.strength}: with passes at {list(self.schedule.timesteps)}, this model "
                f"takes {least:g} to 1; give such a strength, or other --timesteps"
            )
        if self.stream.strength is not None and self.schedule.sampler == UNIPC:
            raise UsageError(
                f"--strength {self.stream.strength}: the sampler {UNIPC} has weights for fixed noise levels, which a "
                "strength scales; give --sampler renoise or euler, or leave it out"
            )
        if self.stream.rolling:
            self._check_rolling()
        if self.stream.offload_cache and self.pool is not None:
            raise UsageError(
                "--offload-cache contradicts --sessions: the sessions of a pool move rows to and from the device, not "
                "layers; leave one of them out"
            )
        if self.vae_encoder is not None and (self.vae is None or self.vae.encodes):
            raise UsageError("--vae-encoder is for a --vae that only decodes: leave it out")
        if self.vae_encoder is not None and not self.vae_encoder.encodes:
            raise UsageError(
                f"--vae-encoder: a {self.vae_encoder.title} encodes no pictures; give a whole VAE"
            )
        expected = (self.stream.spatial_stride, self.stream.temporal_stride)
        for vae in self.vaes:
            strides = (vae.spatial_stride, vae.temporal_stride)
            if strides != expected:
                raise UsageError(
                    f"the VAE's strides are {strides[0]} pixels and {strides[1]} frames, expected {expected[0]} and "
                    f"{expected[1]}, which the stream is laid out for"
                )

    def _check_rolling(self) -> None:
        schedule, s = self.schedule, self.stream
        times = schedule.first_timesteps
        if (
            len(times) < 2
            or schedule.timesteps != times[:1]
            or schedule.sampler != RENOISE
            or schedule.own_sigmas
            or schedule.renoise_sigmas
        ):
            raise UsageError(
                "--rolling: --first-timesteps are the times of a pass's chunks, the newest one's first, of at least "
                "two chunks, and --timesteps is the first of them alone; the sampler is renoise, without --sigmas "
                f"and --renoise-sigmas. Got --first-timesteps {','.join(map(str, times))} and --timesteps "
                f"{','.join(map(str, schedule.timesteps))}, sampler {schedule.sampler}"
            )
        frames = self.chunks_at_once * s.chunk_frames
        if s.ring_frames < s.sink_frames + frames:
            raise UsageError(
                f"--ring-frames {s.ring_frames}: attention of a pass sees the sink and {self.chunks_at_once} chunks, "
                f"so expected at least {s.sink_frames + frames}"
            )

    @property
    def vaes(self) -> tuple[VaeConfig, ...]:
        """The VAEs of the build: the VAE that decodes and, if pictures are encoded by another VAE, the VAE that
        encodes."""
        return tuple(vae for vae in (self.vae, self.vae_encoder) if vae is not None)

    @property
    def video_vae(self) -> VaeConfig | None:
        """The VAE that encodes input video, if the build has one: the one that encodes pictures, else a tiny one."""
        return next((vae for vae in self.vaes[::-1] if vae.encodes_video), None)

    @property
    def encoding_vae(self) -> VaeConfig | None:
        """The VAE that encodes pictures, if the build has one."""
        return next((vae for vae in self.vaes if vae.encodes), None)

    @property
    def rows(self) -> int:
        """Number of sessions for which the artifact holds state."""
        return self.stream.batch if self.pool is None else self.pool.sessions

    @property
    def state_rows(self) -> int:
        """Number of rows of the caches. A pool has one more row than sessions, the spare row, to which unused batch
        indices of a call write."""
        return self.rows + (self.pool is not None)

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """Numbers of rows of a pool's calls, ascending."""
        return None if self.pool is None else self.pool.buckets

    @property
    def cache_passes(self) -> int:
        """Number of passes of a chunk that have a KV cache of their own."""
        return len(self.schedule.timesteps) if self.stream.pass_caches else 1

    @property
    def chunks_at_once(self) -> int:
        """Number of chunks that a pass denoises."""
        return len(self.schedule.first_timesteps) if self.stream.rolling else 1

    @property
    def call_rows(self) -> int:
        """Number of rows of the largest call."""
        return self.stream.batch if self.pool is None else self.pool.buckets[-1]


@dataclass(frozen=True)
class VideoBuild(BuildConfig):
    """The configuration of a build of a video artifact.

    Raises
    ------
    UsageError
        If the dimensions of an encoder or of the VAE contradict the model, or an option is impossible for the layers.
    """

    model: ModelConfig
    workload: VideoConfig

    def __post_init__(self) -> None:
        work, target = self.workload, self.target
        if not all(group.layers for group in self.layer_groups):
            raise UsageError(
                f"--layer-rings {','.join(map(str, work.stream.layer_rings))} names rings that none of the "
                f"{self.model.layers} layers has"
            )
        if target.ranks != 1:
            self._check_ranks()
        if self.model.front_tokens:
            self._check_front_tokens()
        if work.stream.offload_cache:
            self._check_offloading()
        if target.offload_text and work.text is None:
            raise UsageError(
                "--offload-text: this build has no text encoder; name one with --text-encoder, or leave it out"
            )
        if refusal := self.no_attention(target.attention_kind):
            raise UsageError(f"--attention {target.attention}: {refusal}; take --attention torch")
        if work.stream.rolling:
            self._check_rolling()
        if work.stream.context == REBUILD and (self.target.ranks > 1 or work.kv_scheme != self.exact_scheme):
            option = f"--ranks {self.target.ranks}" if self.target.ranks > 1 else f"--kv {work.kv_scheme}"
            raise UsageError(
                f"{option}: a cache that is made again before each chunk (--context {REBUILD}) is built exact and on "
                "one GPU; leave it out"
            )
        if work.stream.sink_average and self.kv.sink_tensors is None:
            raise UsageError(
                f"--kv {work.kv_scheme}: --sink-average changes the sink by less than quantised numbers can; take an "
                "exact cache, or an exact sink by -sink behind the format, such as fp4-sink"
            )
        if target.resident_window and (refusal := self.no_resident_window):
            raise UsageError(f"--resident-window: {refusal}; leave it out")
        if target.past_share < 1 and not target.attention_kind.past_in_8_bits:
            raise UsageError(
                f"--past-share {target.past_share:g}: it is for 8-bit attention (--attention fp8, over an FP4 cache), "
                f"and this build's attention is {target.attention}; leave it out"
            )
        if target.fp8:
            self._check_fp8()
        if work.text is not None and not self.model.takes_text:
            raise UsageError(f"--text-encoder: {self.model.name!r} takes no text; leave it out")
        if work.text is not None and work.text.dim != self.model.text_dim:
            raise UsageError(
                f"the text encoder is {work.text.dim} wide, {self.model.name!r} takes {self.model.text_dim}: they are "
                "not of one model"
            )
        if work.audio is not None:
            self._check_audio(work.audio)
        if work.image is not None:
            self._check_image(work.image)
        for vae in work.vaes:
            if vae.latent_channels != self.model.out_channels:
                # input channels may include a condition beside the latents
                raise UsageError(
                    f"the {vae.title} has {vae.latent_channels} latent channels, {self.model.name!r} gives "
                    f"{self.model.out_channels}: they are not of one model"
                )

    def _check_rolling(self) -> None:
        target, many = self.target, "passes over several chunks"
        if self.workload.kv_scheme != self.exact_scheme:
            raise UsageError(
                f"--kv {self.workload.kv_scheme}: {many} are built for an exact cache; leave it out"
            )
        for option, given in (
            (f"--ranks {target.ranks}", target.ranks > 1),
            ("--fp8", target.fp8),
            ("--kernels fused", target.fused),
            ("--offload-layers", target.offload_layers),
        ):
            if given:
                raise UsageError(f"{option}: {many} are built in plain layers on one GPU; leave it out")

    def _check_audio(self, audio: HubertConfig) -> None:
        heard = self.model.sound_width
        if heard is None:
            raise UsageError(f"--audio-encoder: {self.model.name!r} takes no sound; leave it out")
        if audio.dim != heard:
            raise UsageError(
                f"the audio encoder is {audio.dim} wide, {self.model.name!r} takes {heard}: they are not of one model"
            )

    def _check_image(self, image: ClipConfig) -> None:
        taken = self.model.picture_features
        if taken is None:
            raise UsageError(
                f"--image-encoder: {self.model.name!r} takes no features of a picture; leave it out"
            )
        tokens = image.tokens * self.model.seen_pictures
        if taken != (tokens, image.dim):
            raise UsageError(
                f"the image encoder makes {tokens} features, each {image.dim} wide; {self.model.name!r} takes "
                f"{taken[0]}, each {taken[1]} wide: they are not of one model"
            )

    def _check_offloading(self) -> None:
        if not any(self.device_layers(group) for group in self.layer_groups):
            raise UsageError(
                f"--offload-cache: the device would hold all of the {self.model.layers} layers of {self.model.name!r}; "
                "leave it out"
            )

    def _check_ranks(self) -> None:
        heads, ranks = self.model.heads, self.target.ranks
        can = tuple(count for count in range(1, MOST_RANKS + 1) if heads % count == 0)
        if ranks not in can:
            raise UsageError(
                f"--ranks {ranks}: ranks share the {heads} heads of {self.model.name!r} evenly, and are at most "
                f"{MOST_RANKS}; give one of {with_commas(can)}"
            )
        if self.workload.stream.strength is not None:
            raise UsageError(
                f"--ranks {ranks}: an input video (--strength) is encoded on one GPU so far; leave one of them out"
            )

    def _check_front_tokens(self) -> None:
        work = self.workload
        before = f"{self.model.name!r} has {self.model.front_tokens} tokens before its streams"
        if work.stream.reference_frames:
            raise UsageError(
                f"--reference-frames {work.stream.reference_frames}: {before}, which stay zeros: pictures of a person "
                "in their place are not built; leave it out"
            )
        if not work.stream.window_positions:
            raise UsageError(
                f"--stream-positions: {before}, from which the frames of a stream would move away; leave it out"
            )
        if work.stream.pass_caches or self.target.ranks > 1:
            raise UsageError(
                f"{before}, which the first chunk computes, in one cache and on one GPU: leave out --pass-caches and "
                "--ranks"
            )

    def _check_fp8(self) -> None:
        layers, excepted = self.model.layers, self.target.fp8_except
        if not all(low < high for low, high in pairwise((-1, *excepted, layers))):
            raise UsageError(
                f"--fp8-except {with_commas(excepted)}: expected rising numbers of layers, 0 to {layers - 1}"
            )
        if len(excepted) == layers:
            raise UsageError(f"--fp8-except {with_commas(excepted)} leaves --fp8 no layer: leave both out")
        if not self.target.fused:
            if self.target.device == "cpu":
                raise UsageError(
                    "--fp8 needs a GPU, and this build is for cpu; leave it out, or build for a GPU"
                )
            raise UsageError(
                "--fp8 takes the fused kernels, and this build's layers are plain: the target or the backend has none, "
                "or --ranks, which takes plain ones by default, is given without --kernels fused"
            )
        sides = (self.model.dim, self.model.ffn_dim)
        if any(side % MATRIX_UNIT for side in sides):
            raise UsageError(
                f"--fp8: both sides of an fp8 matrix must be multiples of {MATRIX_UNIT}, {self.model.name!r} has "
                f"widths {sides[0]} and {sides[1]}"
            )

    @property
    def as_batch(self) -> VideoBuild:
        """Return the same build without a pool, as one batch with the rows of the largest call, for one rank. The eager
        results of a build (goldens) are recorded with this configuration.
        """
        stream = replace(self.workload.stream, batch=self.workload.call_rows)
        return self.changed(ranks=1, pool=None, stream=stream)

    @property
    def decode_ranks(self) -> int:
        """Number of ranks (GPUs) that decode a chunk together, each some pixel rows; 1 if one rank decodes whole
        pictures."""
        return 1 if self.workload.vae is None or self.no_shared_decoding else self.target.ranks

    @property
    def no_shared_decoding(self) -> str | None:
        """The reason why ranks do not share decoding; None if they do."""
        vae, ranks = self.workload.vae, self.target.ranks
        if vae is None or ranks == 1:
            return None
        rows = self.workload.stream.latent_height
        if rows % ranks:
            return f"{ranks} ranks cannot share the {rows} rows of the latents evenly"
        return None if vae.shares_rows else f"the VAE {vae.kind!r} has no decoder for a part of them"

    def no_attention(self, kind: Attention) -> str | None:
        """Return the reason why an attention does not support this build on any GPU; None if the attention supports the
        build."""
        size = self.model.head_dim
        if kind.own_kernel and not self.target.fused:
            return "it is of fused layers, and this build's are plain"
        if kind.head_dim is not None and self.target.device == "cuda" and size != kind.head_dim:
            return f"it takes heads of {kind.head_dim} channels, not {size}"
        if not kind.past_in_8_bits:
            return None
        if not self.kv.read_in_8_bits:
            return f"it reads an FP4 cache, this build's is {self.workload.kv_scheme}"
        if size < SMALLEST_HEAD_DIM or size & (size - 1):
            return f"it takes heads of a power of two of at least {SMALLEST_HEAD_DIM} channels, not {size}"
        least = self.workload.stream.pinned_frames + min(group.ring_frames for group in self.layer_groups)
        if least == self.workload.stream.chunk_frames:
            return f"it reads cached frames in fp8, and a cache of {least} frames holds the chunk alone"
        references, chunk = self.workload.stream.reference_frames, self.workload.stream.chunk_frames
        if references % chunk and (references > chunk or chunk % references):
            # A chunk of reference frames is filled up with copies, or with zeros that only this attention would not
            # mask.
            return (
                f"a chunk sees all of itself, so as many reference frames as fill chunks of {chunk}, or divide one, "
                f"not {references}"
            )
        return None

    @property
    def no_resident_window(self) -> str | None:
        """The reason why this build cannot keep cached frames in 8 bits for all passes of a chunk; None if the build
        can."""
        if not self.target.attention_kind.past_in_8_bits:
            return (
                "it holds what 8-bit attention reads (--attention fp8, over an FP4 cache), and this build's attention "
                f"is {self.target.attention}"
            )
        if self.workload.stream.pass_caches:
            return "each denoise pass has a cache of its own, whose past no other pass reads"
        if self.workload.stream.offload_cache:
            return "its cache lies on the host to spare the memory that the window takes"
        return None

    @property
    def lossless(self) -> bool:
        """Whether the cache and all matmuls are exact, so that the engines differ from the eager model by rounding
        only.
        """
        return self.workload.kv_scheme == self.exact_scheme and not self.target.fp8

    @property
    def scales(self) -> tuple[ScaleTensor, ...]:
        """Constants of one layer that the cache format and the fused kernels need."""
        own = scratch_scales(self.model.heads) if self.target.attention_kind.past_in_8_bits else ()
        return (*self.kv.scale_tensors, *own)

    @property
    def as_exact(self) -> VideoBuild:
        """Return the same build with an exact KV cache, in plain torch. Builds with a quantised cache or fp8 weights
        are calibrated on the exact model, and compared with the exact model.

        The exact model runs during the build only, so its cache may be on the host or the device.
        """
        stream = replace(self.workload.stream, offload_cache=False)
        return self.changed(kv_scheme=self.exact_scheme, stream=stream, target=self.target.plain)

    @property
    def kv(self) -> KvFormat:
        """The format of the KV cache, with the heads of one rank."""
        s, n = self.workload.stream, self.workload.stream.frame_tokens
        row = RowLayout(s.pinned_frames * n, s.ring_frames * n, s.chunk_tokens)
        return kv_format(
            self.workload.kv_scheme,
            self.model.heads // self.target.ranks,
            self.model.head_dim,
            self.target.dtype,
            row,
            before_rope=s.window_positions or s.rolling or self.model.keys_before_rope,
        )

    def device_layers(self, group: LayerGroup) -> int:
        """Return the number of layers of a group's offloaded cache that the device holds at a time; 0 if the group has
        so few layers that all stay on the device.

        The device holds two layers: one that is read and one that is being copied. If the number of layers is odd, the
        device holds three layers, so that the first layer can be copied while the last layer is read.
        """
        layers = len(group.layers) * self.workload.cache_passes
        seats = 2 + layers % 2
        return seats if seats < layers else 0

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups, beginning with the group that has the largest ring."""
        s = self.workload.stream
        rings = s.layer_rings or (s.ring_frames,)
        return tuple(
            LayerGroup(
                "" if ring == s.ring_frames else f"ring{ring}",
                ring,
                tuple(layer for layer in range(self.model.layers) if rings[layer % len(rings)] == ring),
            )
            for ring in sorted(set(rings), reverse=True)
        )

    def of_layer_group(self, group: LayerGroup) -> VideoBuild:
        """Return the same build as if all layers had the ring size of this layer group."""
        stream = replace(self.workload.stream, ring_frames=group.ring_frames, layer_rings=())
        return self.changed(stream=stream)

    def row_tokens(self, part: str) -> int:
        """Return the number of tokens of one row in a cache tensor with this ``part``; see `CacheTensor`."""
        frames = {
            "cache": self.workload.stream.cache_frames,
            "sink": self.workload.stream.pinned_frames,
            "ring": self.workload.stream.ring_frames,
        }
        return frames[part] * self.workload.stream.frame_tokens
