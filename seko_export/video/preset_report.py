"""Report of `seko-export presets` on video models: by name, with facts and open questions about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.registry import presets
from seko_export.options.checks import SAMPLE_FOLDER
from seko_export.options.declaration import SAMPLE
from seko_export.options.sample import read_sample


def preset_report() -> dict[str, dict[str, Any]]:
    """Return every preset by name, as plain data, the sample first.

    The entries of a preset are ``family``, and all fields of its ``model`` and ``stream``. ``passes`` are the timesteps
    of a chunk, or None for the four timesteps of Self-Forcing. ``first_passes`` are the timesteps of a stream's first
    chunk, or None if all chunks have the same timesteps. ``entry`` is the entry of a `.pt`, and ``files`` are the
    authors' paths. ``source``, ``needs`` and ``unverified`` are sentences. ``missing`` names the features that a build
    lacks; it is empty if the preset can be built.

    Returns
    -------
    dict
        The entries of each preset, by the preset's name.
    """
    video = {
        name: _entries(preset.model, preset.stream, preset.schedule)
        | {
            "entry": preset.entry,
            "files": list(preset.files),
            "source": preset.source,
            "needs": preset.needs,
            "unverified": preset.unverified,
            "missing": preset.missing,
        }
        for name, preset in presets().items()
    }
    return _sample() | video


def preset_lines(name: str, preset: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of text that describe an entry of `preset_report` for a person."""
    model, stream = preset["model"], preset["stream"]
    size = f"{model['layers']} layers of {model['dim']}, {stream['height']}x{stream['width']}"
    frames = f"chunk {stream['chunk_frames']}, sink {stream['sink_frames']}, ring {stream['ring_frames']}"
    yield f"{name}  ({preset['family']}: {size}, {frames})"
    for word in ("source", "needs", "unverified", "missing"):
        if preset[word]:
            yield f"    {word:11} {preset[word]}"


def _entries(model: ModelConfig, stream: StreamConfig, schedule: Schedule | None) -> dict[str, Any]:
    return {
        "family": model.family,
        "model": asdict(model),
        "stream": asdict(stream),
        "passes": None if schedule is None else list(schedule.timesteps),
        "first_passes": None if schedule is None else list(schedule.first_timesteps) or None,
    }


def _sample() -> dict[str, dict[str, Any]]:
    """Return the entries of the sample; empty in an installation without it."""
    if not SAMPLE_FOLDER.is_dir():
        return {}
    sample, words = read_sample(), dict.fromkeys(("needs", "unverified", "missing"), "")
    source = "the trained model that ships with Seko; its weights, VAE and text encoder are built without a checkpoint"
    entries = _entries(sample.model, sample.stream, sample.schedule)
    return {SAMPLE: {**entries, "entry": None, "files": [], "source": source, **words}}
