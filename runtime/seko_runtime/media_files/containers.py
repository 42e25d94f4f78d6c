"""Opening of media files with PyAV. The first bytes of a file decide its format, which must be in a fixed list.

FFmpeg is always told the format of a file. If FFmpeg guessed the format, a file could be a playlist, and FFmpeg would
open the files that the playlist names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seko_runtime.errors import DecodingError, InputFileError, VideoWriterError
from seko_runtime.format.manifest import MAX_PIXELS
from seko_runtime.host.user_files import first_bytes

_MAX_FRAME_SAMPLES = 1 << 20  # of each channel, in what a decoder gives at once
_HEAD_BYTES = 256  # with the brands of a film

# FFmpeg's name of each format, and what tells it: bytes at an offset.
_PICTURES: Mapping[str, tuple[tuple[int, bytes], ...]] = {
    "png_pipe": ((0, b"\x89PNG\r\n\x1a\n"),),
    "jpeg_pipe": ((0, b"\xff\xd8\xff"),),
    "webp_pipe": ((0, b"RIFF"), (8, b"WEBP")),
    "gif": ((0, b"GIF8"),),
    "bmp_pipe": ((0, b"BM"),),
}
_TIFF = ({"tiff_pipe": ((0, b"II*\x00"),)}, {"tiff_pipe": ((0, b"MM\x00*"),)})
_BOTH: Mapping[str, tuple[tuple[int, bytes], ...]] = {
    "mov": ((4, b"ftyp"),),  # also mp4 and m4a
    "matroska": ((0, b"\x1a\x45\xdf\xa3"),),  # also webm
}
_SOUND: Mapping[str, tuple[tuple[int, bytes], ...]] = {
    "wav": ((0, b"RIFF"), (8, b"WAVE")),
    "flac": ((0, b"fLaC"),),
    "ogg": ((0, b"OggS"),),
    "aiff": ((0, b"FORM"), (8, b"AIF")),
    "caf": ((0, b"caff"),),
    "au": ((0, b".snd"),),
    "mp3": ((0, b"ID3"),),
}
PICTURE_FORMATS = "PNG, JPEG, WebP, GIF, BMP, TIFF, MP4, WebM"
SOUND_FORMATS = "WAV, FLAC, Ogg, AIFF, CAF, AU, MP3, AAC, MP4, WebM"


def picture_format(head: bytes) -> str | None:
    """Return FFmpeg's name of the format of a picture file that begins with these bytes; None if it is not known."""
    return _told_by(head, _PICTURES, *_TIFF, _BOTH)


def sound_format(head: bytes) -> str | None:
    """Return FFmpeg's name of the format of a sound file that begins with these bytes; None if it is not known."""
    named = _told_by(head, _SOUND, _BOTH)
    if named is None and head[:1] == b"\xff" and len(head) > 1 and head[1] & 0xE0 == 0xE0:
        # A frame without a header before it. Its layer is 0 in AAC and 1 to 3 in MPEG audio.
        return "mp3" if head[1] & 0x06 else "aac"
    return named


def _told_by(head: bytes, *tables: Mapping[str, tuple[tuple[int, bytes], ...]]) -> str | None:
    for table in tables:
        for name, marks in table.items():
            if all(head[at : at + len(mark)] == mark for at, mark in marks):
                return name
    return None


def read_head(path: Path, what: str) -> bytes:
    """Return the first bytes of a file.

    Raises
    ------
    InputFileError
        If the file cannot be read; the message begins with ``what``.
    """
    return first_bytes(path, what, _HEAD_BYTES)


@contextmanager
def opened(path: Path, form: str, what: str, without_av: str) -> Iterator[Any]:
    """Context manager with an open PyAV container; errors of the library inside the context become DecodingErrors.

    Parameters
    ----------
    path : Path
        The media file, which exists.
    form : str
        FFmpeg's name of the format, from `picture_format` or `sound_format`.
    what : str
        Beginning of the error message: the option, the file, and the expected kind of file.
    without_av : str
        Advice in the error message for a machine without PyAV.

    Raises
    ------
    DecodingError
        If PyAV refuses the file.
    VideoWriterError
        If PyAV is not installed.
    """
    try:
        import av
    except ImportError:
        raise VideoWriterError(f"{path.name} needs PyAV, which is not installed; {without_av}") from None
    library: Any = av
    # Decoders refuse more before they allocate.
    bounds = {"max_pixels": str(MAX_PIXELS), "max_samples": str(_MAX_FRAME_SAMPLES)}
    # FFmpeg gets the open file and no way to open another: data that lies elsewhere is refused.
    options = bounds | ({"enable_drefs": "0", "use_absolute_path": "0"} if form == "mov" else {})
    try:
        with (
            path.open("rb") as file,
            library.open(file, format=form, options=options, io_open=_no_other_file) as container,
        ):
            for stream in container.streams:
                if stream.codec_context is not None:
                    stream.codec_context.options = bounds
            yield container
    except (InputFileError, VideoWriterError, MemoryError):
        raise
    except (library.FFmpegError, OSError, ValueError, LookupError, RuntimeError, StopIteration) as fault:
        raise DecodingError(f"{what}: {_reason(fault)[:120]}") from None


def _reason(fault: Exception) -> str:
    """Return the message of an exception of PyAV, without the name of the file or of FFmpeg's function."""
    if isinstance(fault, StopIteration):
        return "it holds nothing that can be decoded"
    strerror: str | None = getattr(fault, "strerror", None)
    return strerror or str(fault)


def _no_other_file(url: str, flags: int, options: object) -> Any:
    del flags, options
    raise OSError(f"it refers to another file, {url[:80]!r}")
