"""The interface of families of causal video transformers, and the presets that they define."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.errors import UsageError
from seko_export.families.base import Family

if TYPE_CHECKING:  # presets are read before torch is imported
    from torch import Tensor

    from seko_export.checkpoints.sources import OpenedFiles
    from seko_export.config.video import VideoBuild
    from seko_export.families.recognition import Recognised
    from seko_runtime.format.manifest import ControlSpec
    from seko_runtime.video.manifest import VideoManifest


FOR_TESTS = "for tests; it has no weights but random ones"
NUMBERS_READ = (
    "that trained weights give the video of the authors' code: "
    "the numbers are read from it, no file was opened"
)


@dataclass(frozen=True)
class Preset:
    """A preset: a model, the stream layout that the model's authors use, and the model's schedule if it differs from
    the default.

    Parameters
    ----------
    model : ModelConfig
        The model's dimensions.
    stream : StreamConfig
        The layout of the model's streams.
    schedule : Schedule or None
        Timesteps of a chunk's passes, if they differ from Self-Forcing's four.
    entry : str or None
        The entry of the authors' `.pt` file with the weights that the authors use for generation.
    files : tuple of str
        Last parts of the paths of the authors' files, for models that differ only in the names of their files.
    source : str
        Repository and licence of the weights, and the code from which the numbers were taken.
    needs : str
        Further files that the model needs, and the options that take them.
    lora : str
        Name of the authors' LoRA in the folder of the checkpoint, without which the model is not theirs.
    unverified : str
        Properties of the preset that nobody has checked.
    missing : str
        Features of the model that Seko lacks. A build of the preset is refused unless ``missing`` is empty.
    """

    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule | None = None
    entry: str | None = None
    files: tuple[str, ...] = ()
    source: str = ""
    needs: str = ""
    lora: str = ""
    unverified: str = ""
    missing: str = ""

    @property
    def workload(self) -> str:
        """Name of the model's workload."""
        return self.model.workload

    def is_named(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint has the path of one of its authors' files."""
        path = checkpoint.absolute().as_posix()
        return any(path.endswith(f"/{file}") for file in self.files)


@dataclass(frozen=True)
class CacheProbe:
    """The engine whose cache writes are observed to calibrate a quantised KV cache.

    Parameters
    ----------
    role : str
        Role of the engines that write the cache, which are called once for each layer and pass. These engines take
        ``token_index``, and the caches ``caches.k`` and ``caches.v``. If keys are stored before RoPE, they also take
        ``cos`` and ``sin``. Calibration watches the engine without bucket and variant, whose name equals the role.
    perturbed : str
        Name of the engine that begins each pass. To measure the effect of rounding alone, the last bit of this engine's
        first output is changed.
    """

    role: str
    perturbed: str


class VideoFamily(Family["VideoBuild"]):
    """A family of causal video transformers."""

    splits_over_ranks: bool = False
    """Whether several GPUs of a machine can share a chunk in the family's layers (`layers.rank_split`)."""

    takes_video: bool = False
    """Whether the family's chunks can start from an input video (`StreamConfig.strength`)."""

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return the facts that a checkpoint states about its model, or None if the checkpoint is not of this family.

        A family whose checkpoints cannot be recognised, such as a family outside this package, does not override
        `recognise`: the user then names a preset of the family.

        Shapes of tensors decide first. ``config_json``, the content of the config.json beside the weights, decides
        facts that shapes do not determine: heads, eps, window, sink, shift. If neither shapes nor config.json state a
        fact, the family may assume a value, which is marked as assumed, or leave the fact out, so that the user must
        state it. ``where`` is the checkpoint's name in messages.

        Raises
        ------
        CheckpointError
            If shapes and config.json contradict each other; the message has both values.
        NotACheckpointError
            If a field of config.json has a wrong type.
        """
        del where, opened, config_json
        return None

    def is_config(self, config_json: Mapping[str, Any]) -> bool:
        """Return whether a config.json beside weights may describe a model of this family, and not a VAE or text
        encoder."""
        del config_json
        return False

    def run_config(self, where: str, config_json: Mapping[str, Any]) -> tuple[Mapping[str, Any], Schedule]:
        """Return the fields of the stream's layout and the schedule that a run configuration states.

        A run configuration (file ``where``, content ``config_json``) belongs to the code with which the family's
        authors run their models. A family without run configurations need not define `run_config`.

        Raises
        ------
        UsageError
            If the family has no run configurations, or the run configuration asks for a feature that the exporter does
            not support.
        """
        del config_json
        raise UsageError(
            f"--run-config {where}: the family {self.name!r} has no run configurations; leave it out"
        )

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the inputs of a recorded (golden) chunk, by the names of the graph's inputs, [B, *shape] on the CPU.

        If ``chunk`` is None, the inputs per session or prompt are returned. The values of the inputs should affect the
        model as real inputs would, and be equal in every call. A family without inputs need not define `golden_inputs`.
        """
        del config, chunk
        return {}

    def controls(self, config: VideoBuild, manifest: VideoManifest) -> tuple[ControlSpec, ...]:
        """Return what a person steers a session with: kind, inputs and parameters such as bindings of each control.

        By default these are the runtime's controls for the kinds of the build's inputs. A family with keys or kinds of
        its own overrides the method; ``manifest`` is the build's, complete but for the controls.
        """
        del config
        return manifest.control_specs

    @abstractmethod
    def cache_probe(self, config: VideoBuild) -> CacheProbe:
        """Return the engine at which the calibration of a quantised cache reads keys and values."""
