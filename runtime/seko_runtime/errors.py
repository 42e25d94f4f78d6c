"""Errors of the runtime: a class for each exit code of the command, and for each cause that callers handle
differently.
"""

from __future__ import annotations

MAX_MESSAGE_LETTERS = 4096


class SekoRuntimeError(Exception):
    """Base class of all errors that `seko_runtime` prints as one sentence instead of a traceback.

    Parameters
    ----------
    message : str
        The message, which may quote files or arguments; `one_line` reduces it to one line of bounded length.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class UsageError(SekoRuntimeError):
    """An invalid call or option, such as a wrong shape of text or a row that does not exist."""

    exit_code = 2


class InputFileError(UsageError):
    """An input file of the caller, such as a picture or a sound, is missing, damaged, or not in a format that Seko
    reads."""

    exit_code = 3


class DecodingError(InputFileError):
    """FFmpeg cannot read an input file or decode its content."""


class SessionClosedError(SekoRuntimeError):
    """A session or an artifact was used after its `close()`."""


class ForkedProcessError(UsageError):
    """An open artifact, or initialised CUDA, of the parent process was used in a forked process."""


class StaleChunkError(SekoRuntimeError):
    """A chunk was read after a later chunk had overwritten its latents or frames."""


class TornStreamError(SekoRuntimeError):
    """The state of a session on the host may not match the device. Restart the session, or follow the advice in the
    message.

    The error is raised after Ctrl-C came between decoding a chunk and counting it, or after an engine failed while a
    session was decoded, restarted or given a prompt.
    """


class ArtifactError(SekoRuntimeError):
    """The artifact is damaged, incomplete, hostile, not signed as required, or built for another machine."""

    exit_code = 4


class ManifestError(ArtifactError):
    """`manifest.json` is missing, too large, not JSON, of another format, or has an invalid value, name or program."""


class EngineRunError(ArtifactError):
    """An engine failed while it ran: in the warm-up of a session, in a capture, or in a chunk."""


class SnapshotError(ArtifactError):
    """A snapshot is damaged, not a regular file, or of another format, key or artifact."""


class EnvironmentLacksError(SekoRuntimeError):
    """This machine lacks something that the call needs: a device, a library, memory, a readable trust file."""

    exit_code = 5


class LibraryMissingError(EnvironmentLacksError):
    """A Python library that the call needs is not installed, or cannot be loaded."""


class DeviceMemoryError(EnvironmentLacksError):
    """The device has too little free memory for the artifact or the session."""


class DeviceFaultError(EnvironmentLacksError):
    """The driver refused a call, or a kernel failed on the device."""


class RankLostError(EnvironmentLacksError):
    """One of the rank processes that run an artifact together died, hung or failed alone. All processes of the artifact
    were ended."""


class PoolFullError(EnvironmentLacksError):
    """Every row of a pool belongs to a session, so that no further session can be opened."""


class DiskError(EnvironmentLacksError):
    """The disk is full, or a path cannot be written."""


class VideoWriterError(EnvironmentLacksError):
    """A video cannot be written or a picture read: the encoder, PyAV, is missing."""


class NumericError(SekoRuntimeError):
    """A replayed result differs from the recorded one by more than the tolerance."""

    exit_code = 6


def one_line(message: str) -> str:
    """Return a message as one printable line of at most `MAX_MESSAGE_LETTERS` characters.

    A message that is too long loses its middle, because its end contains the advice. Control characters, line feeds and
    lone surrogates are escaped as in Python source.
    """
    message = _shortened(message)
    if not message.isprintable():
        escaped = (
            letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
            for letter in message
        )
        message = _shortened("".join(escaped))
    return message


def _shortened(message: str) -> str:
    if len(message) <= MAX_MESSAGE_LETTERS:
        return message
    gap = f" [... {len(message)} letters, shortened ...] "
    end = MAX_MESSAGE_LETTERS // 4
    return message[: MAX_MESSAGE_LETTERS - end - len(gap)] + gap + message[-end:]
