"""The interface of families of speech models, and what the table of families has of them."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from seko_export.families.base import Family
from seko_export.families.registry import families_of, family_of_kind, presets_of
from seko_export.families.speech.config import SpeechBuild, SpeechModel


class SpeechFamily(Family[SpeechBuild]):
    """A family of speech models. A model's checkpoint is a folder with config.json, weights and tokenizer."""

    @abstractmethod
    def recognise(self, folder: Path) -> SpeechModel | None:
        """Return the config of the model in a folder, or None if the folder's config.json describes no model of this
        family.

        Raises
        ------
        CheckpointError
            If the folder holds a model of this family that Seko cannot build.
        """

    @abstractmethod
    def tokenizer(self, folder: Path) -> Path:
        """Return the tokenizer's file; raises CheckpointNotFoundError if the model's folder has no tokenizer."""

    @abstractmethod
    def moving_steps(self, steps: int) -> int:
        """Return the number of solver steps that evaluate a velocity. The first steps of a flow-matching solver may
        advance the time without evaluating a velocity.
        """


def speech_families() -> dict[str, SpeechFamily]:
    """Return all speech families by name."""
    return families_of(SpeechFamily, SpeechModel.workload)  # type: ignore[type-abstract]


def speech_family_of(model: SpeechModel) -> SpeechFamily:
    """Return the family of a model."""
    return family_of_kind(model.family, SpeechFamily)  # type: ignore[type-abstract]


def speech_presets() -> dict[str, SpeechModel]:
    """Return the presets of all speech families by name."""
    return presets_of(SpeechModel.workload)
