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
        For each preset: ``family``, ``model`` and ``stream`` (all fields), ``passes`` (timesteps, or None for the usual
        four), ``entry`` (of a `.pt`), ``files`` (the authors' paths), ``source``, ``needs``, ``unverified``, and
        ``missing`` (features that a build lacks; empty if the preset can be built). Speech models have only ``family``
        and ``model``.
    """
    video: dict[str, dict[str, Any]] = {
        name: {
            "family": preset.model.family,
            "model": asdict(preset.model),
            "stream": asdict(preset.stream),
            "passes": None if preset.schedule is None else list(preset.schedule.timesteps),
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
