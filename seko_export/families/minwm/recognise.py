"""Recognition of a minWM model by its second projection behind self-attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.families.minwm.keys import KEYS, PROJECTION
from seko_export.families.minwm.model import PER_CHUNK, MinwmModel
from seko_export.families.minwm.presets import MINWM, PRESETS
from seko_export.families.recognition import Fact, Facts, Recognised, Source, stream_facts
from seko_export.families.wan_layout.recognise import recognise as recognise_wan


def recognise(where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None) -> Recognised | None:
    """Return the facts that a file and its config.json state about a minWM model; None if the file holds no such
    model.

    The layout of streams and the passes are its authors', unless a config.json states them.
    """
    wan_model = recognise_wan(where, opened, config_json, family="minwm", keys=KEYS)
    if wan_model is None:
        return None
    if f"blocks.0.{PROJECTION}.weight" not in KEYS.naming_of(opened).shapes_in(opened):
        return None
    facts, preset = Facts(where, dict(wan_model.model)), PRESETS[MINWM]
    facts.learn("camera", Fact(PER_CHUNK, Source.FAMILY))
    stated = {name: fact for name, fact in wan_model.stream.items() if fact.is_read}
    return replace(
        wan_model,
        model=facts.known,
        stream=stream_facts(preset.stream, Source.ASSUMED, MINWM) | stated,
        schedule=wan_model.schedule or Fact(preset.schedule, Source.ASSUMED, MINWM),
        kind=MinwmModel,
    )
