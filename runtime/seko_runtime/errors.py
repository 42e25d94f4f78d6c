"""Errors of the runtime, one class for each cause, with the exit codes of the command."""

from __future__ import annotations

MAX_MESSAGE_LETTERS = 4096


class SekoRuntimeError(Exception):
    """Base of all errors that `seko_runtime` prints as one sentence instead of a traceback.

    Parameters
    ----------
    message : str
        May quote files or the caller; it is reduced to one line of bounded length, see `one_line`.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class UsageError(SekoRuntimeError):
    """An invalid call or option, such as a wrong shape of text or a row that does not exist."""

    exit_code = 2


class SessionClosedError(SekoRuntimeError):
    """A session or an artifact was used after its `close()`."""


class ForkedProcessError(UsageError):
    """Something that was opened, or CUDA that was initialised, in the parent process was used after a fork."""


class StaleChunkError(SekoRuntimeError):
    """A chunk was read after a later chunk had overwritten its latents or frames."""


class TornStreamError(SekoRuntimeError):
    """A stream stands between two states: restart it, or do what the message says.

    Ctrl-C came between decoding a chunk and counting it, or an engine failed while a row was decoded, restarted or
    prompted.
    """


class ArtifactError(SekoRuntimeError):
    """Base: the artifact is damaged, incomplete, hostile, or built for another machine."""

    exit_code = 4


class ManifestError(ArtifactError):
    """`manifest.json` is missing, too large, not JSON, or has an invalid value."""


class FormatVersionError(ManifestError):
    """The artifact's format is newer than this runtime."""


class WorkloadUnknownError(ManifestError):
    """No workload of the artifact's kind is known to this runtime."""


class PathEscapeError(ManifestError):
    """A file name in the manifest is not a plain relative path: absolute, or with `..`."""


class ModuleFileError(ArtifactError):
    """The artifact contains a file that Python would import if it were started in that folder."""


class ProgramError(ManifestError):
    """A program names something that does not exist, or writes to something it must not."""


class EngineSignatureError(ArtifactError):
    """A tensor passed to an engine, or returned by it, does not match its signature."""


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
    """A packed artifact differs from what `seko-export pack` writes."""


class TarTruncatedError(ArtifactError):
    """A packed artifact ends too early."""


class TarTrailingError(ArtifactError):
    """A packed artifact has data after its end."""


class DuplicateFileError(ArtifactError):
    """A packed artifact contains a name twice."""


class SignatureMissingError(ArtifactError):
    """A trust file is configured, and the artifact is not signed."""


class SignatureFormatError(ArtifactError):
    """`manifest.sig` is too large, not JSON, or has an invalid value."""


class UnknownKeyError(ArtifactError):
    """No key of the trust file signed the artifact."""


class SignatureWrongError(ArtifactError):
    """A trusted key's signature does not match this manifest."""


class SignatureTimeError(ArtifactError):
    """No trusted signature is as late as the trust file requires."""


class RevokedArtifactError(ArtifactError):
    """The trust file revokes the artifact's digest."""


class DeviceArchError(ArtifactError):
    """The engines were built for another kind of device or another architecture."""


class CpuFeatureError(ArtifactError):
    """The engines use CPU instructions that this machine lacks."""


class TorchVersionError(ArtifactError):
    """The engines were built against another torch."""


class CudaVersionError(ArtifactError):
    """The engines were built against another CUDA."""


class SafetensorsHeaderError(ArtifactError):
    """A safetensors header is too large or malformed, or has an invalid tensor range."""


class WeightMissingError(ArtifactError):
    """A tensor that the manifest lists is not in its safetensors file."""


class WeightShapeError(ArtifactError):
    """A tensor's shape is not the manifest's."""


class WeightDtypeError(ArtifactError):
    """A tensor's dtype is not the manifest's."""


class EngineLoadError(ArtifactError):
    """The backend's library refused an engine file although its hash is right."""


class EngineRunError(ArtifactError):
    """An engine failed while it ran: in the warm-up of a session, in a capture, or in a chunk."""


class PlanVersionError(ArtifactError):
    """The TensorRT plans were built by a version that the installed one cannot run."""


class TokenizerError(ArtifactError):
    """The artifact's tokenizer file is not one that the library `tokenizers` can read."""


class SnapshotError(ArtifactError):
    """A snapshot is damaged, no regular file, or of another format, key or artifact."""


class EnvironmentLacksError(SekoRuntimeError):
    """Base: this machine lacks something that the call needs."""

    exit_code = 5


class BackendMissingError(EnvironmentLacksError):
    """The artifact's backend cannot run here: unknown, or its library is not installed."""


class DeviceMissingError(EnvironmentLacksError):
    """The device that the artifact or the caller names is not in this machine."""


class DeviceMemoryError(EnvironmentLacksError):
    """The device has too little free memory for the artifact or the session."""


class DeviceFaultError(EnvironmentLacksError):
    """The driver refused a call, or a kernel failed on the device."""


class HostMemoryError(EnvironmentLacksError):
    """The machine has too little free memory."""


class HostFaultError(EnvironmentLacksError):
    """The operating system refused a call: too many open files, no space, an input or output error."""


class RankLostError(EnvironmentLacksError):
    """One of the processes that make a chunk together died, hung or failed alone; all of them were ended."""


class PoolFullError(EnvironmentLacksError):
    """Every row of the pool is taken."""


class TokenizerMissingError(EnvironmentLacksError):
    """A sentence was given, and the library `tokenizers` is not installed."""


class TrustFileError(EnvironmentLacksError):
    """The configured trust file cannot be read, or names no key."""


class SignatureLibraryMissingError(EnvironmentLacksError):
    """A trust file is configured, and the library `cryptography` is not installed."""


class DiskError(EnvironmentLacksError):
    """The disk is full, or a path cannot be written."""


class VideoWriterError(EnvironmentLacksError):
    """A video cannot be written or a picture read: the encoder, PyAV, is missing."""


class NumericError(SekoRuntimeError):
    """A replayed chunk differs from its golden by more than the tolerance."""

    exit_code = 6


def one_line(message: str) -> str:
    """Return a message as one printable line of at most `MAX_MESSAGE_LETTERS` characters.

    A message that is too long loses its middle, since the end says what to do. Control characters, line feeds and
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
