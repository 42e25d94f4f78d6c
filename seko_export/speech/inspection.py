"""Report of `seko-export inspect` on the folder of a speech model."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.families.speech.family import speech_family_of, speech_presets
from seko_export.options.model_folder import WEIGHT_SUFFIXES
from seko_export.speech.resolve import recognised_speech


def inspect_speech(folder: Path) -> dict[str, Any]:
    """Return the report on the folder of a speech model, from its config.json alone."""
    model = recognised_speech(folder, None)
    weights = speech_family_of(model).load(folder, model)
    sources = weights.sources.values()
    return {
        "checkpoint": folder.name or folder.resolve().name,
        "family": model.family,
        "format": weights.format,
        "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES),
        "parameters": sum(math.prod(source.shape) for source in sources),
        "dtypes": dict(Counter(source.dtype_name for source in sources)),
        "model": {name: {"value": value, "from": CONFIG_FILE} for name, value in asdict(model).items()},
        "preset": model.name if speech_presets().get(model.name) == model else None,
        "notes": list(weights.notes),
        "command": shlex.join(["seko-export", "build", str(folder), "-o", f"artifacts/{model.name}"]),
    }
