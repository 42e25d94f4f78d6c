"""Report of `seko-export presets`: models by name, with facts and open questions about each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from seko_export.families.registry import presets, speech_presets


def preset_report() -> dict[str, dict[str, Any]]:
    """Return every preset by name, as plain data.

    Returns
    -------
    dict
        Of each: ``family``, ``model`` and ``stream`` (all fields), ``passes`` (timesteps, or None for the usual four),
        ``first_passes`` (timesteps of the first chunk, or None for those of any chunk), ``entry`` (of a `.pt`),
        ``files`` (the authors' paths), ``source``, ``needs``, ``unverified``, and ``missing`` (what a build lacks;
        empty if it can be built). Speech models have ``family`` and ``model`` alone.
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
