"""The streams of a video artifact of several ranks (one process for each GPU): the caller's side, and the commands that
each rank answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.sessions.ranked_rows import Command, Facts, Group, RankedRows, split_axes
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.contract import PICTURE_AXIS
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.local_rows import LocalVideoRows
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.row_numbers import STATE_FORM
from seko_runtime.video.rows import NO_VIDEO, Beginning
from seko_runtime.video.schedule import rescheduled


class RankedVideoRows(RankedRows[VideoManifest]):
    """The video streams of a pool whose artifact has several ranks. Every method may raise a RankLostError, if the
    process of a rank has ended or does not answer.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    group : Group
        The processes of the ranks, one for each GPU.
    options : VideoOptions
        Options of the pool, chosen when it is opened.
    """

    def __init__(self, manifest: VideoManifest, group: Group, options: VideoOptions) -> None:
        super().__init__(manifest, group, STATE_FORM, vars(options))
        if options.steps is not None or options.shift is not None:
            self.manifest, _ = rescheduled(manifest, options.steps, options.shift)
        self._last_stats = SessionStats(0, 0, 0, manifest.workload.kv.pool_bytes)
        self.overlaps = bool(self.ask_ranks("decodes_beside")[0])

    @property
    def decodes_beside(self) -> bool:
        """Whether a chunk is decoded while the next one is computed."""
        return self.overlaps

    @property
    def stats(self) -> SessionStats:
        """Counters of the pool so far; after `close`, their last values."""
        return self._last_stats if self.closed else SessionStats(**self.ask_ranks("stats")[0])

    def begin(self, row: int, beginning: Beginning) -> None:
        """Begin a stream on an empty row of the pool."""
        self.ask_ranks("begin", {"row": row, "beginning": vars(beginning)}, patient=True)

    def run(self, rows: Sequence[int], inputs: Sequence[Inputs | None] | None = None) -> list[Chunk]:
        """Make and return the next chunk of each of some streams."""
        answers = self.ask_ranks("run", {"rows": rows, "inputs": inputs})[0]
        return [
            Chunk(index, frames, None, self, serial, row, picture)
            for index, frames, serial, row, picture in answers
        ]

    def set_prompt(self, row: int, prompt: str, *, recache: bool = False) -> None:
        """Set a stream's prompt to a sentence."""
        self.ask_ranks("set_prompt", {"row": row, "prompt": prompt, "recache": recache})

    def check_prompt(self, row: int | None, prompt: str, *, recache: bool = False) -> None:
        """Raise the error that `set_prompt` would raise for a sentence; the prompt does not change."""
        self.ask_ranks("check_prompt", {"row": row, "prompt": prompt, "recache": recache}, ranks=(0,))

    def set_text(self, row: int, text: object, *, recache: bool = False) -> None:
        """Set a stream's prompt to text embeddings."""
        self.ask_ranks("set_text", {"row": row, "text": text, "recache": recache})

    def set_inputs(self, row: int, inputs: Inputs | None) -> None:
        """Set the inputs that the caller supplies once for a session or prompt."""
        self.ask_ranks("set_inputs", {"row": row, "inputs": inputs})

    def next_frame(self, row: int) -> int:
        """Return the number of the first latent frame of a stream's next chunk."""
        return int(self.ask_ranks("next_frame", {"row": row})[0])

    def restart(
        self, row: int, *, seed: int | None = None, image: object = None, reference: object = None
    ) -> None:
        """Restart a stream at frame 0 with an empty cache."""
        self.ask_ranks("restart", {"row": row, "seed": seed, "image": image, "reference": reference})

    def cut(self, row: int, frames: int) -> None:
        """Begin another scene with a row's next chunk."""
        self.ask_ranks("cut", {"row": row, "frames": frames})

    def rewind(self, row: int, chunk: int) -> None:
        """Set a stream back to its state before it made chunk number ``chunk``."""
        self.ask_ranks("rewind", {"row": row, "chunk": chunk})

    def read_latents(self, row: int, serial: int, index: int) -> Callable[[], NDArray[np.float32]]:
        """Copy a chunk's latents to the host, and return a function that returns them.

        `read_latents` waits for the copy, because the ranks' processes answer one command at a time.
        """
        facts = {"row": row, "serial": serial, "index": index}
        latents: NDArray[np.float32] = self.ask_ranks("read_latents", facts, ranks=(0,))[0]
        return lambda: latents

    def decoder(self) -> RankedVideoRows:
        """Return this object, which also reads video frames; UsageError if the artifact makes no video."""
        if self.manifest.workload.video is None:
            raise UsageError(NO_VIDEO)
        return self

    def finished(self, row: int, number: int) -> Callable[[], None]:  # noqa: ARG002 - as the decoder has it
        """Return a function that does nothing, because `video_frames` itself waits, in rank 0's process."""
        return lambda: None

    def video_frames(self, row: int, number: int) -> NDArray[np.uint8]:
        """Return a row's video frames of one chunk, copied from rank 0's process; see `Decoder.video_frames`."""
        facts = {"row": row, "number": number}
        parts = self.ask_ranks("video_frames", facts, ranks=None if self.manifest.shares_decoding else (0,))
        frames: NDArray[np.uint8] = parts[0]
        return np.concatenate(parts, PICTURE_AXIS - 1) if self.manifest.shares_decoding else frames

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every KV cache buffer to the host, with the attention heads of all ranks
        joined."""
        whole, *others = self.ask_ranks("cache_sample", {"step": step})
        for name, axis in split_axes(self.manifest).items():
            if name in whole:
                whole[name] = np.concatenate([whole[name], *(part[name] for part in others)], axis)
        return dict(whole)

    def close(self) -> None:
        """End the pool and free its memory on all ranks; a second call does nothing."""
        if not self.closed:
            # the processes are gone, and earlier calls have raised that error
            with suppress(SekoRuntimeError):
                self._last_stats = self.stats  # a closed session still shows the last counters
        super().close()


def _chunk_fields(chunk: Chunk) -> list[object]:
    """Return a chunk as a message between processes, without its tensors."""
    return [chunk.index, chunk.frames, chunk.serial, chunk.row, chunk.picture]


def _video_frames(rows: LocalVideoRows, facts: Facts) -> object:
    decoder = rows.decoder()
    decoder.finished(**facts)()
    return decoder.video_frames(**facts)


RANK_COMMANDS: Mapping[str, Command] = {
    "decodes_beside": lambda rows, _: rows.decodes_beside,
    "stats": lambda rows, _: asdict(rows.stats),
    "begin": lambda rows, facts: rows.begin(facts["row"], Beginning(**facts["beginning"])),
    "run": lambda rows, facts: [_chunk_fields(chunk) for chunk in rows.run(**facts)],
    "set_prompt": lambda rows, facts: rows.set_prompt(**facts),
    "check_prompt": lambda rows, facts: rows.check_prompt(**facts),
    "set_text": lambda rows, facts: rows.set_text(**facts),
    "set_inputs": lambda rows, facts: rows.set_inputs(**facts),
    "next_frame": lambda rows, facts: rows.next_frame(**facts),
    "restart": lambda rows, facts: rows.restart(**facts),
    "cut": lambda rows, facts: rows.cut(**facts),
    "rewind": lambda rows, facts: rows.rewind(**facts),
    "read_latents": lambda rows, facts: rows.read_latents(**facts)(),
    "video_frames": _video_frames,
    "cache_sample": lambda rows, facts: rows.cache_sample(**facts),
}
