"""A session whose chunks are made by several processes: the caller's side of one, over a rank group.

Every rank has the whole `Session` and gets the same calls in the same order, so all know where the stream stands. What
is read comes from rank 0, but the cache, of which each rank has its heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.executor.buffers_check import HEADS_AXIS
from seko_runtime.format.manifest import Manifest
from seko_runtime.parallel.channel import NUMBERS
from seko_runtime.parallel.group import Answers, RankGroup
from seko_runtime.video.call_lock import CallLock
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.session import Session
from seko_runtime.video.streams import CLOSED

# A chunk of a large model on a CPU takes minutes. A process that hangs is found by its silence, long before.
CALL_S = 600.0
OPEN_S = 600.0
_DEAF = "an artifact of several ranks hears no audio yet; build it without --ranks"


class RankedSession(Session):
    """A `Session` of an artifact of several ranks; made by the artifact's `open_session`.

    Parameters
    ----------
    manifest : Manifest
        The artifact's.
    group : RankGroup
        Its processes.
    facts, arrays : mapping
        Arguments of `OpenArtifact.open_session`, by name.

    Raises
    ------
    RankLostError
        If a process died or hangs; so does every call from then on.
    """

    def __init__(
        self,
        manifest: Manifest,
        group: RankGroup,
        facts: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:
        self.manifest = manifest
        self._rows = range(manifest.call_rows)
        self._ahead: deque[Chunk] = deque()
        self._streams = _RemoteStreams(
            manifest, group, group.call("open_session", facts, arrays, seconds=OPEN_S)
        )


class _RemoteStreams:
    """`SessionStreams` in the processes of a rank group."""

    def __init__(self, manifest: Manifest, group: RankGroup, opened: Answers) -> None:
        self._manifest, self._group = manifest, group
        self.call_lock = CallLock(CLOSED)
        self.decodes_beside = bool(opened.results[0]["decodes_beside"])
        self.closed = False

    @property
    def stats(self) -> SessionStats:
        return SessionStats(**self._asked("stats").results[0])

    def run_chunk(self, rows: Sequence[int], inputs: Inputs | None = None) -> Chunk:
        del rows  # all
        answers = self._asked("run_chunk", {}, named_arrays(inputs))
        made, arrays = answers.results[0], answers.arrays[0]
        pictures = tuple((int(row), int(number)) for row, number in made["pictures"])
        return Chunk(made["index"], arrays["frames"], None, self, made["serial"], pictures)

    def set_prompt(self, rows: Sequence[int], prompt: str | Sequence[str], *, recache: bool = False) -> None:
        del rows
        given = prompt if isinstance(prompt, str) else list(prompt)
        self._asked("set_prompt", {"prompt": given, "recache": recache})

    def set_text(self, rows: Sequence[int], text: object, *, recache: bool = False) -> None:
        del rows
        self._asked("set_text", {"recache": recache}, named_arrays({"text": text}))

    def set_inputs(self, rows: Sequence[int], inputs: Inputs | None) -> None:
        del rows
        self._asked("set_inputs", {}, named_arrays(inputs))

    def restart(
        self, row: int, *, seed: int | None = None, image: object = None, reference: object = None
    ) -> None:
        pictures = {"image": image, "reference": reference}
        given = named_arrays({name: one for name, one in pictures.items() if one is not None})
        self._asked("restart_row", {"row": row, "seed": seed}, given)

    def push_audio(
        self, rows: Sequence[int], samples: object, at: int | None = None, *, last: bool = False
    ) -> None:
        del rows, samples, at, last
        raise UsageError(_DEAF)

    def rewind(self, rows: Sequence[int], chunk: int) -> None:
        del rows, chunk
        raise UsageError("an artifact of several ranks does not step back; restart the row")

    def audio_needed(self, row: int) -> tuple[int, int]:
        del row
        raise UsageError(_DEAF)

    def read_latents(self, chunk: Chunk) -> NDArray[np.float32]:
        latents: NDArray[np.float32] = self._read("read_latents", {"serial": chunk.serial})["latents"]
        return latents

    def decoder(self) -> _RemoteFrames:
        if self._manifest.video is None:
            raise UsageError("this artifact makes no video; read latents with run_chunk().to_host()")
        return _RemoteFrames(self)

    def video_frames(self, row: int, number: int) -> NDArray[np.uint8]:
        frames: NDArray[np.uint8] = self._read("video_frames", {"row": row, "number": number})["frames"]
        return frames

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        parts = self._asked("cache_sample", {"step": step}).arrays
        layered = {one.name: one.layered for one in self._manifest.buffers}
        return {
            name: np.concatenate([parts[rank][name] for rank in sorted(parts)], HEADS_AXIS)
            if layered[name]
            else first
            for name, first in parts[0].items()
        }

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self._group.over:
                self._asked("close_session", patient=True)

    def _asked(
        self,
        command: str,
        facts: Mapping[str, Any] | None = None,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        patient: bool = False,
    ) -> Answers:
        return self._group.call(command, facts, arrays, seconds=CALL_S, patient=patient)

    def _read(self, command: str, facts: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the arrays with which rank 0 answers."""
        return self._group.call(command, facts, ranks=(0,), seconds=CALL_S, patient=False).arrays[0]


class _RemoteFrames:
    """`FrameReader` of rank 0's decoder."""

    def __init__(self, streams: _RemoteStreams) -> None:
        self._streams, self.overlaps = streams, streams.decodes_beside

    def video_frames(self, row: int, number: int) -> NDArray[np.uint8]:
        return self._streams.video_frames(row, number)


def named_arrays(tensors: Mapping[str, object] | None) -> dict[str, NDArray[Any]]:
    """Return a caller's inputs as numpy arrays, converted where needed, such as from a host tensor of torch.

    Raises
    ------
    UsageError
        If one holds anything but numbers.
    """
    made = {}
    for name, one in (tensors or {}).items():
        try:
            array = np.asarray(one)
        except (TypeError, ValueError, RuntimeError) as fault:
            raise UsageError(
                f"{name} is a {type(one).__name__} that is no array of numbers: {fault}"
            ) from None
        if array.dtype.kind not in NUMBERS:
            raise UsageError(f"{name} is a {type(one).__name__}, expected an array of numbers")
        made[name] = array
    return made
