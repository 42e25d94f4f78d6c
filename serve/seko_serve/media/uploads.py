"""Pictures and sound that clients upload in the body of a request: decoded, with limits on their size."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from av import VideoFrame
from numpy.typing import NDArray

from seko_runtime.controls.fitting import cover_pictures
from seko_runtime.errors import DecodingError, SekoRuntimeError
from seko_runtime.media_files.containers import picture_format
from seko_runtime.media_files.films import covering
from seko_runtime.media_files.picture_heads import picture_head
from seko_runtime.media_files.pictures import load_image
from seko_runtime.media_files.sound import load_sound
from seko_serve.errors import ServeError, check_fields
from seko_serve.protocol import base64_bytes

ReadT = TypeVar("ReadT")
MAX_PICTURE_BYTES, MAX_SOUND_BYTES = 8 << 20, 16 << 20
MAX_PICTURE_PIXELS = 25_000_000
MAX_SOUND_S, VOICE_RATE = 600, 16_000
MAX_VOICE_S = 60  # of a voice to sound like
MAX_INPUT_BYTES = 4 << 20
AGAIN_S = 10.0  # after which a client tries again when the disk is full
_LOG = logging.getLogger("seko_serve")
PICTURE_FORMS = "png_pipe", "jpeg_pipe", "webp_pipe"
PICTURES, SOUNDS = "PNG, JPEG or WebP", "WAV, MP3, FLAC, Ogg, MP4 or WebM"


def data_of(value: object, name: str, most: int) -> bytes:
    """Return the bytes of an uploaded file.

    Parameters
    ----------
    value : object
        The upload as text: base64, or a data URL with base64; line breaks are left out.
    name : str
        Name of the request's field, for error messages.
    most : int
        Largest number of bytes that the upload may have.

    Raises
    ------
    ServeError
        If ``value`` is not base64 text or a data URL, or the upload is too large.
    """
    if not isinstance(value, str):
        raise ServeError(
            "bad_request", f"{name} is of type {type(value).__name__}, expected base64 or a data URL"
        )
    head, comma, rest = value.partition(",")
    if value.startswith("data:") and not (comma and head.endswith(";base64")):
        raise ServeError("bad_request", f"{name} is a data URL without base64")
    text = rest if value.startswith("data:") else value
    return base64_bytes(text, name, most)


def decoded_picture(data: bytes, name: str = "image") -> NDArray[np.uint8]:
    """Return an uploaded picture, uint8 [H, W, 3]. The size in the picture's header is checked before the picture is
    decoded.

    Raises
    ------
    ServeError
        If the data is not a picture, or the picture is larger than the limits.
    """
    if len(data) > MAX_PICTURE_BYTES:
        raise ServeError("too_large", f"{name} has {len(data)} bytes, at most {MAX_PICTURE_BYTES} are taken")
    form = picture_format(data[:16])
    head = picture_head(BytesIO(data), form, MAX_PICTURE_PIXELS) if form in PICTURE_FORMS else None
    if head is None:
        raise ServeError("bad_request", f"{name} is no picture: expected {PICTURES}")
    if head.width * head.height > MAX_PICTURE_PIXELS:
        raise ServeError(
            "too_large",
            f"{name} has {head.width} x {head.height} pixels, at most {MAX_PICTURE_PIXELS} are taken",
        )
    return _from_file(data, name, load_image, f"is no picture that can be decoded: expected {PICTURES}")


def fitted_frame(frame: VideoFrame, height: int, width: int) -> NDArray[np.uint8]:
    """Return a frame of an input video as uint8 [height, width, 3], resized until it covers this size and cut to its
    centre; ServeError if it is too large, or so narrow that it would be."""
    scale = max(1.0, width / frame.width, height / frame.height)
    if frame.width * frame.height * scale**2 > MAX_PICTURE_PIXELS:
        raise ServeError("too_large", f"a frame has more than {MAX_PICTURE_PIXELS} pixels")
    return cover_pictures(covering(frame, height, width).to_ndarray(format="rgb24"), height, width)[0]


def decoded_sound(
    data: bytes, name: str = "voice", *, rate: int = VOICE_RATE, max_s: float = MAX_SOUND_S
) -> NDArray[np.float32]:
    """Return the samples of an uploaded voice, float32 [N] in -1..1 at a given rate, as the mean of the upload's
    channels.

    Raises
    ------
    ServeError
        If the data is not sound, or the sound is longer than the limits.
    """
    if len(data) > MAX_SOUND_BYTES:
        raise ServeError("too_large", f"{name} has {len(data)} bytes, at most {MAX_SOUND_BYTES} are taken")
    return _from_file(
        data,
        name,
        lambda path: load_sound(path, max_s=max_s, rate=rate),
        f"is no sound of at most {max_s:g} s that can be decoded: expected {SOUNDS}",
    )


def _from_file(data: bytes, name: str, read: Callable[[Path], ReadT], otherwise: str) -> ReadT:
    """Write the bytes to a file that only this process's user can open, and return the result of the runtime's reader
    for the file. ServeError if the reader fails, with the reader's reason or with ``otherwise``, or if the file cannot
    be written."""
    try:
        with tempfile.NamedTemporaryFile(prefix="seko-upload-") as file:
            file.write(data)
            file.flush()
            return read(Path(file.name))
    except SekoRuntimeError as error:
        reason = str(error).partition(f"{file.name} ")[2]  # behind the words for an option and its file
        # Reasons of FFmpeg help no client.
        if not reason or file.name in reason or isinstance(error, DecodingError):
            reason = otherwise
        raise ServeError("bad_request", f"{name} {reason}") from None
    except OSError as error:
        _LOG.error("an upload cannot be written to a temporary file: %s", error.strerror)
        raise ServeError("full", f"the server has no space for {name}", retry_after=AGAIN_S) from None


def array_of(value: object, name: str) -> NDArray[Any]:
    """Return an array from a client's JSON object with ``dtype``, ``shape`` and ``data`` (base64).

    Raises
    ------
    ServeError
        If the JSON object is invalid, or the array is larger than the limit.
    """
    table = value if isinstance(value, dict) else None
    if table is not None:
        check_fields(table, ("dtype", "shape", "data"), name)
        table = table if len(table) == 3 else None
    if table is None or table["dtype"] not in ("float32", "uint8", "int64") or not _is_shape(table["shape"]):
        raise ServeError(
            "bad_request",
            f"{name} is no array: expected dtype (float32, uint8 or int64), shape and data in base64",
        )
    data, dtype = data_of(table["data"], f"{name}.data", MAX_INPUT_BYTES), np.dtype(table["dtype"])
    shape = tuple(table["shape"])
    wanted = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(data) != wanted:
        raise ServeError("bad_request", f"{name}.data has {len(data)} bytes, its shape needs {wanted}")
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= 8
        and all(type(size) is int and 0 < size <= MAX_INPUT_BYTES for size in shape)
    )
