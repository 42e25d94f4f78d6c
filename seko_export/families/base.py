"""The interface between Seko and a model family: what a family provides, and who uses it.

A family is a module with a `FAMILY`: an object of a class derived from `Family`. It knows its checkpoints, its
modules and its programs. Everything else (compiling, goldens, the artifact, replay) is the same for every family, and
uses only what is declared here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.errors import UsageError

if TYPE_CHECKING:  # presets are looked at before torch is loaded
    from torch import Tensor

    from seko_export.checkpoints.key_table import KeyTable
    from seko_export.checkpoints.sources import OpenedFiles
    from seko_export.config.video import VideoBuild
    from seko_export.engines.piece import Piece
    from seko_export.engines.weight_source import WeightSource
    from seko_export.families.recognition import Recognised
    from seko_runtime.format.manifest import Buffer, Call, InputSpec


@dataclass(frozen=True)
class Preset:
    """A named default: a model, the stream layout that its authors use, and its passes if they are its own."""

    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule | None = None


@dataclass(frozen=True)
class ModelGraph:
    """Everything that exporter and runtime must agree on for one build. The manifest carries it as data.

    Parameters
    ----------
    pieces : mapping of str to Piece
        Every engine by its key, modules on the meta device.
    programs : mapping of str to tuple of Call
        What the runtime runs, by `ProgramKey`'s name.
    buffers : tuple of Buffer
        What the runtime allocates for a session.
    inputs : tuple of InputSpec
        Inputs that the caller supplies while a stream runs. Each lies in one of the buffers; `layers.pieces` makes
        those.
    """

    pieces: Mapping[str, Piece]
    programs: Mapping[str, tuple[Call, ...]]
    buffers: tuple[Buffer, ...]
    inputs: tuple[InputSpec, ...] = ()


@dataclass(frozen=True)
class CacheProbe:
    """Where calibration can read the keys and values that are written to the cache.

    Parameters
    ----------
    role : str
        Role of the engines that write the cache, called once for each layer and pass. They take ``token_index``, the
        caches ``caches.k`` and ``caches.v`` and, if keys are stored before RoPE, ``cos`` and ``sin``. Calibration
        watches the engine without bucket and variant, whose name is this role.
    perturbed : str
        Name of the engine that begins each pass. To measure the effect of rounding alone, the last bit of its first
        output is changed.
    """

    role: str
    perturbed: str


@dataclass(frozen=True)
class MediaTensors:
    """Weights of text encoder, VAE, audio and image encoder, each by its own names; None if the build has none."""

    text: WeightSource | None = None
    vae: WeightSource | None = None
    audio: WeightSource | None = None
    image: WeightSource | None = None


class Family(ABC):
    """One model family.

    A subclass is stateless: the same object serves every build, in every process. Processes that compile engines import
    it by `name`.
    """

    name: str
    """``wan``, or for a family outside this package ``MODULE:ATTRIBUTE``, where Python finds the object."""
    splits_over_ranks: bool = False
    """Whether its layers can share a chunk over the GPUs of a box (`layers.rank_split`)."""

    @property
    @abstractmethod
    def presets(self) -> Mapping[str, Preset]:
        """Named defaults, for ``--preset``."""

    @property
    @abstractmethod
    def keys(self) -> KeyTable:
        """Key names and shapes of the family's checkpoints, and the files in which they come."""

    def recognise(self, where: str, opened: OpenedFiles, told: Mapping[str, Any] | None) -> Recognised | None:
        """Return what a checkpoint tells about its model, or None if it is not of this family.

        A family that no file tells by its content, as one outside this package, leaves it as it is: its models are
        named by the caller.

        Shapes tell first. ``told``, the content of the config.json beside the weights, decides what shapes cannot:
        heads, eps, window, sink, shift. What the family may assume where neither tells is marked so; what it may not
        is left out, and the user is asked for it. ``where`` names the checkpoint in messages.

        Raises
        ------
        CheckpointError
            If the two say different things, with both values.
        NotACheckpointError
            If config.json has a field of another type than it should.
        """
        del where, opened, told
        return None

    def is_config(self, told: Mapping[str, Any]) -> bool:
        """Return whether a config.json beside weights may be of this family, rather than of a VAE or text encoder."""
        del told
        return False

    @abstractmethod
    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return engines, programs and buffers of a build. Called once for each build and process; see `graph_of`."""

    @abstractmethod
    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the artifact's weights by name, contiguous on the CPU, in the order in which a chunk uses them.

        Fusing, casting and quantising is done here. ``pieces`` determine which weights there are; ``media`` holds
        those of the models around the transformer.
        """

    def tables(self, config: VideoBuild, checkpoint: WeightSource) -> Mapping[str, Tensor]:
        """Return weights that layers index by pass, ``of_times.NAME`` [passes, ...] on the CPU.

        They are made of the checkpoint and the times; a session whose passes have other times is refused. A family
        without such tables need not define this.
        """
        del config, checkpoint
        return {}

    def run_config(self, where: str, told: Mapping[str, Any]) -> tuple[Mapping[str, Any], Schedule]:
        """Return the fields of the stream's layout and the schedule that a run configuration asks for.

        Such a file (``where``, its content ``told``) belongs to the code that the family's models come from. A family
        without them need not define this.

        Raises
        ------
        UsageError
            If there are none, or it asks for what is not built.
        """
        del told
        raise UsageError(
            f"--run-config {where}: the family {self.name!r} has no run configurations; leave it out"
        )

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the inputs of a golden chunk for the graph's inputs, by name, [B, *shape] on the CPU.

        With None instead of a chunk: the inputs per session or prompt. They should affect the model as real ones
        would, and be the same in every call. A family without inputs need not define this.
        """
        del config, chunk
        return {}

    @abstractmethod
    def cache_probe(self, config: VideoBuild) -> CacheProbe:
        """Return where calibration reads keys and values."""
