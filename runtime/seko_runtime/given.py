"""Frames that are given rather than made: a start image through the artifact's encoder, or latents, for each row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seko_runtime.buffers_check import GIVEN_LATENTS, IMAGE, IMAGE_LATENTS
from seko_runtime.errors import UsageError
from seko_runtime.live import Live
from seko_runtime.manifest import Manifest
from seko_runtime.memory import Memory


class GivenFrames:
    """How many frames each row's stream begins with that are given; their latents lie in ``given.latents``.

    Parameters
    ----------
    manifest : Manifest
        The session's.
    memory : Memory
        The session's.
    """

    def __init__(self, manifest: Manifest, memory: Memory) -> None:
        self._manifest, self._memory = manifest, memory
        self.counts = np.zeros(manifest.stream.batch, np.int64)

    def set_image(self, live: Live, image: object, row: int | None = None) -> None:
        """Begin the streams of all rows, or of one, with a picture.

        Parameters
        ----------
        live : Live
            The session's.
        image : array
            uint8 [H, W, 3], or for all rows also [B, H, W, 3]: red, green, blue.
        row : int, optional
            The one row.

        Raises
        ------
        UsageError
            If the artifact encodes no pictures, or the picture's shape or dtype does not fit.
        """
        if "encode" not in live.once:
            raise UsageError(
                "this artifact encodes no pictures; rebuild it with its VAE's encoder, or give latents"
            )
        pictures = self._per_row(np.asarray(image), live.specs[IMAGE].shape, np.uint8, "image", row)
        previous: NDArray[np.generic] | None = None
        with self._memory.ordered():
            for target, picture in pictures:
                if previous is None or not np.array_equal(previous, picture):
                    self._memory.write(live.buffers[IMAGE], picture)
                    live.once["encode"].run()
                previous = picture
                frames = self._memory.index(live.buffers[GIVEN_LATENTS], (target,))  # [C, F, h, w]
                first = self._memory.row(frames, 1, 0, self._manifest.stream.chunk_frames)
                self._memory.copy(first, live.buffers[IMAGE_LATENTS])
        for target, _ in pictures:
            self.counts[target] = 1

    def set_latents(self, live: Live, latents: object) -> None:
        """Begin the streams of all rows with latents.

        Parameters
        ----------
        live : Live
            The session's.
        latents : array
            float32 [C, n, h, w] or [B, C, n, h, w] with n of 1 to F.

        Raises
        ------
        UsageError
            If the artifact takes none, or shape or numbers do not fit.
        """
        self._check_taken(live)
        stream = self._manifest.stream
        found = np.asarray(latents)
        count = found.shape[-3] if found.ndim >= 4 else 0
        if not 1 <= count <= stream.chunk_frames:
            raise UsageError(
                f"given latents have shape {list(found.shape)}, expected [C, n, h, w] with n of 1 to "
                f"{stream.chunk_frames}"
            )
        shape = (stream.latent_shape[0], count, *stream.latent_shape[1:])
        rows = self._per_row(found, shape, np.float32, "given latents", None)
        whole = np.zeros(live.specs[GIVEN_LATENTS].shape, np.float32)
        for row, part in rows:
            whole[row, :, :count] = part
        if not np.isfinite(whole).all():
            raise UsageError("given latents hold a number that is not finite")
        with self._memory.ordered():
            self._memory.write(live.buffers[GIVEN_LATENTS], whole)
        self.counts[:] = count

    def drop(self, row: int) -> None:
        """Let a row begin with nothing given."""
        self.counts[row] = 0

    def of_chunk(self, first_frames: NDArray[np.int64]) -> NDArray[np.int64]:
        """Given frames of the chunk that each row makes next, [B]: some only where a stream begins."""
        return np.where(first_frames == 0, self.counts, 0)

    def _check_taken(self, live: Live) -> None:
        if GIVEN_LATENTS not in live.buffers:
            raise UsageError("this artifact takes no given frames; rebuild it with a newer seko-export")

    def _per_row(
        self, found: NDArray[np.generic], shape: tuple[int, ...], dtype: type, what: str, row: int | None
    ) -> list[tuple[int, NDArray[np.generic]]]:
        batch = self._manifest.stream.batch
        if found.dtype != dtype or found.shape not in (shape, (batch, *shape)):
            raise UsageError(
                f"{what} is {found.dtype} {list(found.shape)}, expected {np.dtype(dtype).name} {list(shape)}"
                + (f" or {[batch, *shape]}" if row is None else "")
            )
        if row is not None:
            if found.shape != shape:
                raise UsageError(f"{what} is of {batch} rows, expected one of {list(shape)}")
            return [(row, found)]
        return [(one, found if found.shape == shape else found[one]) for one in range(batch)]
