"""The families of speech models and their presets, from the table of families."""

from __future__ import annotations

from seko_export.families.registry import families_of, family_of_kind, presets_of
from seko_export.families.speech.config import SpeechModel
from seko_export.families.speech.family import SpeechFamily


def speech_families() -> dict[str, SpeechFamily]:
    """Return all speech families by name."""
    return families_of(SpeechFamily, SpeechModel.workload)  # type: ignore[type-abstract]


def speech_family_of(model: SpeechModel) -> SpeechFamily:
    """Return the family of a model."""
    return family_of_kind(model.family, SpeechFamily)  # type: ignore[type-abstract]


def speech_presets() -> dict[str, SpeechModel]:
    """Return the presets of all speech families by name."""
    return presets_of(SpeechModel.workload)
