"""Families of speech models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

from seko_export.config.speech import SpeechBuild, SpeechModel
from seko_export.families.base import Family


class SpeechFamily(Family[SpeechBuild]):
    """A family of speech models, each a folder with config.json, weights and tokenizer."""

    @property
    @abstractmethod
    def presets(self) -> Mapping[str, SpeechModel]:
        """Named models, for ``--preset``."""

    @abstractmethod
    def recognise(self, folder: Path) -> SpeechModel | None:
        """Return the model of a folder, or None if its config.json is of no model of this family.

        Raises
        ------
        CheckpointError
            If it is one, and cannot be built.
        """

    @abstractmethod
    def tokenizer(self, folder: Path) -> Path:
        """Return the tokenizer's file; CheckpointNotFoundError if there is none."""

    @abstractmethod
    def moving_steps(self, steps: int) -> int:
        """Return how many of a solver's steps have a velocity."""
