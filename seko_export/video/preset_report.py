"""Report of `seko-export presets` on video models: by name, with facts and open questions about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from seko_export.families.registry import presets
from seko_export.families.video import Preset
from seko_export.options.checks import SAMPLE_FOLDER
from seko_export.options.declaration import SAMPLE
from seko_export.options.sample import sample_preset

_SENTENCES = ("source", "needs", "unverified", "missing")


def preset_report() -> dict[str, dict[str, Any]]:
    """Return every preset by name, as plain data, the sample first.

    The entries of a preset are ``family``, and all fields of its ``model`` and ``stream``. ``passes`` are the timesteps
    of a chunk, or None for the four timesteps of Self-Forcing. ``first_passes`` are the timesteps of a stream's first
    chunk, or None if all chunks have the same timesteps. ``entry`` is the entry of a `.pt`, and ``files`` are the
    authors' paths. ``source``, ``needs`` and ``unverified`` are sentences. ``missing`` names the features that a build
    lacks; it is empty if the preset can be built.
    """
    return {name: _entries(preset) for name, preset in (_sample() | presets()).items()}


def preset_lines(name: str, preset: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of text that describe an entry of `preset_report` for a person."""
    model, stream = preset["model"], preset["stream"]
    size = f"{model['layers']} layers of {model['dim']}, {stream['height']}x{stream['width']}"
    frames = f"chunk {stream['chunk_frames']}, sink {stream['sink_frames']}, ring {stream['ring_frames']}"
    yield f"{name}  ({preset['family']}: {size}, {frames})"
    for word in _SENTENCES:
        if preset[word]:
            yield f"    {word:11} {preset[word]}"


def _entries(preset: Preset) -> dict[str, Any]:
    schedule = preset.schedule
    return {
        "family": preset.model.family,
        "model": asdict(preset.model),
        "stream": asdict(preset.stream),
        "passes": None if schedule is None else list(schedule.timesteps),
        "first_passes": None if schedule is None else list(schedule.first_timesteps) or None,
        "entry": preset.entry,
        "files": list(preset.files),
        **{word: getattr(preset, word) for word in _SENTENCES},
    }


def _sample() -> dict[str, Preset]:
    """Return the sample as a preset; empty in an installation without it."""
    source = "the trained model that ships with Seko; its weights, VAE and text encoder are built without a checkpoint"
    return {SAMPLE: replace(sample_preset(), source=source)} if SAMPLE_FOLDER.is_dir() else {}
