"""The interface between the exporter and a workload, that is, one kind of model such as video. The interface has
everything that a workload adds to a build.

A workload is a module with a `WORKLOAD`, which is an object of a class derived from `ExportWorkload`. Most code of a
build is the same for every workload: the code that compiles the engines, writes the weights and the core of the
manifest, and makes the artifact's folder. The class variable `workload` of a build's `WorkloadConfig` names the
workload of the build.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from seko_export.config.build import BuildConfig
from seko_export.errors import UsageError
from seko_export.families.base import MediaTensors
from seko_export.families.registry import presets_of
from seko_export.host.progress import Progress
from seko_export.media.sources import MediaSources
from seko_runtime.format.manifest import ControlSpec, Manifest, Workload

if TYPE_CHECKING:  # backends refer to workloads and are read before torch is imported
    from torch import Tensor

    from seko_export.engines.weight_source import WeightSource
    from seko_export.host.environment import Target
    from seko_export.options.declaration import BuildOptions
    from seko_export.options.resolved import ResolvedBuild
    from seko_runtime.executor.resolved import Programs

Build = TypeVar("Build", bound=BuildConfig)  # the build configuration of a workload
UNVERIFIED = (
    "verified  no: its engines are for GPUs that are not here; with goldens, run seko-run verify there"
)


@dataclass(frozen=True)
class BuildResult:
    """The result of a build, whose fields are the keys of the JSON line that the command prints. A workload may derive
    a class with further fields.

    Parameters
    ----------
    artifact : Path
        Folder of the new artifact.
    digest : str
        SHA-256 of the artifact's manifest.
    build_s : float
        Duration of the build in seconds.
    engine_bytes, weight_bytes : int
        Sizes of the engines and of the weights on disk, in bytes.
    engine_s : dict
        Seconds that each engine took to compile.
    device : str
        Kind of device for which the engines were built: ``cpu`` or ``cuda``.
    kernels : str
        Kernels of the transformer layers: ``fused`` (Seko's own) or ``plain`` (torch's).
    attention : str
        Attention over the KV cache: ``torch``, ``bf16`` or ``fp8``.
    """

    artifact: Path
    digest: str
    build_s: float
    engine_bytes: int
    weight_bytes: int
    engine_s: dict[str, float]
    device: str
    kernels: str
    attention: str

    def report(self) -> dict[str, object]:
        """Return the build's result as a JSON line."""
        return asdict(self) | {"artifact": str(self.artifact)}

    def lines(self) -> Iterator[str]:
        """Yield lines of text that describe the result of the build for a person."""
        yield f"artifact  {self.artifact}  ({self.digest[:16]}, built in {self.build_s:.1f} s)"
        yield f"engines   {self.engine_bytes / 1e6:.2f} MB, weights {self.weight_bytes / 1e6:.1f} MB"


@dataclass(frozen=True)
class Need:
    """A feature that a build needs from its engines and that a backend may lack.

    Parameters
    ----------
    option : str
        The command-line option that needs the feature; `Capabilities.lacks` lists such options.
    what : str
        Name of the feature for error messages, in the plural.
    """

    option: str
    what: str


class Recording(Protocol):
    """The goldens of a build: recorded results of the eager model, with which `verify` compares the engines."""

    @property
    def scales(self) -> Mapping[str, Tensor]:
        """Weights that were calibrated during the recording, by the artifact's names."""

    @property
    def table(self) -> Any:
        """The manifest's description of the recorded results, as `ExportWorkload.describe` returns it."""

    def write(self, folder: Path) -> None:
        """Write the recorded tensors into the artifact's folder."""


class ExportWorkload(ABC, Generic[Build]):
    """One kind of model, on the build machine. A workload has no state: the same object serves every build, in every
    process."""

    name: str
    """Name of the workload, such as ``video``. A workload outside this package is named ``MODULE:ATTRIBUTE``, the place
    of its object in Python."""
    manifest: type[Manifest]
    """The class of the workload's manifests."""
    whole_programs: tuple[str, ...] = ()
    """Programs that a backend may also write as one file each."""
    options: type[BuildOptions] | None = None
    """The class of the options of a build; None: `build_steps.build_artifact` alone builds it. A command reads options
    before torch is imported, so the module of a workload imports torch only in methods that build."""

    def presets(self) -> dict[str, dict[str, Any]]:
        """Return the models of `seko-export presets` by name, as plain data."""
        return {
            name: {"family": model.family, "model": asdict(model)}
            for name, model in presets_of(self.name).items()
        }

    def preset_lines(self, name: str, preset: Mapping[str, Any]) -> Iterator[str]:
        """Yield lines of text that describe one of `presets` for a person."""
        yield f"{name}  ({preset['family']}: {self.name})"

    def recognises(self, config_json: Mapping[str, Any]) -> bool:
        """Return whether the config.json of a folder describes a model of this workload."""
        del config_json
        return False

    def check_options(self, options: BuildOptions) -> None:
        """Refuse invalid options of a build, as far as they can be found without a checkpoint.

        Raises
        ------
        UsageError
            If an option is invalid.
        """
        del options

    def resolve_options(
        self, options: BuildOptions, *, machine: Target | None = None
    ) -> ResolvedBuild[Build]:
        """Return the configuration and input files that the options of a build determine. ``machine`` takes the place
        of ``--target``, to estimate a build for another machine.

        Raises
        ------
        UsageError
            If a name is unknown or options contradict each other.
        CheckpointError
            If a file that was named cannot be read, or contradicts itself or the preset.
        MachineError
            If this machine cannot build for the target.
        """
        del options, machine
        raise self._lacks("options of a build")

    def inspect(self, path: Path, gpu: str | None) -> dict[str, Any]:
        """Return the report of `seko-export inspect` on a checkpoint. With the name of a GPU the report may have the
        bytes of a build on this GPU."""
        del path, gpu
        raise self._lacks("report on a checkpoint")

    def plan(self, options: BuildOptions, gpu: str, *, steps: int | None, fps: int | None) -> dict[str, Any]:
        """Estimate memory and time of a build on a GPU of `roofline.gpus.GPUS` that need not be present."""
        del options, gpu, steps, fps
        raise self._lacks("estimate of memory and time")

    def plan_lines(self, report: Mapping[str, Any]) -> Iterable[str]:
        """Return the report of `plan` as lines of text; none: the entries of the report are listed."""
        del report
        return ()

    def _lacks(self, what: str) -> UsageError:
        return UsageError(f"the workload {self.name!r} has no {what}")

    @abstractmethod
    def describe(self, config: Build, golden: Any) -> Workload:
        """Return the object ``workload`` of the manifest; ``golden`` is a `Recording.table`, or None."""

    def describe_model(self, config: Build) -> Mapping[str, object]:
        """Return the object ``model`` of the manifest, which describes the model for people and tools."""
        return asdict(config.model)

    def controls(self, config: Build, manifest: Manifest) -> tuple[ControlSpec, ...]:
        """Return what a person steers a session with, for the manifest, which is complete but for this."""
        del config
        return manifest.control_specs

    def least_bytes(self, config: Build) -> int | None:
        """Return the bytes of GPU memory without which an artifact cannot run, with one session or with its pool; None:
        not counted."""
        del config
        return None

    def artifact_name(self, config: Build, arch: str) -> str:
        """Return the ``name`` of the manifest; ``arch`` is the kind of machine for which the build is made."""
        return f"{config.model.name}-{arch}"

    @abstractmethod
    def resolve(self, manifest: Manifest) -> Programs:
        """Return the programs of a manifest of this workload, checked against the workload's contract."""

    def needs(self, config: Build) -> Iterable[Need]:
        """Return the features that a build needs from its backend, in addition to the features that the build's target
        needs."""
        del config
        return ()

    def cache_format(self, config: Build) -> str | None:
        """Return the name of a build's KV cache format, as in ``--kv``. By default the result is None, for a workload
        whose caches have none of these formats."""
        del config
        return None

    def notes(self, config: Build) -> Iterable[str]:
        """Return sentences that the command shows before a build begins."""
        del config
        return ()

    def open_media(self, config: Build, media: MediaSources) -> MediaTensors:
        """Return the weights of the models around the main model, such as text encoder and VAE."""
        del config, media
        return MediaTensors()

    def tables(self, config: Build) -> Mapping[str, Tensor]:
        """Return constants that programs take as weights and that no checkpoint contains, by name, on the CPU."""
        del config
        return {}

    @abstractmethod
    def record(
        self,
        config: Build,
        weights: Mapping[str, Tensor],
        checkpoint: WeightSource,
        media: MediaSources,
        progress: Progress,
        wait_for_kernels: Callable[[], None],
    ) -> Recording:
        """Run the eager model, calibrate weights such as cache scales, and return the recorded results (goldens).

        Parameters
        ----------
        config : BuildConfig
            The configuration of the build.
        weights : mapping of str to Tensor
            The artifact's weights and tables, on the CPU.
        checkpoint : WeightSource
            The weights of the checkpoint, by name.
        media : MediaSources
            Files of the models around the main model, such as text encoder and VAE.
        progress : callable
            Function that is called at every step of the recording, to show progress.
        wait_for_kernels : callable
            Function that waits until what `kernel_compiler` returned has compiled its kernels.
        """

    def kernel_compiler(self, config: Build) -> Callable[[], None] | None:
        """Return a function that can be pickled and compiles the kernels that `record` calls only after the exact
        model, so that a process of its own compiles them meanwhile; None: there are none."""
        del config
        return None

    def uncalibrated(self, config: Build) -> Mapping[str, Tensor]:
        """Return stand-ins for the weights that `record` calibrates, for a build with random weights and without
        goldens."""
        del config
        return {}

    def recording_bytes(self, config: Build) -> int:
        """Return the bytes of host memory that `record` needs in addition to the artifact's weights."""
        del config
        return 0

    def write_files(self, folder: Path, config: Build, media: MediaSources, *, measured: bool) -> None:
        """Write the workload's further files into an artifact's folder. ``measured`` is false for a backend with no
        measured engine (`Capabilities.unmeasured`)."""
        del folder, config, media, measured

    def warm_up(self, folder: Path) -> None:
        """Open an artifact and run each of its programs once, so that a compiler compiles all programs."""
        raise NotImplementedError(f"the workload {self.name!r} has no run of every program")

    def result(
        self,
        result: BuildResult,
        config: Build,
        manifest: Manifest,
        recording: Recording | None,
        report: Mapping[str, Any] | None,
    ) -> BuildResult:
        """Return the result of a build, including the fields that the workload adds to `BuildResult`. ``report`` is the
        JSON line of `verify`, or None."""
        del config, manifest, recording, report
        return result

    def verify(self, folder: Path) -> tuple[str, ...]:
        """Return the command that replays the recorded results of an artifact in a process of its own: a Python module
        and its arguments. The returned command prints the JSON line of ``seko-run verify``.
        """
        return "seko_runtime", "verify", str(folder), "--json"
