"""Families of causal video transformers and their presets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.errors import UsageError
from seko_export.families.base import Family

if TYPE_CHECKING:  # presets are looked at before torch is loaded
    from torch import Tensor

    from seko_export.checkpoints.sources import OpenedFiles
    from seko_export.config.video import VideoBuild
    from seko_export.families.recognition import Recognised


@dataclass(frozen=True)
class Preset:
    """A named default: a model, the stream layout that its authors use, and its passes if they are its own.

    Parameters
    ----------
    model : ModelConfig
        Its dimensions.
    stream : StreamConfig
        The layout of its streams.
    schedule : Schedule or None
        Its passes, if they are not the usual ones.
    entry : str or None
        The entry of its authors' `.pt` that they run.
    """

    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule | None = None
    entry: str | None = None


@dataclass(frozen=True)
class CacheProbe:
    """The place in a layer where calibration reads the keys and values that are written to the cache.

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


class VideoFamily(Family["VideoBuild"]):
    """A family of causal video transformers."""

    splits_over_ranks: bool = False
    """Whether its layers can share a chunk over the GPUs of a box (`layers.rank_split`)."""

    @property
    @abstractmethod
    def presets(self) -> Mapping[str, Preset]:
        """Named defaults, for ``--preset``."""

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
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
        del where, opened, config_json
        return None

    def is_config(self, config_json: Mapping[str, Any]) -> bool:
        """Return whether a config.json beside weights may be of this family, rather than of a VAE or text encoder."""
        del config_json
        return False

    def run_config(self, where: str, config_json: Mapping[str, Any]) -> tuple[Mapping[str, Any], Schedule]:
        """Return the fields of the stream's layout and the schedule that a run configuration asks for.

        Such a file (``where``, its content ``told``) belongs to the code that the family's models come from. A family
        without them need not define this.

        Raises
        ------
        UsageError
            If there are none, or it asks for what is not built.
        """
        del config_json
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
