"""Layout of a video stream: latents, chunk, cache, batch, layer groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

from seko_export.errors import UsageError

PATCH = 2  # latent cells per token along height and width; one latent frame along time
# How a finished chunk gets into the KV cache: by a context pass, by what its last denoise pass wrote, or by a context
# pass before the next chunk, whose cache is made again.
CONTEXT_PASS, REUSE, REBUILD = "pass", "reuse", "rebuild"
CONTEXTS = (CONTEXT_PASS, REUSE, REBUILD)


@dataclass(frozen=True)
class StreamConfig:
    """Layout of a video stream: picture size, chunk, KV cache, batch.

    Parameters
    ----------
    height, width : int
        Size of the video in pixels; multiples of the VAE's stride times the patch, which is 16 for a stride of 8.
    chunk_frames : int
        Number of latent frames that are denoised together (a chunk).
    sink_frames : int
        Number of latent frames at the start of the stream that are never evicted from the cache.
    ring_frames : int
        Number of reusable slots of the cache behind the sink, at least ``chunk_frames``. Once all reusable slots are
        full, a new frame takes the slot of the oldest frame.
    batch : int
        Number of rows that one engine call carries.
    fps : int
        Number of video frames per second, for reports and files.
    pass_caches : bool
        Whether each denoise pass writes a KV cache of its own (Seko-Talk); in this case there is no context pass.
    sink_average : float
        Weight, from 0 to below 1, with which the frames that a chunk evicts are averaged into the frames of the sink
        (Reward Forcing: 0.001). The average is computed in the cache's dtype. If 0, the sink stays as it was written.
    rolling : bool
        Whether a pass denoises several chunks, each at its own time (Rolling Forcing): as many as the schedule has
        times for a stream's first chunk. Attention then sees ``ring_frames`` frames at most, the sink included.
    context : str
        One of `CONTEXTS`. ``pass``: a context pass writes the keys and values of the finished chunk to the cache.
        ``reuse``: there is no context pass, and those of the chunk's last denoise pass stay in the cache. ``rebuild``:
        the cache holds a chunk and its context alone (Krea). Before each chunk but the first a context pass runs over
        the latents of the last chunk, whose first frame the VAE encodes again from the video.
    layer_rings : tuple of int
        Ring sizes of the layers, repeated from the first layer on; the largest is ``ring_frames``. Empty: all layers
        use ``ring_frames``.
    window_positions : bool
        Whether RoPE counts frames from the oldest frame in the cache, sink first (Seko-Talk), instead of from the start
        of the stream.
    rope_max_frames : int
        If not 0, RoPE positions are frame numbers from the start of the stream (only with window positions). If the
        newest frame's number, counted from 1, exceeds ``rope_max_frames``, the positions of frames after the sink are
        shifted back so that the newest frame has the number ``rope_max_frames``. The shift is the same in all layers,
        whatever their rings. If 0, RoPE counts the frames in the cache.
    references_apart : bool
        Whether RoPE does not count reference frames; only with window positions. Reference frames and the oldest other
        frame then both have position 0 (LightX2V's first positions of Seko-Talk).
    offload_cache : bool
        Whether the KV cache is in host memory and is copied to the device layer by layer.
    reference_frames : int
        Number of latent frames that are kept in the cache before the sink. A session supplies the reference frames,
        which are not part of its video.
    spatial_stride : int
        Number of pixels along one side of a latent cell, in the VAE whose latents the model makes.
    temporal_stride : int
        Number of video frames in a latent frame, except the first latent frame, in the VAE whose latents the model
        makes.
    strength : float or None
        If not None, a session takes a video, and each chunk starts from its latents: this share of a chunk's first
        latents is noise, unless the session says another. 0 returns the video, 1 leaves nothing of it.
    motion_strength : bool
        Whether the model takes an input video as StreamDiffusionV2 does: the encoder's latents without normalisation,
        less noise where the video moves, and a first pass at an earlier time than its noise has.

    Raises
    ------
    UsageError
        If the sizes of the stream contradict each other.
    """

    height: int
    width: int
    chunk_frames: int
    sink_frames: int
    ring_frames: int
    batch: int = 1
    fps: int = 16
    pass_caches: bool = False
    layer_rings: tuple[int, ...] = ()
    window_positions: bool = False
    offload_cache: bool = False
    reference_frames: int = 0
    spatial_stride: int = 8
    temporal_stride: int = 4
    rope_max_frames: int = 0
    references_apart: bool = False
    strength: float | None = None
    context: str = CONTEXT_PASS
    sink_average: float = 0.0
    motion_strength: bool = False
    rolling: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_rings", tuple(self.layer_rings))  # JSON has no tuples
        if self.spatial_stride < 1 or self.temporal_stride < 1:
            raise UsageError(
                f"the VAE's strides are {self.spatial_stride} pixels and {self.temporal_stride} frames, expected at "
                "least 1"
            )
        unit = self.spatial_stride * PATCH
        for side in ("height", "width"):
            pixels = getattr(self, side)
            if pixels < unit or pixels % unit:
                below = "x".join(str(max(unit, size // unit * unit)) for size in (self.height, self.width))
                raise UsageError(
                    f"{side} {pixels} is no multiple of {unit} pixels (VAE stride {self.spatial_stride} times patch "
                    f"{PATCH}); the nearest video that fits is {below} (height x width)"
                )
        if self.chunk_frames < 1 or self.batch < 1 or self.fps < 1 or self.sink_frames < 0:
            raise UsageError(
                f"chunk_frames {self.chunk_frames}, batch {self.batch} and fps {self.fps} must be at least 1, "
                f"sink_frames {self.sink_frames} at least 0"
            )
        if self.reference_frames < 0:
            raise UsageError(f"reference_frames must be at least 0, got {self.reference_frames}")
        if self.rope_max_frames and not self.window_positions:
            raise UsageError(
                f"--rope-max-frames {self.rope_max_frames} moves positions while the stream runs: give "
                "--window-positions beside it"
            )
        if self.rope_max_frames and self.rope_max_frames < self.sink_frames + self.ring_frames:
            raise UsageError(
                f"--rope-max-frames {self.rope_max_frames} is below the {self.sink_frames + self.ring_frames} latent "
                "frames of sink and ring: two of them would have one position"
            )
        if self.references_apart and (
            not self.window_positions or self.rope_max_frames or self.reference_frames != 1
        ):
            raise UsageError(
                "--references-apart leaves the one reference frame out of the frames that are counted in the cache: "
                "give --window-positions and --reference-frames 1 beside it, and no --rope-max-frames"
            )
        if self.strength is not None and not 0 <= self.strength <= 1:
            raise UsageError(
                f"--strength {self.strength}: expected a share of noise, from 0 (the video as it came) to 1 (nothing "
                "of it)"
            )
        if self.context not in CONTEXTS:
            raise UsageError(f"--context {self.context}: expected one of {', '.join(CONTEXTS)}")
        if self.context == REBUILD:
            self._check_rebuild()
        if self.context == REUSE and self.pass_caches:
            raise UsageError(
                f"--context {REUSE}: this model has a cache for each pass, so there is no context pass to leave out; "
                "leave the option out"
            )
        if self.sink_average:
            self._check_sink_average()
        if self.rolling:
            self._check_rolling()
        if self.ring_frames < self.chunk_frames:
            raise UsageError(
                f"chunk of {self.chunk_frames} latent frames is larger than the ring of {self.ring_frames}: "
                "two frames of one chunk would share a slot; raise --ring-frames"
            )

        if self.layer_rings and max(self.layer_rings) != self.ring_frames:
            raise UsageError(
                f"the largest ring of the layers is {max(self.layer_rings)}, ring_frames is {self.ring_frames}: "
                "expected one number"
            )
        if self.layer_rings and min(self.layer_rings) < self.chunk_frames:
            raise UsageError(
                f"chunk of {self.chunk_frames} latent frames is larger than a layer's ring of {min(self.layer_rings)}: "
                "two frames of one chunk would share a slot; raise --layer-rings"
            )

    def _check_sink_average(self) -> None:
        option = f"--sink-average {self.sink_average}"
        if not 0 < self.sink_average < 1:
            raise UsageError(f"{option}: expected a weight from 0 to below 1, such as 0.001")
        if not self.window_positions:
            raise UsageError(
                f"{option}: frames of many positions are averaged, so keys are rotated when they are read: give "
                "--window-positions beside it"
            )
        if self.sink_frames != self.chunk_frames or self.ring_frames % self.chunk_frames:
            raise UsageError(
                f"{option} averages whole chunks into the sink: expected as many sink frames as the chunk's "
                f"{self.chunk_frames}, not {self.sink_frames}, and a ring of whole chunks, not of {self.ring_frames} "
                "frames"
            )
        for option_of, given in (
            ("--reference-frames", self.reference_frames),
            ("--layer-rings", self.layer_rings),
            ("--pass-caches", self.pass_caches),
            ("--offload-cache", self.offload_cache),
        ):
            if given:
                raise UsageError(
                    f"{option} is built for one cache of one ring on the device: leave out {option_of}"
                )

    def _check_rebuild(self) -> None:
        option = f"--context {REBUILD}"
        if {self.sink_frames, self.ring_frames} != {self.chunk_frames} or self.chunk_frames < 2:
            raise UsageError(
                f"{option}: the cache holds a chunk of at least 2 frames and its context of as many; expected "
                f"{self.chunk_frames} sink frames and {self.chunk_frames} ring frames, not {self.sink_frames} and "
                f"{self.ring_frames}"
            )
        if not self.window_positions:
            raise UsageError(f"{option}: a chunk has the same positions each time; give --window-positions")
        for option_of, given in (
            ("--reference-frames", self.reference_frames),
            ("--layer-rings", self.layer_rings),
            ("--pass-caches", self.pass_caches),
            ("--offload-cache", self.offload_cache),
            ("--sink-average", self.sink_average),
            ("--rope-max-frames", self.rope_max_frames),
            ("--strength", self.strength is not None),
        ):
            if given:
                raise UsageError(
                    f"{option} makes one cache on the device again before each chunk: leave out {option_of}"
                )

    def _check_rolling(self) -> None:
        if self.sink_frames != self.chunk_frames:
            raise UsageError(
                f"--rolling: the sink is the stream's first chunk, so expected {self.chunk_frames} sink frames, not "
                f"{self.sink_frames}"
            )
        for option, given in (
            ("--window-positions", self.window_positions),
            ("--reference-frames", self.reference_frames),
            ("--layer-rings", self.layer_rings),
            ("--pass-caches", self.pass_caches),
            ("--offload-cache", self.offload_cache),
            ("--sink-average", self.sink_average),
            (f"--context {self.context}", self.context != CONTEXT_PASS),
            ("--strength", self.strength is not None),
        ):
            if given:
                raise UsageError(
                    f"{option} is built for passes over one chunk, and a pass of this model has several; leave it out"
                )

    def sides_for(self, aspect: float) -> tuple[int, int]:
        """Return height and width of a video of this area in pixels, for an aspect of height / width.

        Sides of the picture are rounded down to whole patches in floating-point arithmetic, as in lingbot-world's code.
        Because of this rounding a picture of 832 x 480, at exactly that area, becomes 832 x 464.
        """
        area, stride = self.height * self.width, self.spatial_stride
        height, width = (
            int(side // stride // PATCH * PATCH) * stride
            for side in (math.sqrt(area * aspect), math.sqrt(area / aspect))
        )
        return height, width

    @property
    def has_context(self) -> bool:
        """Whether there is a context pass."""
        return self.context != REUSE and not self.pass_caches

    @property
    def cache_frames(self) -> int:
        """Number of latent frames that the KV cache holds: references, sink and ring."""
        return self.pinned_frames + self.ring_frames

    @property
    def pinned_frames(self) -> int:
        """Number of latent frames in the KV cache that are never evicted: references and sink."""
        return self.reference_frames + self.sink_frames

    @property
    def latent_height(self) -> int:
        """Number of rows of a latent frame."""
        return self.height // self.spatial_stride

    @property
    def latent_width(self) -> int:
        """Number of columns of a latent frame."""
        return self.width // self.spatial_stride

    @property
    def frame_tokens(self) -> int:
        """Number of tokens in one latent frame."""
        return (self.latent_height // PATCH) * (self.latent_width // PATCH)

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens in one chunk of one row, which are the queries of self-attention."""
        return self.chunk_frames * self.frame_tokens

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that a row's KV cache holds, which are the keys of self-attention."""
        return self.cache_frames * self.frame_tokens


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one ring size and therefore one engine.

    Parameters
    ----------
    name : str
        Name of the layer group; empty for the group with the largest ring.
    ring_frames : int
        Ring size of the group's layers, in latent frames.
    layers : tuple of int
        Numbers of the group's layers, ascending. A layer's index in this tuple is its index in the group's caches.
    """

    name: str
    ring_frames: int
    layers: tuple[int, ...]

    def own(self, name: str) -> str:
        """Return the name of a tensor or engine of this layer group: the plain name, with the group's name appended
        unless the group's name is empty.
        """
        return f"{name}.{self.name}" if self.name else name
