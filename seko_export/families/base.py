"""The interface between Seko and a model family: what a family provides, and who uses it.

A family is a module with a `FAMILY`: an object of a class derived from `Family`. It knows its checkpoints, its
modules and its programs. Everything else (compiling, goldens, the artifact, replay) is the same for every family, and
uses only what is declared here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from seko_export.config.build import BuildConfig
from seko_export.errors import UsageError

if TYPE_CHECKING:  # presets are looked at before torch is loaded
    import torch
    from torch import Tensor

    from seko_export.checkpoints.key_table import KeyTable
    from seko_export.engines.piece import Piece
    from seko_export.engines.weight_source import WeightSource
    from seko_runtime.format.manifest import Buffer, Call, InputSpec


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
        Inputs that the caller supplies while a session runs. Each lies in one of the buffers; `layers.pieces` makes
        those.
    """

    pieces: Mapping[str, Piece]
    programs: Mapping[str, tuple[Call, ...]]
    buffers: tuple[Buffer, ...]
    inputs: tuple[InputSpec, ...] = ()


@dataclass(frozen=True)
class MediaTensors:
    """Weights of text encoder, VAE, audio and image encoder, each by its own names; None if the build has none."""

    text: WeightSource | None = None
    vae: WeightSource | None = None
    audio: WeightSource | None = None
    image: WeightSource | None = None


Build = TypeVar("Build", bound=BuildConfig)  # a workload's own kind of build


class Family(ABC, Generic[Build]):
    """One model family, of any workload.

    A subclass is stateless: the same object serves every build, in every process. Processes that compile engines import
    it by `name`.
    """

    name: str
    """``wan``, or for a family outside this package ``MODULE:ATTRIBUTE``, where Python finds the object."""

    @property
    @abstractmethod
    def keys(self) -> KeyTable:
        """Key names and shapes of the family's checkpoints, and the files in which they come."""

    def load(
        self,
        path: Path,
        model: Any,
        *,
        use_ema: bool = True,
        companion: Path | None = None,
    ) -> WeightSource:
        """Open a checkpoint and check all its keys, shapes and dtypes; see `checkpoints.load.load_model`."""
        from seko_export.checkpoints.load import load_model  # with torch

        return load_model(path, model, self.keys, use_ema=use_ema, companion=companion)

    def write_random(
        self, path: Path, model: Any, *, seed: int, format: str | None, dtype: torch.dtype, device: str
    ) -> None:
        """Write seeded random weights of a model, without a format in the family's first; see `write_random_model`."""
        from seko_export.checkpoints.random import write_random_model  # with torch

        forms = self.keys.random_forms
        if not forms:
            raise UsageError(f"family {self.name} writes no random weights: name a checkpoint")
        write_random_model(
            path, model, self.keys, format=format or next(iter(forms)), seed=seed, dtype=dtype, device=device
        )

    @abstractmethod
    def graph(self, config: Build) -> ModelGraph:
        """Return engines, programs and buffers of a build. Called once for each build and process; see `graph_of`."""

    @abstractmethod
    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the artifact's weights by name, contiguous on the CPU, in their order of use.

        Fusing, casting and quantising is done here. ``pieces`` determine which weights there are; ``media`` holds
        those of the models around the transformer.
        """

    def tables(self, config: Build, checkpoint: WeightSource) -> Mapping[str, Tensor]:
        """Return constants that are made of the checkpoint and the build's configuration, by name, on the CPU.

        In video they are weights ``of_times.NAME`` [passes, ...] that layers index by pass; a session whose passes
        have other times is refused. A family without such tables need not define this.
        """
        del config, checkpoint
        return {}
