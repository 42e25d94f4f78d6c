"""Goldens: what the eager model makes of a fixed text and seed, recorded so that `verify` can replay it.

The eager model is the pieces themselves, run by the runtime's own session: same programs, same order. For a
lossy cache the exact track runs first; it calibrates the scales and is recorded beside the lossy one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from seko_export.backends.aoti import attention_backends
from seko_export.describe import describe
from seko_export.pieces import BuildConfig, FlatModule, Piece, dtype_name, make_buffers, make_pieces
from seko_export.progress import Progress
from seko_runtime.backends.aoti import torch_memory
from seko_runtime.backends.torch_memory import torch_dtype
from seko_runtime.golden import cache_tensor
from seko_runtime.manifest import Golden, Weight
from seko_runtime.session import Session

GOLDEN_FILE = "golden/golden.safetensors"
TEXT = "text"  # the tensor of that file that holds the text
LIVE_TEXT_TOKENS = 24  # the rest of the text is zero padding, as a short prompt's is

# How far an engine may be from the eager model over a golden chunk, as |a - b| / |b|. The two sum in other orders,
# and a chunk is five passes that feed on each other; with a quantised cache a rounding can also flip a code.
# Measured: float32 2.4e-7, bfloat16 at full size 1.3e-2 (docs/LOG.md). Planted faults in the tiny model give 0.02 (a
# stale ring) to 0.14 (layers swapped; docs/benchmarks/cpu.jsonl): too little for bfloat16's bound to see. So the cache
# is recorded too: there the same faults give 1 or more, in any format.
TOLERANCES = {
    torch.float32: {"exact": 1e-5, "lossy": 1e-3},
    torch.bfloat16: {"exact": 4e-2, "lossy": 4e-2},
}
CACHE_TOLERANCES = {
    torch.float32: {"exact": 1e-4, "lossy": 0.05},
    torch.bfloat16: {
        "exact": 0.1,
        "lossy": 0.5,
    },  # measured at full size: 0.024, and 0.22 of a token's FP4 bytes
}


@dataclass(frozen=True)
class EagerChunk:
    """One chunk of the eager model.

    Parameters
    ----------
    latents : Tensor
        [B, C, F, h, w] float32.
    cache : dict of str to Tensor
        By buffer, in its dtype: the first token of every slot after the chunk, [L, B*cache_frames, ...].
    """

    latents: Tensor
    cache: dict[str, Tensor]


@dataclass(frozen=True)
class Record:
    """What the eager model gave.

    Parameters
    ----------
    text : Tensor
        [B, text tokens, text_dim] float32, the text that was used.
    seeds : tuple of int
        One a row.
    scales : dict of str to Tensor
        Calibrated weights of the cache format, by name; empty for an exact one.
    chunks : dict of int to EagerChunk
        The recorded ones.
    exact : dict of int to EagerChunk
        The same on the exact track; empty for an exact format.
    tolerance, cache_tolerance : float
        For `verify`.
    cache_step : int
        Tokens between two samples of the cache.
    """

    text: Tensor
    seeds: tuple[int, ...]
    scales: dict[str, Tensor]
    chunks: dict[int, EagerChunk]
    exact: dict[int, EagerChunk]
    tolerance: float
    cache_tolerance: float
    cache_step: int

    @property
    def error_vs_exact(self) -> list[float]:
        """Relative error of the lossy track against the exact one, a recorded chunk each."""
        return [
            float((self.chunks[number].latents - exact.latents).norm() / exact.latents.norm())
            for number, exact in self.exact.items()
        ]

    @property
    def table(self) -> Golden:
        """The manifest's entry."""
        return Golden(
            GOLDEN_FILE,
            self.seeds,
            tuple(self.chunks),
            self.tolerance,
            text=TEXT,
            cache_step=self.cache_step,
            cache_tolerance=self.cache_tolerance,
        )


def record(config: BuildConfig, weights: Mapping[str, Tensor], progress: Progress) -> Record:
    """Run the eager model over the golden chunks: the first one, and the first that evicts a frame.

    Parameters
    ----------
    config : BuildConfig
        The build.
    weights : mapping of str to Tensor
        Model weights and schedule tables, on the CPU.
    progress : callable
        Told of every chunk.

    Returns
    -------
    Record
    """
    stream = config.stream
    text = golden_text(config)
    seeds = tuple(range(stream.batch))
    chunks = (0, -(-stream.cache_frames // stream.chunk_frames))
    on_device = {name: tensor.to(config.device) for name, tensor in weights.items()}
    exact_config = BuildConfig(config.model, stream, config.schedule, config.exact_scheme, config.device)
    lossless = config.kv_scheme == config.exact_scheme
    peaks = KvPeaks(config)
    exact = run_eager(exact_config, on_device, text, seeds, chunks, progress, None if lossless else peaks)
    kind = "exact" if lossless else "lossy"
    judged = (TOLERANCES[config.dtype][kind], CACHE_TOLERANCES[config.dtype][kind], stream.frame_tokens)
    if lossless:
        return Record(text, seeds, {}, exact, {}, *judged)
    scales = peaks.calibrate()
    on_device |= {name: tensor.to(config.device) for name, tensor in scales.items()}
    lossy = run_eager(config, on_device, text, seeds, chunks, progress, None)
    return Record(text, seeds, scales, lossy, exact, *judged)


def write(folder: Path, made: Record) -> None:
    """Write the golden file into an artifact's folder."""
    tensors = {TEXT: made.text}
    tensors |= {f"exact.{number}": chunk.latents for number, chunk in made.exact.items()}
    for number, chunk in made.chunks.items():
        tensors[f"latents.{number}"] = chunk.latents
        tensors |= {cache_tensor(name, number): sample for name, sample in chunk.cache.items()}
    (folder / "golden").mkdir()
    save_file(tensors, folder / GOLDEN_FILE)


def run_eager(
    config: BuildConfig,
    weights: Mapping[str, Tensor],
    text: Tensor,
    seeds: Sequence[int],
    chunks: Sequence[int],
    progress: Progress,
    peaks: KvPeaks | None,
) -> dict[int, EagerChunk]:
    """Return the wanted chunks, made by the pieces in eager torch."""
    made: dict[int, EagerChunk] = {}
    dtypes = {buffer.name: torch_dtype(buffer.dtype) for buffer in make_buffers(config)}
    with eager_session(config, weights, text, seeds, peaks) as session:
        for index in range(chunks[-1] + 1):
            progress(f"recording goldens ({config.kv_scheme})", index, chunks[-1] + 1)
            chunk = session.run_chunk()
            if index in chunks:
                sample = session.cache_sample(config.stream.frame_tokens)
                cache = {name: torch.from_numpy(numbers).to(dtypes[name]) for name, numbers in sample.items()}
                made[index] = EagerChunk(torch.from_numpy(chunk.to_host()), cache)
    return made


@contextmanager
def eager_session(
    config: BuildConfig,
    weights: Mapping[str, Tensor],
    text: Tensor,
    seeds: Sequence[int],
    peaks: KvPeaks | None = None,
) -> Iterator[Session]:
    """Give the runtime's session over the eager pieces: never captured, attention pinned as in the engines.

    Parameters
    ----------
    config : BuildConfig
        The build.
    weights : mapping of str to Tensor
        Every weight that the programs name, on the build's device.
    text : Tensor
        [B, text tokens, text_dim].
    seeds : sequence of int
        One a row.
    peaks : KvPeaks, optional
        Watches the caches.

    Yields
    ------
    Session
    """
    engines = {name: eager_engine(piece) for name, piece in make_pieces(config).items()}
    if peaks is not None:
        engines |= {name: peaks.watch(engines[name]) for name in engines if name.startswith("block")}
    table = tuple(Weight(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in weights.items())
    manifest = describe(config, "eager", table, {})
    memory = torch_memory(torch.device(config.device))
    memory.captures = False
    with (
        torch.no_grad(),
        attention_backends(config.device),
        Session(manifest, engines, weights, memory, seeds=seeds, text=text) as session,
    ):
        yield session


def eager_engine(piece: Piece) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return one piece as the callable that the session takes: plain eager torch."""
    module = FlatModule(piece)
    return lambda inputs: module(*inputs)


def golden_text(config: BuildConfig) -> Tensor:
    """Return [B, text tokens, text_dim] float32: seeded numbers as a text encoder might give, zero-padded."""
    model = config.model
    shape = (config.stream.batch, model.text_tokens, model.text_dim)
    text = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    text[:, LIVE_TEXT_TOKENS:] = 0
    return text


class KvPeaks:
    """The largest magnitudes of K and V, per layer and head, seen while the exact track runs."""

    def __init__(self, config: BuildConfig) -> None:
        self._config = config
        self._peaks = torch.zeros(config.model.layers, 2, config.model.heads)
        self._calls = 0
        signature = make_pieces(
            BuildConfig(config.model, config.stream, config.schedule, config.exact_scheme, config.device)
        )["block"].signature
        self._caches = [i for i, a in enumerate(signature) if a.name in ("caches.k", "caches.v")]

    def watch(
        self, block: Callable[[list[Tensor]], Sequence[Tensor]]
    ) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """Return the block engine with an eye on its caches; layers are called in order."""

        def watched(inputs: list[Tensor]) -> Sequence[Tensor]:
            caches = [inputs[i] for i in self._caches]  # each [B*N, H, D]
            outputs = block(inputs)
            peaks = torch.stack([cache.abs().amax(dim=(0, 2)).float() for cache in caches]).cpu()
            layer = self._calls % self._config.model.layers
            self._peaks[layer] = torch.maximum(self._peaks[layer], peaks)
            self._calls += 1
            return outputs

        return watched

    def calibrate(self) -> dict[str, Tensor]:
        """Return the cache format's scales as weights: ``blocks.{layer}.kv.NAME``."""
        return {
            f"blocks.{layer}.kv.{name}": tensor
            for layer in range(self._config.model.layers)
            for name, tensor in self._config.kv.calibrate(*self._peaks[layer]).items()
        }
