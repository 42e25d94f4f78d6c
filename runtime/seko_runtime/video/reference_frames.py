"""Reference frames: latents or pictures that a stream's KV cache holds in addition to the frames of the stream.
`VideoDevice` runs the passes that write reference frames.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, check_magnitude, mapping_of
from seko_runtime.backends.memory import Memory
from seko_runtime.controls.pictures import NO_ENCODER, PORTRAIT_KIND
from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning import of_one_row
from seko_runtime.video.contract import IMAGE, IMAGE_LATENTS, REFERENCE_LATENTS
from seko_runtime.video.device import VideoDevice
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest

PORTRAIT = PORTRAIT_KIND


def with_portrait(manifest: VideoManifest, inputs: Inputs | None, reference: object) -> Inputs:
    """Return the caller's inputs; if the portrait is missing and the reference frames are pictures, the first reference
    picture becomes the portrait."""
    array, by_name = as_array(reference, "reference"), mapping_of(inputs, "inputs")
    name = next((spec.name for spec in manifest.caller_inputs if spec.kind == PORTRAIT), None)
    if name is None or name in by_name or array.dtype != np.uint8 or array.ndim < 3:
        return by_name
    return {**by_name, name: array if array.ndim == 3 else array[..., 0, :, :, :]}


def set_reference(
    device: VideoDevice, manifest: VideoManifest, memory: Memory, row: int, reference: object
) -> bool:
    """Store the reference frames of a stream in the buffer from which its KV cache is written.

    Parameters
    ----------
    device, manifest, memory
        Device side, manifest and memory of the pool.
    row : int
        Number of the stream's row.
    reference : array or None
        The reference frames: float32 latents [C, R, h, w] or [1, C, R, h, w], or uint8 pictures [R, H, W, 3] or
        [1, R, H, W, 3], each encoded separately. For R = 1 pictures may also be [H, W, 3].

    Returns
    -------
    bool
        Whether the artifact has reference frames. For an artifact without reference frames, ``reference`` must be None.

    Raises
    ------
    UsageError
        If the reference frames are missing or too many, or have a wrong shape, dtype or value.
    """
    count = manifest.workload.stream.reference_frames
    if reference is None and not count:
        return False
    if reference is None:
        raise UsageError(f"this artifact has {count} reference frames, found none; give them as reference")
    frames = check_reference(manifest, as_array(reference, "reference"))
    with memory.ordered():
        if frames.dtype != np.uint8:
            memory.write(device.row_of(REFERENCE_LATENTS, row), frames[None])
            return True
        reference_latents = memory.index(device.buffers[REFERENCE_LATENTS], (row,))  # [C, R, h, w]
        for frame in range(count):
            memory.write(device.buffers[IMAGE], frames[frame])
            device.once["encode"].run()
            memory.copy(memory.row(reference_latents, 1, frame, count), device.buffers[IMAGE_LATENTS])
    return True


def check_reference(manifest: VideoManifest, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Check the reference frames of a stream; return them as [C, R, h, w] latents or [R, H, W, 3] pictures.

    Raises
    ------
    UsageError
        In the same cases as `set_reference`: frames missing, too many, or of a wrong shape, dtype or value.
    """
    count = manifest.workload.stream.reference_frames
    if not count:
        raise UsageError("this artifact has no reference frames; rebuild it with --reference-frames N")
    pictures = array.dtype == np.uint8
    if pictures:
        if "encode" not in manifest.programs:
            raise UsageError(NO_ENCODER)
        size = next(buffer.shape for buffer in manifest.buffers if buffer.name == IMAGE)
        array = array[None] if array.ndim == 3 else array
        frame_count, shape = array.shape[-4] if array.ndim > 3 else 0, (count, *size)
    else:
        channels, *sides = manifest.workload.stream.latent_shape
        frame_count, shape = array.shape[-3] if array.ndim > 3 else 0, (channels, count, *sides)
    if frame_count > count:
        raise UsageError(
            f"found {frame_count} reference frames, this artifact has room for {count}; rebuild it with "
            f"--reference-frames {frame_count}"
        )
    frames = of_one_row(array, shape, np.uint8 if pictures else np.float32, "reference")
    if not pictures:
        check_magnitude(array, "reference")
    return frames
