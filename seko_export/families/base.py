"""The interface between Seko and a model family, such as Wan: checkpoints, modules and programs.

A family is a module with a `FAMILY`: an object of a class derived from `Family`. A model family defines its
checkpoints, modules and programs. The code that compiles, records, writes and replays is the same for all families. The
shared code of a build uses only the methods that `Family` declares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from seko_export.checkpoints.sources import AS_STORED, LoadOptions
from seko_export.config.build import BuildConfig

if TYPE_CHECKING:  # presets are read before torch is imported
    from torch import Tensor

    from seko_export.checkpoints.key_table import KeyTable
    from seko_export.checkpoints.load import Checkpoint
    from seko_export.engines.piece import Piece
    from seko_export.engines.weight_source import WeightSource
    from seko_runtime.format.manifest import Buffer, Call, InputSpec


@dataclass(frozen=True)
class ModelGraph:
    """The engines, programs and buffers of a build: everything on which exporter and runtime must agree. The manifest
    contains the parts of a `ModelGraph` as data.

    Parameters
    ----------
    pieces : mapping of str to Piece
        Every engine of the build by its key, with modules on the meta device.
    programs : mapping of str to tuple of Call
        Sequences of engine calls that the runtime runs, by the name of their `ProgramKey`.
    buffers : tuple of Buffer
        The buffers that the runtime allocates for a session.
    inputs : tuple of InputSpec
        Inputs that the caller supplies while a session runs, such as a camera. Each input has a buffer among
        ``buffers``.
    """

    pieces: Mapping[str, Piece]
    programs: Mapping[str, tuple[Call, ...]]
    buffers: tuple[Buffer, ...]
    inputs: tuple[InputSpec, ...] = ()


@dataclass(frozen=True)
class MediaTensors:
    """Weights of the models around the transformer: text encoder, VAE, audio encoder, image encoder, and a second VAE
    that only encodes. The weights have the key names of their model. A field is None if the build does not include its
    model.
    """

    text: WeightSource | None = None
    vae: WeightSource | None = None
    audio: WeightSource | None = None
    image: WeightSource | None = None
    vae_encoder: WeightSource | None = None


Build = TypeVar("Build", bound=BuildConfig)  # the build configuration of a workload


class Family(ABC, Generic[Build]):
    """A model family: the code for one kind of checkpoint and for the modules of its models.

    A subclass of `Family` is stateless: the same object serves all builds in all processes. Processes that compile
    engines import the family by its `name`.
    """

    name: str
    """Name of the family, such as ``wan``. A family outside this package is named ``MODULE:ATTRIBUTE``, the place of
    its object in Python."""

    @property
    def presets(self) -> Mapping[str, Any]:
        """Models with known dimensions, by the name for ``--preset``. What a preset is depends on the workload that it
        states: of video a `Preset`, otherwise the model's dimensions."""
        return {}

    @property
    @abstractmethod
    def keys(self) -> KeyTable:
        """Key names, shapes and file layouts of the family's checkpoints."""

    def load(self, path: Path, model: Any, options: LoadOptions = AS_STORED) -> Checkpoint:
        """Open a checkpoint and check all its keys, shapes and dtypes; see `checkpoints.load.load_model`."""
        from seko_export.checkpoints.load import load_model  # with torch

        return load_model(path, model, self.keys, options)

    def random(self, model: Any, seed: int) -> Checkpoint:
        """Return random weights of a model, which are drawn when they are read; see `random_checkpoint`."""
        from seko_export.checkpoints.random import random_checkpoint  # with torch

        return random_checkpoint(model, self.keys.shapes(model), seed=seed, spread=self.keys.spread)

    @abstractmethod
    def graph(self, config: Build) -> ModelGraph:
        """Return the engines, programs and buffers of a build. `graph_of` calls this method once for each build and
        process."""

    @abstractmethod
    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the artifact's weights by name, contiguous on the CPU, in their order of use.

        `weights` also fuses, casts and quantises the weights. ``pieces`` are the build's engines, whose signatures
        determine the weights; ``media`` has the weights of the models around the transformer.
        """

    def tables(self, config: Build, checkpoint: WeightSource) -> Mapping[str, Tensor]:
        """Return constants that are computed from the checkpoint and the build's configuration, by name, on the CPU.

        For video the constants are weights ``of_times.NAME`` [passes, ...], which layers index by pass. If a build has
        these constants, a session with other timesteps is refused. A family without constants of its own need not
        define `tables`.
        """
        del config, checkpoint
        return {}
