"""The exporter's backends: the features that their engines support, and the functions that make engine files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.config.build import BuildConfig
from seko_export.errors import UsageError
from seko_export.host.progress import Progress
from seko_export.workloads.registry import workload_of
from seko_runtime.format.manifest import Manifest

if TYPE_CHECKING:
    from seko_export.engines.piece import Piece

# the options of a `Need` that `Capabilities.offloading` answers
OFFLOADING = ("--offload-cache", "--offload-text", "--offload-layers")

# Takes a build, one of its pieces, and the path of the file to write, in a folder of its own. It runs in a child
# process, because compilers are not thread-safe and several engines are compiled at the same time. It raises a
# LoweringError if the engine cannot be compiled.
EngineMaker = Callable[[Any, "Piece", Path], None]


@dataclass(frozen=True)
class Capabilities:
    """The features that a backend's engines support. `check_capabilities` refuses builds that need other features.

    Parameters
    ----------
    devices : tuple of str
        Kinds of device for which the backend builds: ``cpu``, ``cuda``.
    cross_targets : tuple of str
        GPUs for which the backend builds although they are not present.
    unmeasured : bool
        Whether no engine of this backend has been measured yet. Estimates then use the kernels of other backends,
        and fused layers must be requested.
    fused_kernels : bool
        Whether layers may run in Seko's own Triton kernels.
    convolutions : bool
        Whether the VAE may run in Seko's own convolutions, which are Triton kernels.
    attentions : tuple of str, optional
        Kinds of attention over the cache, by their names in ``--attention``; default: all.
    fp8_matmuls, resident_window : bool
        Whether the engines support fp8 matmuls (``--fp8``), and a resident window (``--resident-window``).
    past_share : bool
        Whether the engines' attention may be to a share of the cached keys.
    offloading : bool
        Whether the engines support a KV cache or weights on the host that are copied to the device layer by layer.
    kv_schemes : tuple of str, optional
        Cache formats that the engines support, by their names in ``--kv``; default: all.
    ranks : bool
        Whether the engines support collectives (communication between GPUs), for several ranks.
    pools : bool
        Whether the engines support pools: sessions that share calls of several sizes.
    lacks : tuple of str
        Command-line options whose features the backend's engines do not support; see `workloads.base.Need`.
    workloads : tuple of str, optional
        The workloads whose engines the backend makes; default: all.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    cross_targets: tuple[str, ...] = ()
    unmeasured: bool = False
    fused_kernels: bool = False
    convolutions: bool = False
    attentions: tuple[str, ...] | None = None
    fp8_matmuls: bool = True
    resident_window: bool = True
    past_share: bool = True
    offloading: bool = False
    kv_schemes: tuple[str, ...] | None = None
    ranks: bool = False
    pools: bool = True
    lacks: tuple[str, ...] = ()
    workloads: tuple[str, ...] | None = None


@dataclass(frozen=True)
class BuildContext:
    """An artifact that already has engines, weights and manifest, to which `ExportBackend.finish` may add files.

    Parameters
    ----------
    folder : Path
        Folder of the artifact.
    config : BuildConfig
        The configuration of the build.
    manifest : Manifest
        The manifest as it has been written so far.
    progress : callable
        Function that is called at every step, to show progress.
    compiler_cache : bool
        Whether the artifact is to include the compiler's cache.
    """

    folder: Path
    config: BuildConfig
    manifest: Manifest
    progress: Progress
    compiler_cache: bool


@dataclass(frozen=True)
class ExportBackend:
    """A kind of engine files, with the functions that make the files.

    Parameters
    ----------
    name : str
        Name of the backend in ``--backend`` and in the manifest.
    capabilities : Capabilities
        The features that the backend's engines support.
    compile_piece : callable or None
        Function that makes the file of one engine. The function must be at module level, since worker processes
        import it. None for the eager backend, which writes no files.
    suffix : str
        Suffix of engine files.
    check : callable
        Function that refuses a build if a package is missing, before any file is read.
    functional : bool
        Whether engines return the tensors that they would otherwise write in place.
    host_code : bool
        Whether the build compiles C++.
    fits_one_cpu : bool
        Whether engines contain code for the build machine's processor alone, so that they run on no other kind of
        processor.
    named_kernels : str, optional
        Name of an environment variable. If the variable is set during a build, the engines' kernels have readable names
        in profiles.
    packages : tuple of str
        Packages to list in the bill of materials, besides torch.
    extra_files : mapping of str to str
        Entries of the manifest's ``extra`` that name a file of the artifact, with the file for each entry. An entry is
        written if the artifact has the file.
    program_file : str, optional
        Pattern for the name of a file that contains a whole program; ``{}`` stands for the program's name. The workload
        chooses the programs that get files.
    versions : callable
        Function that takes the build's configuration and returns entries of the manifest's ``extra``: library versions,
        and facts about how the build was made. When the runtime opens the artifact, it compares these versions with
        those of the installed libraries.
    form : tuple of (str, str), optional
        Folder and suffix of the files that `compile_piece` writes, if these files are not yet engines.
    build_engines : callable, optional
        Function that makes engines from the files of ``form``. Its arguments are the build, the folder of the files of
        ``form``, the engines' folder, and the progress callback. It returns the seconds that each engine took.
    finish : callable, optional
        Function that adds files to an artifact whose manifest is written, and returns whether it added a file.
    compiler : str, optional
        Module that `compile_piece` imports, and with it the compiler. The server that worker processes are forked from
        imports it once, so the import must not use the GPU.
    """

    name: str
    capabilities: Capabilities
    compile_piece: EngineMaker | None = None
    suffix: str = ".pt2"
    check: Callable[[], None] = lambda: None
    functional: bool = False
    host_code: bool = False
    fits_one_cpu: bool = False
    named_kernels: str | None = None
    packages: tuple[str, ...] = ()
    extra_files: Mapping[str, str] = field(default_factory=dict)
    program_file: str | None = None
    versions: Callable[[Any], dict[str, str]] = lambda _: {}
    form: tuple[str, str] | None = None
    build_engines: Callable[[BuildConfig, Path, Path, Progress], dict[str, float]] | None = None
    finish: Callable[[BuildContext], bool] | None = None
    compiler: str | None = None

    def check_build(self, config: BuildConfig) -> None:
        """Refuse a build that this backend cannot make, before any file is read.

        Raises
        ------
        UsageError
            If the build needs a feature that engines of this backend do not support.
        MachineError
            If a package is missing, including packages that only the verification needs.
        """
        check_capabilities(self, config)
        self.check()


def check_capabilities(backend: ExportBackend, config: BuildConfig) -> None:
    """Raise a UsageError if a build needs a feature that a backend's engines do not support; the message names the
    option that needs the feature."""
    can, target, workload = backend.capabilities, config.target, workload_of(config)
    if can.workloads is not None and workload.name not in can.workloads:
        raise UsageError(
            f"--backend {backend.name} makes engines for the workload {' or '.join(can.workloads)}, and this build is "
            f"of {workload.name}: take another backend"
        )
    if target.device not in can.devices:
        kinds = " and ".join({"cpu": "CPUs", "cuda": "GPUs"}[device] for device in can.devices)
        named = "cpu" if can.devices == ("cpu",) else "auto on a machine with a GPU"
        if can.cross_targets:
            named = f"one of {', '.join(can.cross_targets)}, which need not be here"
        raise UsageError(
            f"--backend {backend.name} builds for {kinds}, and this build is for {target.device}: give --target "
            f"{named}, or take another backend"
        )
    scheme = workload.cache_format(config)
    if can.kv_schemes is not None and scheme is not None and scheme not in can.kv_schemes:
        raise UsageError(
            f"--backend {backend.name} has no functions for a cache of --kv {scheme}: give --kv "
            f"{' or --kv '.join(can.kv_schemes)}, or take another backend"
        )
    if can.attentions is not None and target.attention not in can.attentions:
        raise UsageError(
            f"--backend {backend.name} has no attention {target.attention}: give --attention "
            f"{' or --attention '.join(can.attentions)}, or take another backend"
        )
    lacks = can.lacks if can.offloading else (*can.lacks, *OFFLOADING)
    needs = {need.option: need.what for need in workload.needs(config)}
    for carried, asked, what, option in (
        (can.fused_kernels, target.fused, "fused kernels", "--kernels fused"),
        (can.fp8_matmuls, target.fp8, "fp8 matmuls", "--fp8"),
        (can.resident_window, target.resident_window, "resident windows", "--resident-window"),
        (can.past_share, target.past_share < 1, "attention to a share of the cached keys", "--past-share"),
        (can.ranks, target.ranks > 1, "engines for several ranks", "--ranks"),
        (can.pools, config.workload.buckets is not None, "pools", "--sessions"),
        *((option not in lacks, True, what, option) for option, what in needs.items()),
    ):
        if asked and not carried:
            raise UsageError(
                f"--backend {backend.name} has no {what} yet: leave {option} out, or take another backend"
            )
