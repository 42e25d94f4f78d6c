"""Messages of the stream's socket: subprotocols, JSON controls and binary media. Client and server both use the pure
functions of this protocol."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from seko_runtime.arguments import nearest
from seko_serve.errors import MAX_NAME_LETTERS, ServeError, check_fields

SUBPROTOCOL = "seko.v1"
QUEUE_HEADER, JOIN = "seko-queue", "join"  # of a request that waits: `join`, then the token of its place
NONE_SEEN = -1  # in place of the last serial that a client saw
TICKET_PREFIX, RESUME_PREFIX, WATCH_PREFIX = "seko.ticket.", "seko.resume.", "seko.watch."
VERSION = 1
HEADER = struct.Struct("<BBBBIIIQII")
MAX_CONTROL_BYTES = 64 << 10  # a JSON message of a client
MAX_ID_LETTERS = 64
MAX_BUFFER = 8  # chunks that a viewer collects before it plays
MAX_AUDIO_BYTES = 128 << 10  # of a binary message of a client: 4 s of one voice
MAX_FRAME_BYTES = 512 << 10  # of a binary message of a client: a frame of an input video
FRAME = "frame"  # type of the control that a frame of an input video is
_DIGITS = re.compile("-?[0-9]{1,19}")
_UNSIGNED_32, _UNSIGNED_64 = (1 << 32) - 1, (1 << 64) - 1


class Codec(IntEnum):
    """The codec of a binary message: its kind of video or sound."""

    H264 = 1  # Annex B, parameter sets inside each key frame
    VP8 = 2
    RGB24 = 3  # [frames, height, width, 3] uint8
    MJPEG = 4  # one JPEG
    FMP4 = 5  # a segment of fragmented MP4 with one frame; a key frame comes behind the initialisation
    PCM = 16  # signed 16 bits, little endian, one channel
    AAC = 17  # ADTS
    OPUS = 18


VIDEO_CODECS = {codec.name.lower(): codec for codec in Codec if codec < Codec.PCM}
SOUND_CODECS = {codec.name.lower(): codec for codec in Codec if codec >= Codec.PCM}


@dataclass(frozen=True)
class Media:
    """One binary message with encoded video or sound.

    Parameters
    ----------
    codec : Codec
        Codec of the payload.
    serial : int
        Number of the message, which rises by one with each binary message of a session, also across reconnects.
    chunk : int
        Number of the chunk to which the message belongs.
    first : int
        Number of the message's first video frame or first sound sample, counted from the stream's start.
    pts_us : int
        Time at which the message is shown or heard, in microseconds from the stream's start.
    count : int
        Number of video frames or samples in the message.
    payload : bytes
        The encoded media.
    key : bool
        Whether a decoder can begin with this message.
    discontinuity : bool
        Whether a new stream begins with this message.
    last : bool
        Whether this is the chunk's last message of its kind, video or sound.
    """

    codec: Codec
    serial: int
    chunk: int
    first: int
    pts_us: int
    count: int
    payload: bytes
    key: bool = False
    discontinuity: bool = False
    last: bool = False

    @property
    def begins_video(self) -> bool:
        """Whether a decoder of video can begin with this message."""
        return self.key and self.codec < Codec.PCM

    def pack(self) -> bytes:
        """Return the message as bytes: a header of `HEADER`'s 32 bytes and the payload."""
        flags = self.key | self.discontinuity << 1 | self.last << 2
        header = HEADER.pack(
            VERSION,
            self.codec,
            flags,
            0,
            self.serial & _UNSIGNED_32,
            self.chunk & _UNSIGNED_32,
            self.first & _UNSIGNED_32,
            self.pts_us & _UNSIGNED_64,
            self.count,
            len(self.payload),
        )
        return header + self.payload

    @classmethod
    def parse(cls, message: bytes) -> Media:
        """Parse a binary message; ServeError if the bytes are not a message of this protocol version."""
        if len(message) < HEADER.size:
            raise ServeError(
                "bad_request", f"a binary message has {len(message)} bytes, expected {HEADER.size} or more"
            )
        version, codec, flags, _, serial, chunk, first, pts_us, count, size = HEADER.unpack_from(message)
        if version != VERSION or codec not in Codec._value2member_map_ or size != len(message) - HEADER.size:
            raise ServeError(
                "bad_request",
                f"a binary message of version {version} and codec {codec} says {size} bytes and has "
                f"{len(message) - HEADER.size}; expected version {VERSION}",
            )
        return cls(
            Codec(codec),
            serial,
            chunk,
            first,
            pts_us,
            count,
            message[HEADER.size :],
            key=bool(flags & 1),
            discontinuity=bool(flags & 2),
            last=bool(flags & 4),
        )


# -- controls -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """A JSON message of a client whose fields were checked.

    Parameters
    ----------
    type : str
        Type of the control, one of `CONTROLS`.
    id : str
        Id that the client gave the control; the server's receipts repeat the id. Empty if the control has no id.
    fields : mapping of str to object
        The other fields of the control, by name.
    """

    type: str
    id: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[object, str], Any]


def _text(most: int) -> Check:
    def check(value: object, name: str) -> str:
        if not isinstance(value, str):
            raise ServeError("bad_request", f"{name} is of type {type(value).__name__}, expected a text")
        if len(value) > most:
            raise ServeError("too_large", f"{name} has {len(value)} letters, at most {most} are taken")
        return value

    return check


def _whole(least: int, most: int) -> Check:
    def check(value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ServeError("bad_request", f"{name} is no whole number from {least} to {most}")
        return value

    return check


def _number(value: object, name: str) -> float:
    finite = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        number = float(value) if finite else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ServeError("bad_request", f"{name} is no finite number")
    return number


def _share(value: object, name: str) -> float:
    number = _number(value, name)
    if not 0 < number <= 1:
        raise ServeError("bad_request", f"{name} is {number:g}, expected a number above 0, at most 1")
    return number


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ServeError("bad_request", f"{name} is of type {type(value).__name__}, expected true or false")
    return value


def _list_of(check: Check, most: int) -> Check:
    def check_all(value: object, name: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ServeError("bad_request", f"{name} is of type {type(value).__name__}, expected a list")
        if len(value) > most:
            raise ServeError("too_large", f"{name} has {len(value)} entries, at most {most} are taken")
        return tuple(check(item, f"{name}[{number}]") for number, item in enumerate(value))

    return check_all


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ServeError("bad_request", f"{name} is of type {type(value).__name__}, expected an object")
    return value


def base64_bytes(text: str, name: str, most: int) -> bytes:
    """Return the bytes of base64 text, which may be broken into lines, as MIME does; ServeError if ``text`` is no
    base64, or holds more than ``most`` bytes. Messages call it by ``name``."""
    for space in "\r\n\t ":
        text = text.replace(space, "")
    if len(text) > -(-most // 3) * 4:
        raise ServeError("too_large", f"{name} has more than {most} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ServeError("bad_request", f"{name} is no base64") from None


def _any(value: object, name: str) -> object:  # the control that takes it checks it
    del name
    return value


def whole_seed(value: object, name: str) -> int:
    """Return a seed, which is a whole number or, as forms and some clients send it, a text of its digits; ServeError
    for any other value. Messages call it by ``name``."""
    seed = int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= 1 << 62:
        found = repr(value)[:MAX_NAME_LETTERS]
        raise ServeError("bad_request", f"{name} is {found}, expected a whole number within 62 bits")
    return seed


MAX_PROMPT_LETTERS = 4_000
_ID = ("id", _text(MAX_ID_LETTERS))


@dataclass(frozen=True)
class Shape:
    """The required and the optional fields of one type of control, each with a check."""

    required: tuple[tuple[str, Check], ...] = ()
    optional: tuple[tuple[str, Check], ...] = ()

    @property
    def takes_id(self) -> bool:
        """Whether a control of this type has an id, which the server's receipts repeat."""
        return _ID in self.required


CONTROLS: Mapping[str, Shape] = {
    "hello": Shape(
        (("codecs", _list_of(_text(16), 16)),),
        (("audio", _list_of(_text(16), 16)), ("buffer", _whole(1, MAX_BUFFER))),
    ),
    "ack": Shape((("chunk", _whole(0, _UNSIGNED_32)),)),
    "prompt": Shape((_ID, ("text", _text(MAX_PROMPT_LETTERS))), (("recache", _flag), ("weight", _share))),
    "control": Shape((_ID, ("name", _text(MAX_ID_LETTERS)), ("event", _object))),
    "keys": Shape((_ID, ("held", _any))),
    "poses": Shape((_ID, ("poses", _any)), (("intrinsics", _any),)),
    "audio": Shape((_ID, ("pcm16", _any)), (("last", _flag),)),
    "audio_end": Shape((_ID,)),
    "text": Shape((_ID, ("text", _text(MAX_PROMPT_LETTERS))), (("last", _flag),)),
    "seed": Shape((_ID, ("value", whole_seed))),
    "pause": Shape((_ID,)),
    "play": Shape((_ID,)),
    "restart": Shape((_ID,), (("seed", whole_seed),)),
    "ping": Shape((("t", _number),)),
    "close": Shape(),
}


def parse_control(message: str | bytes) -> Control:
    """Parse a client's JSON message.

    Raises
    ------
    ServeError
        If the message is too long, not a JSON object or of an unknown type, or a field is missing, unknown or of a
        wrong type.
    """
    size = len(message.encode()) if isinstance(message, str) else len(message)
    if size > MAX_CONTROL_BYTES:
        raise ServeError("too_large", f"a control has {size} bytes, at most {MAX_CONTROL_BYTES} are taken")
    try:
        table = json.loads(message, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ServeError("bad_request", "a control is no JSON object") from None
    if not isinstance(table, dict):
        raise ServeError("bad_request", f"a control is of type {type(table).__name__}, expected an object")
    kind = table.pop("type", None)
    shape = shape_of(kind)
    fields: dict[str, Any] = {}
    for name, check in (*shape.required, *shape.optional):
        if name in table:
            fields[name] = check(table.pop(name), f"{kind}.{name}")
        elif (name, check) in shape.required:
            raise ServeError("bad_request", f"{kind}.{name} is missing")
    check_fields(table, [name for name, _ in (*shape.required, *shape.optional)], str(kind))
    return Control(str(kind), fields.pop("id", ""), fields)


def shape_of(kind: object) -> Shape:
    """Return the fields of a type of control; ServeError if there is no such type."""
    shape = CONTROLS.get(kind) if isinstance(kind, str) else None
    if shape is None:
        word = f"{str(kind)[:MAX_NAME_LETTERS]!r}{nearest(str(kind)[:MAX_NAME_LETTERS], CONTROLS)}"
        raise ServeError(
            "bad_request", f"unknown type of control {word}; expected one of {', '.join(CONTROLS)}"
        )
    return shape


def sound_message(pcm16: bytes, count: int, number: int, *, last: bool) -> bytes:
    """Return a client's binary message with ``count`` voice samples of each speaker, in the form that `parse_binary`
    reads. The message's serial ``number`` is the id of the control."""
    return Media(Codec.PCM, number, 0, 0, 0, count, pcm16, last=last).pack()


def frame_message(picture: bytes, number: int = 0, *, dropped: int = 0) -> bytes:
    """Return a client's binary message with a frame of an input video, a JPEG, in the form that `parse_binary` reads.

    The message's serial ``number`` is the id of the control; 0 stands for no id, and gets no receipts. ``dropped`` is
    the number of frames that the client left out since the frame before.
    """
    return Media(Codec.MJPEG, number, 0, dropped, 0, 1, picture).pack()


def parse_binary(message: bytes) -> Control:
    """Parse a client's binary message: voice samples as the control ``audio``, or a frame of an input video as the
    control `FRAME`. The control's id is the message's serial; a frame of serial 0 has none.

    Raises
    ------
    ServeError
        If the message holds neither PCM sound nor a JPEG, or is too long.
    """
    most = HEADER.size + max(MAX_AUDIO_BYTES, MAX_FRAME_BYTES)
    if len(message) > most:
        raise ServeError("too_large", f"a binary message has {len(message)} bytes, at most {most} are taken")
    media = Media.parse(message)
    if media.codec is Codec.MJPEG:
        number = str(media.serial) if media.serial else ""
        return Control(FRAME, number, {"picture": media.payload, "dropped": media.first})
    if media.codec is not Codec.PCM:
        raise ServeError(
            "bad_request", f"a client's binary message is {media.codec.name}, expected PCM or MJPEG"
        )
    if len(media.payload) > MAX_AUDIO_BYTES:
        raise ServeError(
            "too_large",
            f"a binary message has {len(media.payload)} bytes of sound, at most {MAX_AUDIO_BYTES} are taken",
        )
    return Control("audio", str(media.serial), {"pcm16": media.payload, "last": media.last})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def message(kind: str, **fields: object) -> str:
    """Return a JSON message of the server with this type and these fields."""
    return json.dumps({"type": kind, **fields}, separators=(",", ":"), allow_nan=False)


def codec_of(message: bytes) -> int:
    """Return the codec of a binary message that `Media.pack` has made."""
    return message[1]


def parse_received(received: str | bytes) -> Media | dict[str, Any]:
    """Parse a message that a client received.

    Raises
    ------
    ServeError
        If the message is the error with which the server closes the socket, or the bytes are not a message of this
        protocol version.
    """
    if isinstance(received, bytes):
        return Media.parse(received)
    table: dict[str, Any] = json.loads(received)
    if table["type"] == "error":
        raise ServeError.of_body(table)
    return table


# -- subprotocols ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entrance:
    """A client's credentials in its subprotocols: a ticket, a resume token with the serial of the last message that the
    client received, or a watch token.

    A client sends its credentials as subprotocols because a browser can set no other header of a WebSocket.
    """

    ticket: str = ""
    resume: str = ""
    last_serial: int = NONE_SEEN
    watch: str = ""

    def subprotocols(self) -> tuple[str, str]:
        """Return the subprotocols that a client offers, as `parse_subprotocols` reads them."""
        if self.ticket:
            return SUBPROTOCOL, f"{TICKET_PREFIX}{self.ticket}"
        if self.watch:
            return SUBPROTOCOL, f"{WATCH_PREFIX}{self.watch}"
        serial = "" if self.last_serial == NONE_SEEN else self.last_serial
        return SUBPROTOCOL, f"{RESUME_PREFIX}{self.resume}.{serial}"


def parse_subprotocols(offered: Sequence[str]) -> Entrance:
    """Return the credentials in a client's subprotocols; ServeError unless there is exactly one ticket, resume
    token or watch token."""
    if SUBPROTOCOL not in offered:
        raise ServeError("bad_request", f"the socket's subprotocols lack {SUBPROTOCOL}")
    tickets = [name[len(TICKET_PREFIX) :] for name in offered if name.startswith(TICKET_PREFIX)]
    resumes = [name[len(RESUME_PREFIX) :] for name in offered if name.startswith(RESUME_PREFIX)]
    watches = [name[len(WATCH_PREFIX) :] for name in offered if name.startswith(WATCH_PREFIX)]
    if len(tickets) + len(resumes) + len(watches) != 1:
        raise ServeError(
            "unauthorized",
            f"expected one of {TICKET_PREFIX}TICKET, {RESUME_PREFIX}TOKEN.SERIAL and {WATCH_PREFIX}TOKEN",
        )
    if tickets:
        return Entrance(ticket=tickets[0])
    if watches:
        return Entrance(watch=watches[0])
    token, _, serial = resumes[0].rpartition(".")
    if not token or not (serial == "" or (serial.isascii() and serial.isdecimal() and len(serial) < 11)):
        raise ServeError("unauthorized", f"expected {RESUME_PREFIX}TOKEN.SERIAL")
    return Entrance(resume=token, last_serial=int(serial) if serial else NONE_SEEN)
