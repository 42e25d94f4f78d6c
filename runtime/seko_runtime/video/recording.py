"""The golden of a video artifact: recorded inputs that serve as defaults, and recorded chunks for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, shown, whole_number
from seko_runtime.errors import UsageError
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.video.golden import (
    ChunkError,
    input_tensor,
    relative_error,
    video_error,
    video_tensor,
    worst_cache_error,
)
from seko_runtime.video.manifest import VideoManifest


@dataclass(frozen=True)
class Recording:
    """The recorded inputs and chunks of an artifact; empty if nothing was recorded.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    tensors : mapping of str to MappedTensor
        The tensors of the golden's file, by name.
    """

    manifest: VideoManifest
    tensors: Mapping[str, MappedTensor]

    @property
    def prompt(self) -> str | None:
        """The sentence with which the golden was recorded, if the golden has no text embeddings."""
        golden = self.manifest.workload.golden
        return golden.prompt if golden is not None and golden.text is None else None

    def text(self, row: int) -> NDArray[np.generic]:
        """Recorded text embeddings of a stream, [1, tokens, text_dim]; UsageError if the golden has no text
        embeddings."""
        golden = self.manifest.workload.golden
        if golden is None or golden.text is None:
            raise UsageError(
                "this artifact holds no text to fall back on; give the text encoder's output as text"
            )
        return self.tensors[golden.text].to_numpy()[row : row + 1]

    def reference(self, row: int) -> NDArray[np.generic] | None:
        """Recorded latents [C, R, h, w] of the R reference frames of a stream; None if the golden has no reference
        frames."""
        golden = self.manifest.workload.golden
        if golden is None or golden.reference is None:
            return None
        latents: NDArray[np.generic] = self.tensors[golden.reference].to_numpy()[row]
        return latents

    def inputs(self, chunk: int | None, row: int | None) -> dict[str, NDArray[np.generic]]:
        """Return recorded values of the inputs that the caller supplies, for one stream or all streams; see
        `VideoArtifact.golden_inputs`."""
        golden = self.manifest.workload.golden
        recorded = 0 if golden is None or chunk is None else chunk % (golden.chunks[-1] + 1)
        arrays = {}
        for spec in self.manifest.caller_inputs:
            steady = spec.per in ("session", "prompt")
            tensor = input_tensor(spec.name) if steady else input_tensor(spec.name, recorded)
            if steady == (chunk is None) and tensor in self.tensors:
                values = self.tensors[tensor].to_numpy()
                arrays[spec.name] = values if row is None else values[row]
        return arrays

    def chunk_error(
        self,
        number: int,
        latents: NDArray[np.float32],
        cache: Mapping[str, NDArray[np.float32]] | None,
        video: NDArray[np.uint8] | None,
    ) -> ChunkError:
        """Return the numeric error of a new chunk against the recorded chunk; UsageError if the chunk was not
        recorded."""
        golden, tensors = self.manifest.workload.golden, self.tensors
        number = whole_number(number, "number", 0)
        if golden is None or number not in golden.chunks:
            raise UsageError(f"chunk {shown(number)} is not in this artifact's golden")
        array, recorded = as_array(latents, "latents"), tensors[f"latents.{number}"].to_numpy()
        if array.shape != recorded.shape or array.dtype.kind != "f":
            raise UsageError(
                f"latents are {array.dtype} {list(array.shape)}, expected float32 {list(recorded.shape)} of to_host()"
            )
        if video is not None and (
            (pictures := as_array(video, "video")).dtype != np.uint8 or pictures.ndim != 5
        ):
            raise UsageError("video is no uint8 [B, T, H, W, 3]; take what Chunk.video() gave")
        bound, exact = golden.bound(number), tensors.get(f"exact.{number}")
        frames = tensors.get(video_tensor(number)) if golden.video_step and video is not None else None
        return ChunkError(
            chunk=number,
            golden=relative_error(array, recorded),
            exact=None if exact is None else relative_error(array, exact.to_numpy()),
            tolerance=bound.latents,
            cache=None if cache is None else worst_cache_error(cache, tensors, number, self.manifest.buffers),
            cache_tolerance=bound.cache,
            video=None
            if frames is None or video is None
            else video_error(video, frames.to_numpy(), golden.video_step),
            video_tolerance=bound.video,
        )
