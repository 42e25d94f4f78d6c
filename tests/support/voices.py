"""A voice of tests, chunk by chunk in any order. No tests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from seko_runtime.controls.recording import as_json
from seko_runtime.controls.voice import WINDOW, AudioWindows, VoiceControl
from seko_runtime.format.manifest import InputSpec


def voice_control(
    chunk_frames: int = 1, speakers: int = 1, *, normalised: bool = False, kept_frames: int = 0
) -> VoiceControl:
    """Of 16 frames a second, four of them for a latent frame."""
    spec = VoiceControl.declared(
        "audio", fps=16, per_latent=4, normalised=normalised, kept_frames=kept_frames
    )
    shape = (speakers, chunk_frames, WINDOW)
    return VoiceControl(spec, {"windows": InputSpec("audio", shape, "float32", "input.audio", "chunk")})


class Heard:
    """A control ``voice``, asked for the chunk of any latent frame."""

    def __init__(self, windows: AudioWindows) -> None:
        self.windows = windows
        self.control = voice_control(windows.chunk_frames, windows.speakers, normalised=windows.normalised)

    def push(self, samples: Any, *, at: Any = None, last: Any = False) -> None:
        self.control.take({"samples": samples, "last": last} | ({} if at is None else {"at": at}))

    def of_chunk(self, frame: int) -> np.ndarray:
        self.control.go_to(frame)
        return self.control.next_chunk()["audio"]

    def forget(self, frame: int) -> None:
        self.control.go_to(frame - self.windows.chunk_frames)
        self.control.advance()

    def heard_at(self, frame: int) -> float | None:
        self.control.go_to(frame)
        return self.control.heard_at()

    def copy(self) -> Heard:
        other = Heard(self.windows)
        other.control.load(json.loads(json.dumps(as_json(self.control.state()))))
        return other

    @property
    def first(self) -> int:
        return int(self.control.state()["first"])

    @property
    def end(self) -> int:
        return self.control.end

    @property
    def ended(self) -> bool:
        return bool(self.control.state()["ended"])

    @property
    def samples(self) -> np.ndarray:
        return self.control._samples.between(0, len(self.control._samples))
