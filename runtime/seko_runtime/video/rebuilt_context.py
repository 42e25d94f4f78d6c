"""The latents over which a context pass runs before each chunk, where a stream's cache is made again for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.video.contract import IMAGE, IMAGE_LATENTS, VIDEO
from seko_runtime.video.manifest import VideoManifest


class RebuiltContext:
    """The context of each stream's next chunk: the latents of its last chunk, the first frame of which is replaced by
    the encoded video frame that stands before the others.

    A call that failed may have decoded a stream's chunk, over the frames of the one before. The encoded frame is
    therefore kept until the stream's next chunk.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    memory : Memory
        The memory of the pool's tensors.
    buffers : mapping of str to Tensor
        The pool's buffers by name.
    encode : callable
        Function that queues the program that encodes a picture.
    """

    def __init__(
        self,
        manifest: VideoManifest,
        memory: Memory,
        buffers: Mapping[str, Tensor],
        encode: Callable[[], None],
    ) -> None:
        self._memory, self._encode, stream = memory, encode, manifest.workload.stream
        self._video, self._picture, self._encoded = (buffers[name] for name in (VIDEO, IMAGE, IMAGE_LATENTS))
        # the last video frame of a chunk's first latent frame
        self._frame, self._chunk_frames = stream.video_frames_per_latent - 1, stream.chunk_frames
        channels, rows, columns = stream.latent_shape
        shape = (manifest.rows, channels, 1, rows, columns)
        self._first = memory.allocate(TensorSpec("context.first", shape, "float32"))
        self._chunks: dict[int, int] = {}  # by row: number of the chunk for which its frame is encoded

    def load(self, target: Tensor, row: int, chunk: int) -> None:
        """Queue the encoded frame before chunk number ``chunk`` of a row, which is 2 or more, into the first frame of
        latents [C, F, h, w]. The chunk before must be decoded in the order of the device's work."""
        memory = self._memory
        first = memory.index(self._first, (row,))
        if self._chunks.get(row) != chunk:
            memory.copy(self._picture, memory.index(self._video, (row, self._frame)))
            self._encode()
            memory.copy(first, self._encoded)
            self._chunks[row] = chunk
        memory.copy(memory.row(target, 1, 0, self._chunk_frames), first)

    def forget(self, row: int) -> None:
        """Forget what was encoded for a row, on which another stream begins or goes on."""
        self._chunks.pop(row, None)
