"""Conditioning frames: the latents with which a stream begins, from a start picture or from the caller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, check_magnitude
from seko_runtime.backends.device_tensor import host_dtype
from seko_runtime.backends.memory import Memory
from seko_runtime.controls.pictures import NO_ENCODER
from seko_runtime.errors import UsageError
from seko_runtime.video.contract import (
    CONDITIONING_LATENTS,
    IMAGE,
    IMAGE_LATENTS,
    LAST_PICTURE_LEVELS,
    PICTURE_CONDITION,
    PICTURE_LEVELS,
    picture_input,
)
from seko_runtime.video.device import VideoDevice
from seko_runtime.video.manifest import VideoManifest


class ConditioningFrames:
    """The number of conditioning frames of each stream. The buffer ``conditioning.latents`` holds their latents.

    Parameters
    ----------
    manifest : VideoManifest
        The manifest of the opened artifact.
    memory : Memory
        The memory that holds the session's tensors.
    """

    def __init__(self, manifest: VideoManifest, memory: Memory) -> None:
        self._manifest, self._memory = manifest, memory
        self.counts = np.zeros(manifest.rows, np.int64)

    def set_image(self, device: VideoDevice, row: int, image: object) -> None:
        """Make a picture the beginning of a stream.

        The start picture becomes the first latent frame of the stream. If the model has an input per session for the
        start picture, the picture becomes that input, and the first latent frame is generated like the other frames.

        Parameters
        ----------
        device : VideoDevice
            The device side of the streams: their buffers and programs.
        row : int
            Number of the stream's row.
        image : array
            The start picture, uint8 [H, W, 3] or [1, H, W, 3]: red, green, blue. A model with an input for the picture
            also takes float32 levels of 0 to 255; a bicubic resize may exceed that range. A model with a last picture
            takes [2, H, W, 3] or [1, 2, H, W, 3], the first and the last one.

        Raises
        ------
        UsageError
            If the artifact encodes no pictures, the picture's shape or dtype is wrong, or a level is not finite or too
            large.
        """
        levels_input = picture_input(self._manifest)
        program = "encode" if levels_input is None else "condition"
        if program not in device.once:
            raise UsageError(NO_ENCODER)
        name = IMAGE if levels_input is None else PICTURE_LEVELS
        pictures_array, spec = as_array(image, "image"), device.specs[name]
        levels = name == PICTURE_LEVELS and pictures_array.dtype == np.float32
        names = (name, *({LAST_PICTURE_LEVELS} & set(device.buffers)))
        shape = spec.shape if len(names) == 1 else (len(names), *spec.shape)
        pictures = of_one_row(pictures_array, shape, np.float32 if levels else np.uint8, "image")
        if levels:
            check_magnitude(pictures_array, "image")
        pictures = pictures.astype(host_dtype(spec.dtype), copy=False)
        with self._memory.ordered():
            for picture_buffer, picture in zip(names, pictures.reshape(-1, *spec.shape), strict=True):
                self._memory.write(device.buffers[picture_buffer], picture)
            device.once[program].run()
            if levels_input is not None:
                condition = self._memory.index(device.buffers[levels_input.buffer], (row,))
                self._memory.copy(condition, device.buffers[PICTURE_CONDITION])
            else:
                frames = self._memory.index(device.buffers[CONDITIONING_LATENTS], (row,))  # [C, F, h, w]
                first = self._memory.row(frames, 1, 0, self._manifest.workload.stream.chunk_frames)
                self._memory.copy(first, device.buffers[IMAGE_LATENTS])
        self.counts[row] = int(levels_input is None)

    def set_latents(self, device: VideoDevice, row: int, latents: object) -> None:
        """Make latents the beginning of a video stream.

        Parameters
        ----------
        device : VideoDevice
            The device side of the streams: their buffers and programs.
        row : int
            Number of the stream's row.
        latents : array
            Latents of the first n frames, float32 [C, n, h, w] or [1, C, n, h, w], with n of 1 to F.

        Raises
        ------
        UsageError
            If the artifact takes no conditioning frames, or the latents have a wrong shape or invalid numbers.
        """
        self._check_taken(device)
        stream = self._manifest.workload.stream
        array = as_array(latents, "conditioning_latents")
        count = array.shape[-3] if array.ndim >= 4 else 0
        if not 1 <= count <= stream.chunk_frames:
            raise UsageError(
                f"conditioning latents have shape {list(array.shape)}, expected [C, n, h, w] with n of 1 to "
                f"{stream.chunk_frames}"
            )
        shape = (stream.latent_shape[0], count, *stream.latent_shape[1:])
        whole = np.zeros((1, *device.specs[CONDITIONING_LATENTS].shape[1:]), np.float32)
        whole[0, :, :count] = of_one_row(array, shape, np.float32, "conditioning latents")
        check_magnitude(array, "conditioning_latents")
        with self._memory.ordered():
            self._memory.write(device.row_of(CONDITIONING_LATENTS, row), whole)
        self.counts[row] = count

    def drop(self, row: int) -> None:
        """Remove the conditioning frames of a stream."""
        self.counts[row] = 0

    def of_chunk(self, rows: Sequence[int], first_frames: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of conditioning frames in the next chunk of each of k streams, [k]: 0 unless the chunk
        begins at frame 0.
        """
        return np.where(first_frames == 0, self.counts[list(rows)], 0)

    def _check_taken(self, device: VideoDevice) -> None:
        if CONDITIONING_LATENTS not in device.buffers:
            raise UsageError("this artifact takes no conditioning frames; leave conditioning_latents out")


def of_one_row(
    array: NDArray[np.generic], shape: tuple[int, ...], dtype: type, what: str
) -> NDArray[np.generic]:
    """Return an array for one row as [*shape]; it may have a leading axis of 1. UsageError if it has another shape or
    dtype."""
    if array.dtype != dtype or array.shape not in (shape, (1, *shape)):
        raise UsageError(
            f"{what} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype).name} {list(shape)} or "
            f"{[1, *shape]}"
        )
    return array.reshape(shape)
