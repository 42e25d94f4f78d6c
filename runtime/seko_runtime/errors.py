"""Errors of the inference box, one class per cause, each with the exit code that the CLI ends with."""

from __future__ import annotations

MAX_MESSAGE_LETTERS = 4096


class SekoRuntimeError(Exception):
    """Base of every error that `seko_runtime` reports as a sentence instead of a traceback.

    Parameters
    ----------
    message : str
        It may quote what a file or a caller said: it is kept as one line of bounded length, see `one_line`.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class UsageError(SekoRuntimeError):
    """A call or an option that cannot be meant: a wrong shape of text, a row that does not exist."""

    exit_code = 2


class SessionClosedError(SekoRuntimeError):
    """A session or an artifact was used after its `close()`."""


class SessionBusyError(UsageError):
    """A session was used by a second thread while a call of the first one ran."""


class ForkedProcessError(UsageError):
    """What one process opened, or CUDA that it began, was used in a process forked from it."""


class StaleChunkError(SekoRuntimeError):
    """A chunk was read after the session's next chunk had overwritten its latents."""


class TornStreamError(SekoRuntimeError):
    """A stream was interrupted, as by Ctrl-C, between decoding a chunk and counting it; it must begin anew."""


class ArtifactError(SekoRuntimeError):
    """Base: the artifact is damaged, incomplete, hostile, or made for another machine."""

    exit_code = 4


class ManifestError(ArtifactError):
    """`manifest.json` is missing, too large, no JSON, or says something that cannot be."""


class FormatVersionError(ManifestError):
    """The artifact's format is newer than this runtime."""


class PathEscapeError(ManifestError):
    """A file name in the manifest is absolute, holds `..`, or is otherwise no plain relative path."""


class ModuleFileError(ArtifactError):
    """The artifact holds a file that Python would import from a folder in which it is started."""


class ProgramError(ManifestError):
    """A program names something that does not exist, or writes where it must not."""


class EngineSignatureError(ArtifactError):
    """What a program hands to an engine, or what the engine gives back, is not its signature."""


class MissingFileError(ArtifactError):
    """A file that the manifest lists is not in the folder."""


class SurplusFileError(ArtifactError):
    """The folder holds something that the manifest does not list."""


class SymlinkError(ArtifactError):
    """The folder holds a symbolic link."""


class IrregularFileError(ArtifactError):
    """The folder holds something that is neither a regular file nor a folder."""


class FileSizeError(ArtifactError):
    """A file is shorter or longer than the manifest says."""


class FileHashError(ArtifactError):
    """A file's SHA-256 is not the manifest's."""


class TarFormatError(ArtifactError):
    """A packed artifact is not byte for byte what `seko-export pack` writes."""


class TarTruncatedError(ArtifactError):
    """A packed artifact ends too early."""


class TarTrailingError(ArtifactError):
    """A packed artifact goes on behind its end."""


class DuplicateFileError(ArtifactError):
    """A packed artifact holds one name twice."""


class SignatureMissingError(ArtifactError):
    """A trust file is configured, and the artifact is not signed."""


class SignatureFormatError(ArtifactError):
    """`manifest.sig` is too large, no JSON, or says something that cannot be."""


class UnknownKeyError(ArtifactError):
    """No key of the trust file signed the artifact."""


class SignatureWrongError(ArtifactError):
    """A signature in the name of a trusted key is not of this manifest."""


class SignatureTimeError(ArtifactError):
    """No trusted signature says a time as late as the trust file asks for."""


class RevokedArtifactError(ArtifactError):
    """The trust file revokes the artifact's digest."""


class DeviceArchError(ArtifactError):
    """The engines were built for another kind of device."""


class CpuFeatureError(ArtifactError):
    """The engines use CPU instructions that this machine lacks."""


class TorchVersionError(ArtifactError):
    """The engines were built against another torch."""


class CudaVersionError(ArtifactError):
    """The engines were built against another CUDA."""


class SafetensorsHeaderError(ArtifactError):
    """A safetensors header is too large, malformed, or places tensors where they cannot be."""


class WeightMissingError(ArtifactError):
    """A tensor that the manifest lists is not in its safetensors file."""


class WeightShapeError(ArtifactError):
    """A tensor's shape is not the manifest's."""


class WeightDtypeError(ArtifactError):
    """A tensor's dtype is not the manifest's."""


class EngineLoadError(ArtifactError):
    """The backend's library refused an engine file whose hash was right."""


class EngineRunError(ArtifactError):
    """An engine failed while it ran: in the first pass of a session, in a capture, or in a chunk."""


class PlanVersionError(ArtifactError):
    """TensorRT plans were built by a version that the one here cannot stand in for."""


class TokenizerError(ArtifactError):
    """The artifact's tokenizer file is none that the library `tokenizers` reads."""


class SnapshotError(ArtifactError):
    """A snapshot is no regular file, damaged, of another format or key, or of another artifact's session."""


class EnvironmentLacksError(SekoRuntimeError):
    """Base: this machine lacks something that the call needs."""

    exit_code = 5


class BackendMissingError(EnvironmentLacksError):
    """The artifact's backend cannot run here: its library is not installed or not supported yet."""


class DeviceMissingError(EnvironmentLacksError):
    """The device that the artifact or the caller names is not on this machine."""


class DeviceMemoryError(EnvironmentLacksError):
    """The device has too little free memory for the artifact or the session."""


class DeviceFaultError(EnvironmentLacksError):
    """The driver refused a call, or a kernel failed on the device."""


class HostMemoryError(EnvironmentLacksError):
    """The machine has too little free memory of its own."""


class HostFaultError(EnvironmentLacksError):
    """The operating system refused a call: too many open files, no space, an input or output error."""


class PoolFullError(EnvironmentLacksError):
    """Every row of the pool is taken."""


class TokenizerMissingError(EnvironmentLacksError):
    """A sentence was given, and the library `tokenizers` is not installed."""


class TrustFileError(EnvironmentLacksError):
    """The configured trust file cannot be read, or names no key."""


class SignatureLibraryMissingError(EnvironmentLacksError):
    """A trust file is configured, and the library `cryptography` is not installed."""


class DiskError(EnvironmentLacksError):
    """A place is full, has too little space, or cannot be written."""


class VideoWriterError(EnvironmentLacksError):
    """A video cannot be written or a picture read: the encoder, PyAV, is missing."""


class NumericError(SekoRuntimeError):
    """Replayed numbers differ from the golden by more than its tolerance."""

    exit_code = 6


def one_line(message: str) -> str:
    """Return a message as one line of a terminal or a log: at most `MAX_MESSAGE_LETTERS`, all of them printable.

    What is too long loses its middle, since the end says what to do. Control characters, line feeds and lone surrogates
    among them, are escaped as in Python's source.
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
