"""Numeric errors of a replayed chunk against the recorded chunk (the golden): in latents, cache and video."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from seko_runtime.format.manifest import Buffer
from seko_runtime.format.safetensors_map import MappedTensor

# Of fewer bytes a token, all may differ though it is the right one: of 4 scales of values that fp8 rounding moves by
# 3 %, in 4 of 1,000 tokens; of 16 in none of 20,000. A token in the wrong slot shows in its codes.
JUDGED_BYTES = 16


@dataclass(frozen=True)
class ChunkError:
    """Numeric errors of a replayed chunk against the recorded chunk of the same number.

    Parameters
    ----------
    chunk : int
        Number of the chunk in its stream.
    golden : float
        Error ||replayed - recorded|| / ||recorded|| of the latents, against the recording with the artifact's own KV
        cache format.
    exact : float or None
        Error ||replayed - recorded|| / ||recorded|| of the latents, against a recording with an unquantised KV cache;
        None without a recording of that kind. The ``exact`` error is reported and not checked.
    tolerance : float
        Largest ``golden`` error that passes.
    cache : float or None
        Worst `cache_error` of a KV cache buffer after the chunk, if the cache was recorded and compared.
    cache_tolerance : float
        Largest ``cache`` error that passes.
    video : float or None
        `video_error` of the chunk's frames, if they were recorded and compared.
    video_tolerance : float
        Largest ``video`` error that passes.
    """

    chunk: int
    golden: float
    exact: float | None
    tolerance: float
    cache: float | None = None
    cache_tolerance: float = 0.0
    video: float | None = None
    video_tolerance: float = 0.0

    @property
    def within(self) -> bool:
        """Whether all errors of the chunk are within their tolerances; False if a number is NaN."""
        return (
            self.golden <= self.tolerance
            and (self.cache is None or self.cache <= self.cache_tolerance)
            and (self.video is None or self.video <= self.video_tolerance)
        )

    @property
    def size(self) -> float:
        """The error of the chunk's latents; infinite if a number is NaN."""
        return _nan_last(self.golden)

    def row(self) -> dict[str, object]:
        """Return the chunk's errors as a dict for JSON, which has no NaN and no infinity."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    def __str__(self) -> str:
        exact = "" if self.exact is None else f"; against an exact cache {self.exact:.3g}"
        cache = "" if self.cache is None else f", cache {self.cache:.3g} (at most {self.cache_tolerance:.3g})"
        video = "" if self.video is None else f", video {self.video:.3g} (at most {self.video_tolerance:.3g})"
        return f"chunk {self.chunk}: golden {self.golden:.3g} (at most {self.tolerance:.3g}){cache}{video}{exact}"


def relative_error(replayed: NDArray[np.generic], recorded: NDArray[np.generic]) -> float:
    """Return the relative error ||replayed - recorded|| / ||recorded|| over all numbers, in float64."""
    wanted = recorded.astype(np.float64)
    norm = float(np.linalg.norm(wanted))
    difference = float(np.linalg.norm(replayed.astype(np.float64) - wanted))
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / norm


def cache_error(
    replayed: NDArray[np.float32], recorded: NDArray[np.float32], dtype: str, *, row_axis: int
) -> float:
    """Return the largest error of a cached token. Tokens are compared by slot and layer, so a token in the wrong slot
    is an error.

    Parameters
    ----------
    replayed, recorded : numpy.ndarray
        New and recorded tokens, [..., S, ...]: S sampled tokens on axis ``row_axis``, behind passes and layers.
    dtype : str
        The cache buffer's dtype. For int8 codes and for dtypes of several bytes the error is ||replayed - recorded||
        of a token over the greater of the two norms, so that a token in an empty slot has an error of 1. For uint8,
        whose values are bit patterns, the error is the share of bytes that differ; of fewer than `JUDGED_BYTES` of
        a token, 0.
    """
    a, b = (part.reshape(*part.shape[: row_axis + 1], -1).astype(np.float64) for part in (replayed, recorded))
    if dtype == "uint8":
        return float((a != b).mean(axis=-1).max()) if a.shape[-1] >= JUDGED_BYTES else 0.0
    norm = np.maximum(np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1))
    ratio = np.linalg.norm(a - b, axis=-1) / np.where(norm == 0, 1.0, norm)
    return float(ratio.max())


def video_error(frames: NDArray[np.uint8], recorded: NDArray[np.generic], step: int) -> float:
    """Return the root mean square difference, in pixel levels of 0 to 255, between ``frames`` and ``recorded`` at
    every ``step``-th pixel.

    Parameters
    ----------
    frames : numpy.ndarray
        Replayed video frames, uint8 [B, T, H, W, 3], as `Chunk.video` returns them.
    recorded : numpy.ndarray
        Recorded video frames, uint8 [B, T, ceil(H/step), ceil(W/step), 3]. If the shapes do not match, the error is
        infinite.
    step : int
        Distance between recorded pixels: `Golden.video_step`.
    """
    sampled = frames[:, :, ::step, ::step]
    if sampled.shape != recorded.shape:
        return math.inf
    return float(np.sqrt(np.square(sampled.astype(np.float64) - recorded.astype(np.float64)).mean()))


def worst_cache_error(
    replayed: Mapping[str, NDArray[np.float32]],
    recorded: Mapping[str, MappedTensor],
    chunk: int,
    buffers: Iterable[Buffer],
) -> float:
    """Return the worst `cache_error` of all cache buffers after chunk ``chunk``; infinite if a number is NaN."""
    errors = [
        cache_error(
            replayed[buffer.name],
            recorded[cache_tensor(buffer.name, chunk)].to_numpy().astype(np.float32),
            buffer.dtype,
            row_axis=buffer.row_axis,
        )
        for buffer in buffers
        if buffer.role == "cache"
    ]
    return max((_nan_last(error) for error in errors), default=0.0)


def cache_tensor(buffer: str, chunk: int) -> str:
    """Name of the recorded tensor with sampled tokens of a cache buffer, taken after a chunk."""
    return f"cache.{buffer}.{chunk}"


def video_tensor(chunk: int) -> str:
    """Name of the recorded tensor with a chunk's sampled video frames."""
    return f"video.{chunk}"


def input_tensor(name: str, chunk: int | None = None) -> str:
    """Name of the recorded tensor with the values of a caller's input. If the input changes with each chunk, the tensor
    has the values of one chunk."""
    return f"input.{name}" if chunk is None else f"input.{name}.{chunk}"


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
