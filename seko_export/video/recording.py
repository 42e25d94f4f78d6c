"""Recording of goldens: chunks that the eager model makes for a fixed text and seed. `seko-run verify` replays the
goldens with the engines.

The eager model consists of the engines' own torch modules, which the runtime's session runs with the same programs. For
a quantised cache the model first runs with an exact cache. The run with an exact cache calibrates the scales, and the
chunks of this run are recorded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.registry import graph_of, video_family_of
from seko_export.goldens.eager import (
    GOLDEN_FILE,
    Engine,
    eager_engine,
    eager_manifest,
    eager_memory,
    write_goldens,
)
from seko_export.goldens.placement import buffer_room, home_bytes, placed
from seko_export.goldens.sensitivity import perturbed
from seko_export.host.progress import Progress
from seko_export.lowering.attention_backends import attention_backends
from seko_export.media.pieces import video_table
from seko_export.video.bounds import EagerChunk, difference, golden_bound
from seko_export.video.calibration import KvStatistics, layer_constants
from seko_runtime.backends.torch_memory import torch_dtype
from seko_runtime.format.manifest import Buffer
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.video.contract import PICTURE_CHANNELS, TEXT_ENCODED, TEXT_IDS, resolve_video
from seko_runtime.video.golden import cache_tensor, input_tensor, video_tensor
from seko_runtime.video.lockstep import Lockstep, opened_in_lockstep
from seko_runtime.video.manifest import Golden, GoldenBound, VideoManifest
from seko_runtime.video.opened_rows import open_video_rows
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.pool import Pool

TEXT = "text"  # name of the golden file's tensor with the text embeddings
REFERENCE = "reference"  # name of the tensor with the latents of the reference frames, if the build has any
GOLDEN_PROMPT = (
    # a sentence in the words of the sample's grammar, which any encoder can read
    "a red disc bouncing on a dark background"
)
LIVE_TEXT_TOKENS = 24  # tokens of the text; the rest is zero padding, as for a short prompt
NOTHING_AROUND: Mapping[str, Callable[[Engine], Engine]] = {}
VIDEO_BYTES = 1_000_000  # most bytes of the recorded frames of one chunk


@dataclass(frozen=True)
class Record:
    """The recorded chunks and everything needed to replay them.

    Parameters
    ----------
    text : Tensor or None
        The text embeddings that were used, [B, text tokens, text_dim] float32; None for a model that takes no text.
    seeds : tuple of int
        The seed of each row.
    scales : dict of str to Tensor
        Calibrated weights of the cache format, by name; empty for an exact format.
    chunks : dict of int to EagerChunk
        The recorded chunks by number.
    exact : dict of int to EagerChunk
        The recorded chunks with an exact cache; empty if the format is exact.
    bounds : tuple of GoldenBound
        Bounds for `verify`, one for each recorded chunk.
    cache_step : int
        Distance in tokens between two samples of the cache.
    video_step : int
        Distance in pixels between two samples of the video; 0 without a VAE.
    prompt : str or None
        The sentence that was encoded to the text; None if the text is random numbers.
    reference : Tensor or None
        The reference frames, [B, C, R, h, w] float32; None if the build has no reference frames.
    inputs : mapping of str to Tensor
        The caller's inputs of every chunk up to the last recorded one, by their names in the golden file.
    rounding : float
        Effect of rounding: the relative error of the eager model's latents if the last bits of each pass's input are
        changed. The number is the largest error over the recorded chunks; with an exact cache only the first chunk is
        measured, to save time.
    """

    text: Tensor | None
    seeds: tuple[int, ...]
    scales: dict[str, Tensor]
    chunks: dict[int, EagerChunk]
    exact: dict[int, EagerChunk]
    bounds: tuple[GoldenBound, ...]
    cache_step: int
    video_step: int
    prompt: str | None
    reference: Tensor | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    rounding: float = 0.0

    @property
    def error_vs_exact(self) -> list[float]:
        """Relative error of the quantised cache against the exact cache, for each recorded chunk."""
        return [
            float((self.chunks[number].latents - exact.latents).norm() / exact.latents.norm())
            for number, exact in self.exact.items()
        ]

    @property
    def table(self) -> Golden:
        """The manifest's description of the recorded chunks (goldens)."""
        return Golden(
            GOLDEN_FILE,
            self.seeds,
            tuple(self.chunks),
            max(bound.latents for bound in self.bounds),
            text=None if self.text is None else TEXT,
            cache_step=self.cache_step,
            video_step=self.video_step,
            prompt=self.prompt,
            bounds=self.bounds,
            reference=None if self.reference is None else REFERENCE,
        )

    def write(self, folder: Path) -> None:
        """Write the golden file into an artifact's folder."""
        tensors = dict(self.inputs)
        if self.text is not None:
            tensors[TEXT] = self.text
        if self.reference is not None:
            tensors[REFERENCE] = self.reference
        tensors |= {f"exact.{number}": chunk.latents for number, chunk in self.exact.items()}
        for number, chunk in self.chunks.items():
            tensors[f"latents.{number}"] = chunk.latents
            if chunk.video is not None:
                tensors[video_tensor(number)] = chunk.video
            tensors |= {cache_tensor(name, number): sample for name, sample in chunk.cache.items()}
        write_goldens(folder, tensors)


def record(
    config: VideoBuild,
    weights: Mapping[str, Tensor],
    progress: Progress,
    ids: Tensor | None = None,
    wait_for_kernels: Callable[[], None] = lambda: None,
) -> Record:
    """Run the eager model and record two chunks: the first chunk of the stream, and the first chunk that evicts a frame
    from the cache.

    Parameters
    ----------
    config : VideoBuild
        The configuration of the build.
    weights : mapping of str to Tensor
        Weights of the model and tables of the schedule by name, on the CPU.
    progress : callable
        Function that is called for every chunk, to show progress.
    ids : Tensor, optional
        Token ids of `GOLDEN_PROMPT`, [1, text tokens] int64; without token ids the text is random numbers.
    wait_for_kernels : callable
        Function that is called before any of Seko's kernels of the layers.

    Returns
    -------
    Record
    """
    stream = config.workload.stream
    seeds = tuple(range(stream.batch))
    chunks = (0, -(-stream.cache_frames // stream.chunk_frames))
    on_device = {name: tensor.to(config.target.eager_device) for name, tensor in weights.items()}
    text = None
    if config.model.takes_text:
        text = golden_text(config) if ids is None else encoded_text(config, on_device, ids)
    exact_config = config.as_exact
    lossless = config.lossless
    statistics = KvStatistics(exact_config, config.kv)
    exact = run_eager(
        exact_config, on_device, text, seeds, chunks, progress, None if lossless else statistics
    )
    wait_for_kernels()
    scales: dict[str, Tensor] = {}
    first = other = exact
    if not lossless:
        scales = statistics.calibrate()
        scales |= layer_constants(config, {**weights, **scales})
        on_device |= {name: tensor.to(config.target.eager_device) for name, tensor in scales.items()}
        first = run_eager(config, on_device, text, seeds, chunks, progress, None)
        other = shaken = run_eager(config, on_device, text, seeds, chunks, progress, None, shake=True)
    else:
        shaken = run_eager(config, on_device, text, seeds, chunks[:1], progress, None, shake=True)
    on_device.clear()
    if config.target.eager_device == "cuda":
        torch.cuda.empty_cache()  # engines are compiled and the artifact is verified in other processes
    return Record(
        text,
        seeds,
        scales,
        first,
        {} if lossless else exact,
        bounds=tuple(golden_bound(config, first[number], other[number], exact[number]) for number in chunks),
        cache_step=stream.frame_tokens,
        video_step=video_step(config),
        prompt=None if ids is None else GOLDEN_PROMPT,
        rounding=max(
            difference(config, shaken_chunk, first[number]).latents for number, shaken_chunk in shaken.items()
        ),
        reference=golden_reference(config),
        inputs={
            input_tensor(name, chunk): tensor
            for chunk in (None, *range(chunks[-1] + 1))
            for name, tensor in video_family_of(config).golden_inputs(config, chunk).items()
        },
    )


def run_eager(
    config: VideoBuild,
    weights: Mapping[str, Tensor],
    text: Tensor | None,
    seeds: Sequence[int],
    chunks: Sequence[int],
    progress: Progress,
    statistics: KvStatistics | None,
    *,
    shake: bool = False,
) -> dict[int, EagerChunk]:
    """Return the requested chunks, computed in eager torch; with ``shake`` the last bits of each pass's input are
    changed."""
    chunks_made: dict[int, EagerChunk] = {}
    dtypes = {buffer.name: torch_dtype(buffer.dtype) for buffer in graph_of(config).buffers}
    step = video_step(config)
    with eager_session(config, weights, text, seeds, statistics, shake=shake) as session:
        on_host = home_bytes(session.manifest.buffers)
        details = f"{config.workload.kv_scheme}{', perturbed' * shake}"
        details += f", {on_host / 1e9:.1f} GB of its cache on the host" * bool(on_host)
        for index in range(chunks[-1] + 1):
            progress(f"recording goldens ({details})", index, chunks[-1] + 1)
            chunk = session.run_chunk(golden_inputs(config, index))
            if index in chunks:
                sample = session.cache_sample(config.workload.stream.frame_tokens)
                cache = {name: torch.from_numpy(numbers).to(dtypes[name]) for name, numbers in sample.items()}
                video = torch.from_numpy(chunk.video())[:, :, ::step, ::step].contiguous() if step else None
                chunks_made[index] = EagerChunk(torch.from_numpy(chunk.to_host()), cache, video)
    return chunks_made


@contextmanager
def eager_session(
    config: VideoBuild,
    weights: Mapping[str, Tensor],
    text: Tensor | None,
    seeds: Sequence[int],
    statistics: KvStatistics | None = None,
    *,
    shake: bool = False,
    reference: Tensor | None = None,
    around: Mapping[str, Callable[[Engine], Engine]] = NOTHING_AROUND,
) -> Iterator[Lockstep]:
    """Open the runtime's sessions over the eager modules, one for each row, without captured graphs and with the
    engines' attention.

    Parameters
    ----------
    config : VideoBuild
        The configuration of the build.
    weights : mapping of str to Tensor
        Every weight that the programs use, by name, on the build's device.
    text : Tensor or None
        Text embeddings, [B, text tokens, text_dim]; None for a model that takes no text.
    seeds : sequence of int
        The seed of each row.
    statistics : KvStatistics, optional
        Statistics to which the written keys and values are added.
    shake : bool
        Whether the last bits of each pass's input are changed, to measure the effect of rounding.
    reference : Tensor, optional
        Reference frames, [B, C, R, h, w]; default: those of `golden_reference`, if the build has reference frames.
    around : mapping of str to callable
        For names of engines, what makes the engine that runs in place of it.

    Yields
    ------
    Lockstep
    """
    pieces, probe = graph_of(config).pieces, video_family_of(config).cache_probe(config)
    engines = {name: eager_engine(piece) for name, piece in pieces.items()}
    if shake:
        engines[probe.perturbed] = perturbed(engines[probe.perturbed])
    if statistics is not None:
        engines |= {
            name: statistics.watch(engines[name], [argument.name for argument in piece.signature])
            for name, piece in pieces.items()
            if piece.key.role == probe.role
        }
    engines |= {name: wrap(engines[name]) for name, wrap in around.items()}
    memory = eager_memory(config)
    manifest = cast(VideoManifest, eager_manifest(config, weights))
    manifest = replace(manifest, buffers=placed_buffers(config, buffer_room(config, memory)))
    reference_frames = golden_reference(config) if reference is None else reference
    loaded = Loaded(manifest, resolve_video(manifest), engines, weights, lambda: memory)
    inputs = golden_inputs(config, None)
    beginnings = (
        {
            "seed": seed,
            "text": None if text is None else text[row : row + 1],
            "reference": None if reference_frames is None else reference_frames[row].numpy(),
            "inputs": {name: array[row] for name, array in inputs.items()},
        }
        for row, seed in enumerate(seeds)
    )
    with (
        torch.no_grad(),
        attention_backends(config.target.eager_device),
        Pool(open_video_rows(loaded, VideoOptions())) as pool,
        opened_in_lockstep(pool, beginnings) as sessions,
    ):
        yield sessions


def placed_buffers(config: VideoBuild, room: int | None) -> tuple[Buffer, ...]:
    """Return the buffer table of an eager stream, in which caches that do not fit into ``room`` bytes are placed on the
    host; see `goldens.placement.placed`. If ``room`` is None, all buffers stay on the device.
    """
    buffers = graph_of(config).buffers
    if (
        room is None
        or config.workload.pool is not None
        or not any(config.device_layers(group) for group in config.layer_groups)
    ):
        return buffers
    stream = replace(config.workload.stream, offload_cache=True)
    return placed(
        buffers,
        graph_of(config.changed(stream=stream, resident_window=False)).buffers,
        room,
        what=f"recording goldens with a {config.workload.kv_scheme} cache",
        advice="build with a smaller ring or batch",
    )


def golden_text(config: VideoBuild) -> Tensor:
    """Return seeded random numbers in place of text embeddings, [B, text tokens, text_dim] float32, zero-padded."""
    model = config.model
    shape = (config.workload.stream.batch, model.text_tokens, model.text_dim)
    text = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    text[:, LIVE_TEXT_TOKENS:] = 0
    return text


def golden_inputs(config: VideoBuild, chunk: int | None) -> dict[str, NDArray[Any]]:
    """Return the inputs that the model family defines for a recorded chunk, or for its session, in the form that a
    session takes."""
    inputs = video_family_of(config).golden_inputs(config, chunk)
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in inputs.items()
    }


def golden_reference(config: VideoBuild) -> Tensor | None:
    """Return seeded random latents as reference frames, [B, C, R, h, w] float32; None if the build has no reference
    frames."""
    s = config.workload.stream
    if not s.reference_frames:
        return None
    shape = (s.batch, config.model.out_channels, s.reference_frames, s.latent_height, s.latent_width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def encoded_text(config: VideoBuild, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Return one prompt for every row, encoded in eager torch, with the shape [B, text tokens, text_dim] float32.

    Parameters
    ----------
    config : VideoBuild
        The configuration of a build with a text encoder.
    weights : mapping of str to Tensor
        The weights of the artifact by name, on the build's device.
    ids : Tensor
        Token ids of the prompt, [1, text tokens] int64.
    """
    graph = graph_of(config)
    tensors: dict[str, Tensor] = {f"buffer:{TEXT_IDS}": ids.to(config.target.eager_device)}
    with torch.no_grad():
        for call in graph.programs["text"]:
            inputs = [
                weights[ref.removeprefix("weight:")] if ref.startswith("weight:") else tensors[ref]
                for ref in call.inputs
            ]
            results = eager_engine(graph.pieces[call.engine])(inputs)
            tensors |= dict(zip(call.outputs, results, strict=True))
    encoded = tensors[f"buffer:{TEXT_ENCODED}"]
    return encoded.float().cpu().expand(config.workload.stream.batch, -1, -1).contiguous()


def video_step(config: VideoBuild) -> int:
    """Return the distance in pixels at which recorded frames are sampled, so that the sampled frames fit into
    `VIDEO_BYTES`; 0 without a VAE."""
    video, batch = video_table(config), config.workload.stream.batch
    if video is None:
        return 0
    frames = batch * max(video.first_frames, video.chunk_frames)
    return next(
        step
        for step in range(1, video.height + video.width)
        if frames * -(-video.height // step) * -(-video.width // step) * PICTURE_CHANNELS <= VIDEO_BYTES
        or step >= max(video.height, video.width)
    )
