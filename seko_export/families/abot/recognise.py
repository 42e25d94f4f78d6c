"""Recognition of an ABot-World model by its adapter of keys and by the latents of Wan 2.2's VAE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.families.abot.keys import KEYS
from seko_export.families.abot.model import AbotModel
from seko_export.families.abot.presets import ABOT, PRESETS
from seko_export.families.recognition import Fact, Facts, Recognised, Source, fill, learn_config, stream_facts
from seko_export.families.wan_layout.recognise import recognise as recognise_wan
from seko_export.families.wan_layout.recognise import unused_fields

_CHANNELS = 48  # of the latents of Wan 2.2's VAE
_REFERENCES = ("references", "reference_side")


def recognise(where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None) -> Recognised | None:
    """Return the facts that a file and its config.json state about an ABot-World model; None if the file holds no such
    model.

    The file does not show how many reference pictures the model takes, nor its passes: they are its authors', unless a
    config.json states them.
    """
    wan_model = recognise_wan(where, opened, config_json, family="abot", keys=KEYS)
    if wan_model is None or wan_model.model["in_channels"].value != _CHANNELS:
        return None
    facts, preset = Facts(where, dict(wan_model.model)), PRESETS[ABOT]
    learn_config(facts, config_json or {}, {name: (name,) for name in _REFERENCES})
    fill(facts, {name: getattr(preset.model, name) for name in _REFERENCES}, Source.ASSUMED, ABOT)
    usual = stream_facts(preset.stream, Source.ASSUMED, ABOT)
    usual["window_positions"] = Fact(preset.stream.window_positions, Source.FAMILY, ABOT)
    stated = {name: fact for name, fact in wan_model.stream.items() if fact.is_read}
    return replace(
        wan_model,
        model=facts.known,
        stream=usual | stated,
        schedule=Fact(preset.schedule, Source.FAMILY, ABOT),
        kind=AbotModel,
        unused=unused_fields(config_json, window=False),
    )
