"""The runtime: opens artifacts and replays them. Importing `seko_runtime` imports neither numpy nor a tensor
library."""

# This module imports nothing at its top, because `python -m seko_runtime` executes it while the current directory is
# still in sys.path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from seko_runtime.opening.workloads import register_workload
    from seko_runtime.sessions.artifact import OpenArtifact
    from seko_runtime.sessions.session import SessionLeakWarning
    from seko_runtime.sessions.workload import RuntimeWorkload
    from seko_runtime.speech.artifact import SpeechArtifact
    from seko_runtime.speech.manifest import SpeechManifest
    from seko_runtime.speech.normaliser import normalised
    from seko_runtime.speech.pool import SpeechPool
    from seko_runtime.speech.session import SpeechSession
    from seko_runtime.speech.voice import Voice
    from seko_runtime.video.artifact import VideoArtifact
    from seko_runtime.video.chunk import Chunk
    from seko_runtime.video.golden import ChunkError
    from seko_runtime.video.manifest import VideoManifest
    from seko_runtime.video.pool import Pool
    from seko_runtime.video.session import Session

    __version__: str

__all__ = [
    "Chunk",
    "ChunkError",
    "OpenArtifact",
    "Pool",
    "RuntimeWorkload",
    "Session",
    "SessionLeakWarning",
    "SpeechArtifact",
    "SpeechManifest",
    "SpeechPool",
    "SpeechSession",
    "VideoArtifact",
    "VideoManifest",
    "Voice",
    "__version__",
    "normalised",
    "open_artifact",
    "read_manifest",
    "register_workload",
]

_HOMES = {
    "Chunk": "video.chunk",
    "ChunkError": "video.golden",
    "OpenArtifact": "sessions.artifact",
    "Pool": "video.pool",
    "RuntimeWorkload": "sessions.workload",
    "Session": "video.session",
    "SessionLeakWarning": "sessions.session",
    "VideoArtifact": "video.artifact",
    "SpeechArtifact": "speech.artifact",
    "SpeechManifest": "speech.manifest",
    "SpeechPool": "speech.pool",
    "SpeechSession": "speech.session",
    "VideoManifest": "video.manifest",
    "Voice": "speech.voice",
    "normalised": "speech.normaliser",
    "register_workload": "opening.workloads",
}


def open_artifact(
    path: "str | Path",
    device: str = "auto",
    *,
    trust: "str | Path | None" = None,
    copy_weights: bool = False,
    ranks: "int | None" = None,
) -> "OpenArtifact[Any]":
    """Check an artifact and load it. The call of `open_artifact` imports `seko_runtime.opening.artifact`.

    Parameters
    ----------
    path : str or Path
        Folder of the artifact.
    device : str
        ``auto`` (the kind of device for which the artifact was built), ``cpu``, ``cuda`` or ``cuda:N``.
    trust : str or Path, optional
        A trust file: only artifacts signed by a key of the trust file are opened. Default: the file that the
        environment variable ``SEKO_TRUST`` names. Without a trust file signatures are not checked.
    copy_weights : bool
        Whether to read the weights into the process's own memory and hash them there, instead of mapping their files.
        Set ``copy_weights`` on hosts where others may truncate the files, because reading a truncated mapped file ends
        the process with SIGBUS. On a CPU the copy of the weights stays, and processes do not share the copy. On a GPU
        the copy is freed after the upload.
    ranks : int, optional
        Number of processes, one for each GPU, that run each call of the engines together. ``ranks`` must be the number
        for which the artifact was built, which is the default. `open_artifact` starts the processes, which end when the
        artifact is closed.

    Returns
    -------
    OpenArtifact
        The open artifact, a context manager of the workload's own class, such as `VideoArtifact` or `SpeechArtifact`.

    Raises
    ------
    ArtifactError
        If a check of the artifact fails; the subclass tells the cause. After native code of the artifact was loaded,
        only errors about engine files that contradict the manifest are raised.
    EnvironmentLacksError
        If this machine lacks a library, device or memory that the artifact needs.
    UsageError
        If the artifact was built for another number of ranks.
    RankLostError
        If one of the processes of several ranks dies, hangs, or fails at a command at which the others do not.
    """
    from seko_runtime.opening import artifact

    return artifact.open_artifact(path, device, trust=trust, copy_weights=copy_weights, ranks=ranks)


def read_manifest(path: "str | Path", *, trust: "str | Path | None" = None) -> "tuple[Any, str]":
    """Read and check only an artifact's manifest; return it with its digest (SHA-256, hexadecimal).

    Parameters
    ----------
    path : str or Path
        Folder of the artifact.
    trust : str or Path, optional
        A trust file; see `open_artifact`.

    Returns
    -------
    tuple of Manifest and str
        The manifest, of the workload's own class such as `VideoManifest`, and its digest.

    Raises
    ------
    ArtifactError
        If a check of the manifest fails; the subclass tells the cause.
    """
    from seko_runtime.opening import checked_artifact

    return checked_artifact.read_manifest(path, trust=trust)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def _version() -> str:
    """Return the version of the installed distribution; of a checkout that is only in the module path, that of its
    pyproject.toml; else, of a copy of the package alone, ``unknown``."""
    from importlib import metadata

    try:
        return metadata.version("seko-runtime")
    except metadata.PackageNotFoundError:
        import tomllib
        from pathlib import Path

        file = Path(__file__).parents[1] / "pyproject.toml"
        if not file.is_file():
            return "unknown"
        return str(tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"])
