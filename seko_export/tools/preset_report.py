"""Report of `seko-export presets`: models by name, with facts and open questions about each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from seko_export.families.registry import presets, speech_presets


def preset_report() -> dict[str, dict[str, Any]]:
    """Return every preset by name, as plain data.

    The entries of a preset are ``family``, and all fields of its ``model`` and ``stream``. ``passes`` are the timesteps
    of a chunk, or None for the four timesteps of Self-Forcing. ``first_passes`` are the timesteps of a stream's first
    chunk, or None if all chunks have the same timesteps. ``entry`` is the entry of a `.pt`, and ``files`` are the
    authors' paths. ``source``, ``needs`` and ``unverified`` are sentences. ``missing`` names the features that a build
    lacks; it is empty if the preset can be built. Speech models have only ``family`` and ``model``.

    Returns
    -------
    dict
        The entries of each preset, by the preset's name.
    """
    video: dict[str, dict[str, Any]] = {
        name: {
            "family": preset.model.family,
            "model": asdict(preset.model),
            "stream": asdict(preset.stream),
            "passes": None if preset.schedule is None else list(preset.schedule.timesteps),
            "first_passes": None
            if preset.schedule is None
            else list(preset.schedule.first_timesteps) or None,
            "entry": preset.entry,
            "files": list(preset.files),
            "source": preset.source,
            "needs": preset.needs,
            "unverified": preset.unverified,
            "missing": preset.missing,
        }
        for name, preset in presets().items()
    }
    speech = {
        name: {"family": model.family, "model": asdict(model)} for name, model in speech_presets().items()
    }
    return video | speech
