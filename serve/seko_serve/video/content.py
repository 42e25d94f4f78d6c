"""Live video: one session of a video artifact, its prompt, camera and voice, encoded frame by frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime import Chunk, Pool, Session, VideoManifest
from seko_runtime.controls import Control as Steered
from seko_runtime.controls import Event, controls_of
from seko_runtime.controls.recording import Recording, of_json
from seko_runtime.errors import UsageError
from seko_runtime.sessions.session import PendingResult
from seko_serve.errors import ServeError
from seko_serve.live.track import SoundTrack
from seko_serve.media import sound, video
from seko_serve.protocol import FRAME, Codec, Control, Media
from seko_serve.video.facts import described
from seko_serve.video.opening import Opening

# Messages of a client that stand for an event of a control, by the message's type: the event's name, and fields that it
# adds. Any other event comes in a message ``control``.
EVENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "keys": ("held", {}),
    "poses": ("poses", {}),
    "audio": ("pcm16", {}),
    "audio_end": ("end", {"end": True}),
    FRAME: ("frame", {}),
}
MOST_PARTS = 1001  # denominator of a frame rate: television has 30000/1001


class VideoContent:
    """The video of one session; see `Content` for its methods.

    Parameters
    ----------
    manifest : VideoManifest
        The manifest of a video artifact.
    opening : Opening
        The conditions with which the session begins.
    """

    def __init__(self, manifest: VideoManifest, opening: Opening) -> None:
        self.manifest, self.opening = manifest, opening
        table = manifest.workload.video
        if table is None:  # the server refuses such an artifact when it starts
            raise ServeError("unsupported", "this artifact makes no video")
        self._table, self._fps = table, Fraction(opening.fps).limit_denominator(MOST_PARTS)
        self._controls = controls_of(manifest)
        self._sounding = self._controls.sounding()
        if opening.pictures is not None:
            for pictures in self._controls.of_kind("pictures"):
                pictures.load(opening.pictures)
        if opening.masks is not None and (masks := self._controls.taking("masks")) is not None:
            masks.take({"masks": [*opening.masks]})
        if (keys := self._controls.taking("held")) is not None:
            keys.take({"held": []})
        self._begin_voice()
        self._recording: Recording | None = None
        self.frames: video.VideoEncoder | None = None
        self.sound: SoundTrack | None = None
        self._overlaps_decoding = True  # whether chunks are decoded while the next call runs

    @property
    def rate(self) -> float:
        """Number of video frames per second that the viewer shows."""
        return self.opening.fps

    @property
    def period_s(self) -> float:
        """Seconds in which the viewer plays one chunk."""
        return self._table.chunk_frames / self.opening.fps

    # -- the event loop ----------------------------------------------------------------------------------------

    def check(self, control: Control) -> None:
        """Raise a ServeError for a control that the artifact does not support."""
        if (steering := self._event_of(control)) is not None:
            steered, event = steering
            try:
                steered.check(event)
            except UsageError as error:
                raise ServeError("bad_request", str(error)) from None
        if control.type == "prompt" and self.manifest.workload.text is None:
            raise ServeError("unsupported", "this artifact takes no sentences")
        if control.type == "text":
            raise ServeError(
                "unsupported", "this artifact speaks no text; a sentence that it shows is a prompt"
            )

    def codecs(self, hello: Control) -> tuple[Codec, ...]:
        """Return the codec of the video frames, and the codec of the sound if the artifact has sound and the client
        supports a sound codec.
        """
        frames, heard = video.chosen_codec(hello.fields["codecs"]), hello.fields.get("audio", ())
        return (frames, sound.chosen_codec(heard)) if heard and self._sounding is not None else (frames,)

    def attach(self, codecs: Sequence[Codec]) -> None:
        """Begin or continue the video with these codecs; the next frame is a key frame."""
        frames, *heard = codecs
        if self.frames is None or self.frames.codec is not frames:
            self.frames = video.ENCODERS[frames](self._table.width, self._table.height, self._fps)
        self.frames.request_key()
        if not heard:
            self.sound = None
        elif self.sound is None or self.sound.codec is not heard[0]:
            self.sound = SoundTrack(heard[0], self._sound_rate)

    def ready(self, codecs: Sequence[Codec]) -> dict[str, object]:
        """Return frame size, frame rate, codecs and inputs of the artifact for the message ``ready``."""
        frames, *heard = codecs
        audio = (
            None if not heard else {"codec": heard[0].name.lower(), **sound.facts(heard[0], self._sound_rate)}
        )
        return {
            "width": self._table.width,
            "height": self._table.height,
            "fps": self.opening.fps,
            "codec": frames.name.lower(),
            "audio": audio,
            "chunk_frames": self._table.chunk_frames,
            "first_frames": self._table.first_frames,
            "latent_frames": self.manifest.workload.stream.chunk_frames,
            "inputs": [spec.name for spec in self.manifest.caller_inputs],
            "takes": described(self.manifest)["takes"],
            "controls": self._controls.describe(),
        }

    def preparation(self) -> None:
        """Return None: `open` queues a fixed number of engine calls, whatever the client sent."""

    def facts(self) -> dict[str, object]:
        """Return how many frames of an input video were taken, dropped and repeated."""
        taker = self._controls.taking(EVENTS[FRAME][0])
        return {} if taker is None else {"video_in": taker.describe()["frames"]}

    def recording(self) -> str:
        """Return what has happened to the session, as lines of JSON; ServeError if it is not recorded, or if more has
        happened than a recording holds."""
        if self._recording is None:
            raise ServeError(
                "conflict",
                "the session is not recorded: open it with record, and read this before it goes on from a snapshot",
            )
        try:
            return self._recording.text()
        except UsageError as error:
            raise ServeError("conflict", str(error)) from None

    # -- the device's thread -----------------------------------------------------------------------------------

    def open(self, pool: Pool, name: str, tenant: str) -> Session:
        """Open a session of the pool with the picture, prompt, inputs and voice that the client sent."""
        opening = self.opening
        row = pool.open_session(
            seed=opening.seed,
            prompt=opening.prompt,
            inputs=dict(opening.inputs) or None,
            name=name,
            tenant=tenant,
            controls=self._controls,
        )
        self._overlaps_decoding = row.overlaps_decoding
        if opening.record:
            self._recording = row.record(fps=opening.fps)
        return row

    def check_with(self, row: Session, control: Control) -> None:
        """Raise the runtime's error for a prompt that it refuses."""
        if control.type == "prompt":
            row.check_prompt(control.fields["text"], recache=control.fields.get("recache", False))

    def apply(self, row: Session, control: Control) -> None:
        """Apply a control of the client: change the video from the next chunk on."""
        fields: Mapping[str, Any] = control.fields
        if control.type == "prompt":
            row.set_prompt(
                fields["text"], recache=fields.get("recache", False), weight=fields.get("weight", 1.0)
            )
        elif control.type in ("restart", "seed"):
            self._restart(row, fields.get("seed") if control.type == "restart" else fields["value"])
        elif (steering := self._event_of(control)) is not None:
            steered, event = steering
            steered.take(event)

    def _event_of(self, control: Control) -> tuple[Steered, Event] | None:
        """Return the control that a client's message is for, and its event; None for another message. ServeError if the
        artifact has no such control."""
        fields: Mapping[str, Any] = control.fields
        if control.type == "control":
            if fields["name"] not in self._controls:
                names = ", ".join(self._controls) or "none"
                raise ServeError(
                    "unsupported", f"this artifact has no control {fields['name']!r}: it has {names}"
                )
            return self._controls[fields["name"]], of_json(fields["event"])
        if control.type not in EVENTS:
            return None
        name, more = EVENTS[control.type]
        steered = self._controls.taking(name)
        if steered is None:
            what = "hears no audio" if control.type.startswith("audio") else "has no such control"
            what = "takes no video" if control.type == FRAME else what
            raise ServeError("unsupported", f"this artifact {what}: {control.type} steers nothing")
        return steered, {**fields, **more}

    def starved(self) -> bool:
        """Return whether the next chunk needs an event that has not come, such as sound."""
        return not self._controls.ready()

    def ask(self, row: Session, due: float) -> PendingResult:
        """Request the session's next chunk from the pool."""
        return row.request_chunk(due)

    def accept_chunk(self, result: Chunk) -> VideoPiece:
        """Accept a finished chunk of video, and return it with the sound that is played with it."""
        heard = None if self._sounding is None else self._sounding.sound(int(result.frames[0, 0]))
        piece = VideoPiece(self, result, heard)
        if not self._overlaps_decoding:
            piece.keep()  # the frames are there: a worker would wait until the next call is queued, here made
        return piece

    def frames_of(self, chunk: Chunk) -> int:
        """Return the number of a chunk's video frames."""
        return self._table.first_frames if chunk.frames[0, 0] == 0 else self._table.chunk_frames

    def state(self) -> dict[str, Any]:
        """Return the conditions of the session, and its controls."""
        return {
            "opening": self.opening.state(),
            "controls": self._controls.state(),
        }

    def load(self, row: Session, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned, with a session of the pool that was restored."""
        self._overlaps_decoding = row.overlaps_decoding
        self._controls.load(state["controls"])
        row.controls = self._controls

    def _restart(self, row: Session, seed: int | None) -> None:
        row.restart(seed=seed)  # keys that are held stay held
        self._begin_voice()

    def _begin_voice(self) -> None:
        """Take the voice with which a stream begins: that of the opening, or silence."""
        if self._sounding is not None:
            voice = self.opening.voice
            self._sounding.take({"end": True} if voice is None else {"samples": voice, "last": True})

    @property
    def _sound_rate(self) -> int:
        return 0 if self._sounding is None else self._sounding.sound_rate or 0


class VideoPiece:
    """A chunk's video frames and sound that are to be sent to the viewer; see `Piece`."""

    def __init__(self, content: VideoContent, chunk: Chunk, heard: NDArray[np.float32] | None) -> None:
        self._content, self._chunk, self._heard = content, chunk, heard
        self._parts: Iterator[NDArray[np.uint8]] | None = None

    def keep(self) -> None:
        """Wait for all video frames, so that `read` and `encode` wait for nothing."""
        self._parts = iter([*self._chunk.video_parts()])

    def read(self) -> int:
        """Wait for the first part of the chunk's video frames, and return the number of all."""
        parts = self._chunk.video_parts() if self._parts is None else self._parts
        self._parts = chain([next(parts)], parts)
        return self._content.frames_of(self._chunk)

    def encode(self, number: int, first: int) -> Iterator[Media]:
        """Yield the sound's packets, then a message for each frame, as soon as the part of the chunk that has it is on
        the host; see `Piece.encode`."""
        track = self._content.sound
        if self._content.frames is None or self._parts is None:
            raise RuntimeError("a chunk was made for a session that nobody watches")
        if track is not None and self._heard is not None:
            yield from track.encode(self._heard, number, int(first * track.rate // self._content.rate))
        count = self._content.frames_of(self._chunk)
        for offset, frame in enumerate(frame for part in self._parts for frame in part[0]):
            encoder = self._content.frames  # another one once a client with another codec has come
            packet = encoder.encode(frame)
            yield Media(
                encoder.codec,
                0,
                number,
                first + offset,
                video.pts_us(first + offset, self._content.rate),
                1,
                packet.payload,
                key=packet.key,
                discontinuity=self._chunk.index == 0 and offset == 0 and number > 0,
                last=offset == count - 1,
            )
