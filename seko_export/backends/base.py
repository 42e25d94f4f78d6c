"""What every backend of the build box is: an object that says what it can carry and makes engine files of pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.errors import UsageError
from seko_export.host.progress import Progress

if TYPE_CHECKING:
    from seko_export.config.build import BuildConfig
    from seko_runtime.format.manifest import Manifest

# Takes a build, the name of an engine and the path to write; returns the seconds it took. Runs in a process of its own.
EngineMaker = Callable[["BuildConfig", str, str], float]


@dataclass(frozen=True)
class Capabilities:
    """What a backend's engines can carry. A build that asks for more is refused by `refuse_uncarried`.

    Parameters
    ----------
    devices : tuple of str
        ``cpu``, ``cuda``.
    fused_kernels : bool
        Layers in Seko's own Triton kernels.
    offloaded_cache : bool
        Caches that lie on the host and come to the device layer by layer.
    pools, pass_caches, layer_rings, window_positions, reference_frames : bool
        As the options of these names ask for them.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    fused_kernels: bool = False
    offloaded_cache: bool = False
    pools: bool = True
    pass_caches: bool = True
    layer_rings: bool = True
    window_positions: bool = True
    reference_frames: bool = True


@dataclass(frozen=True)
class Unfinished:
    """An artifact whose engines, weights and manifest are written: what `ExportBackend.finish` may add files to.

    Parameters
    ----------
    folder : Path
        The artifact's folder.
    manifest : Manifest
        As written so far.
    progress : callable
        Told of every step.
    compiler_cache : bool
        Whether the compiler's cache is wanted in the artifact.
    """

    folder: Path
    manifest: Manifest
    progress: Progress
    compiler_cache: bool


@dataclass(frozen=True)
class ExportBackend:
    """One way to turn pieces into engine files.

    Parameters
    ----------
    name : str
        As ``--backend`` and the manifest spell it.
    capabilities : Capabilities
        What its engines can carry.
    compile_piece : callable or None
        Makes the file of one engine; a function of a module, since worker processes import it. None for the backend
        that runs pieces as they are and writes no files.
    suffix : str
        What engine files end with.
    check : callable
        Refuses a build that only this backend knows cannot be, before anything is read: missing packages, KV schemes.
    functional : bool
        Whether engines return what they write instead of writing in place.
    host_code : bool
        Whether C++ is compiled on the build box.
    fits_one_cpu : bool
        Whether engines hold code for the processor of the build box.
    named_kernels : str, optional
        What in the environment of a build gives its engines' kernels names in a profile, where they else have none.
    packages : tuple of str
        What the bill of materials lists besides torch.
    extra_files : mapping of str to str
        Entries of the manifest's ``extra``: key to the file that it names, where the artifact holds it.
    versions : callable
        Entries of ``extra`` that an opener compares its own libraries with.
    form : tuple of (str, str), optional
        Folder and suffix of what `compile_piece` writes, where that is not yet an engine.
    build_engines : callable, optional
        Turns those forms into engines: takes their folder, the engines' folder and progress; gives each one's seconds.
    finish : callable, optional
        Adds files to an artifact whose manifest is written; returns whether it added any.
    """

    name: str
    capabilities: Capabilities
    compile_piece: EngineMaker | None = None
    suffix: str = ".pt2"
    check: Callable[[BuildConfig], None] = lambda _: None
    functional: bool = False
    host_code: bool = False
    fits_one_cpu: bool = False
    named_kernels: str | None = None
    packages: tuple[str, ...] = ()
    extra_files: Mapping[str, str] = field(default_factory=dict)
    versions: Callable[[], dict[str, str]] = dict
    form: tuple[str, str] | None = None
    build_engines: Callable[[Path, Path, Progress], dict[str, float]] | None = None
    finish: Callable[[Unfinished], bool] | None = None

    def check_build(self, config: BuildConfig) -> None:
        """Refuse a build that this backend cannot make, before anything is read.

        Raises
        ------
        UsageError
            If the build asks for what engines of this backend cannot carry.
        MachineError
            If a package is missing, that which verifies included.
        """
        refuse_uncarried(self, config)
        self.check(config)


def refuse_uncarried(backend: ExportBackend, config: BuildConfig) -> None:
    """Refuse a build that asks for more than a backend's capabilities, naming the option."""
    can, stream = backend.capabilities, config.stream
    if config.device not in can.devices:
        kinds = " and ".join({"cpu": "CPUs", "cuda": "GPUs"}[device] for device in can.devices)
        raise UsageError(
            f"--backend {backend.name} builds for {kinds}, and this build is for {config.device}: give --target "
            f"{'cpu' if can.devices == ('cpu',) else 'auto'}, or take another backend"
        )
    for carried, asked, what, option in (
        (can.fused_kernels, config.fused, "fused kernels", "--kernels fused"),
        (can.offloaded_cache, stream.offload_cache, "offloaded caches", "--offload-cache"),
        (can.pools, config.pool is not None, "pools", "--sessions"),
        (can.pass_caches, stream.pass_caches, "caches of each pass", "--pass-caches"),
        (can.layer_rings, bool(stream.layer_rings), "layers of different rings", "--layer-rings"),
        (can.window_positions, stream.window_positions, "positions within the window", "--window-positions"),
        (can.reference_frames, bool(stream.reference_frames), "reference frames", "--reference-frames"),
    ):
        if asked and not carried:
            raise UsageError(
                f"--backend {backend.name} has no {what} yet: leave {option} out, or take another backend"
            )
