"""Recognition of a Seko-Talk model by the shapes in its two files, and by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.key_table import Dimension, Shapes
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.recognition import (
    Fact,
    Facts,
    Question,
    Recognised,
    Source,
    config_number,
    fill,
    stream_facts,
)
from seko_export.families.seko_talk.keys import ADAPTER, DECODER, PROJECTOR, TIME
from seko_export.families.seko_talk.presets import FULL, PRESETS
from seko_export.families.seko_talk.run_config import positions
from seko_export.families.wan_layout.keys import PROJECTION
from seko_export.families.wan_layout.recognise import Seen, unused_fields

_ADAPTER = (
    Dimension("audio_dim", f"{PROJECTOR}.proj_in.weight", 1),
    Dimension("audio_width", f"{PROJECTOR}.proj_in.weight", 0),
    Dimension("audio_tokens", f"{PROJECTOR}.learnable_queries", 1),
    Dimension("audio_ffn", f"{DECODER}.0.linear1.weight", 0),
    Dimension("audio_freq_dim", f"{TIME}.linear_1.weight", 1),
)
# Fields that shapes do not determine but a config.json may. Those of the second line may be any positive number.
_WHOLE = {"ref_state": 0, "image_tokens": 1, "audio_frames": 1, "audio_heads": 1, "speakers": 1}
_NUMBERS = ("audio_eps", "image_eps")
_USE_PICTURE = "use_image_encoder"
_AUDIO_HEAD_CHANNELS = 64  # the authors' decoder has audio_width // 64 heads
_EVERY_STREAM = ("pass_caches", "reference_frames")  # values that hold for all models of the family
_CACHE, _MODE = "ar_config", "rope_position_mode"
POSITIONS = Question(
    "--window-positions",
    "give --window-positions for LightX2V's local positions, which most of its models have, beside it "
    "--rope-max-frames M for its global ones or --references-apart for its first ones, --stream-positions for frames "
    "counted from the start of the stream, or --run-config FILE.json of LightX2V, which says it",
)


def recognised(seen: Seen) -> Recognised | None:
    """Return what is known of a model with a reference picture's tensors.

    The keys of the transformer's file show whether there is a picture branch. Facts about a Seko-Talk model that
    neither shapes nor config.json state are taken from the preset and marked as assumed.

    Raises
    ------
    CheckpointNotFoundError
        If the audio adapter's file is missing.
    CheckpointError
        If config.json contradicts the keys.
    """
    where, shapes, config_json, facts = seen.where, seen.shapes, seen.config_json, seen.facts
    if f"{PROJECTOR}.proj_in.weight" not in shapes:
        raise CheckpointNotFoundError(
            f"{where} is a Seko-Talk model without its audio adapter: put {ADAPTER.names[0]} into its folder"
        )
    for name, size in _sizes(shapes).items():
        facts.learn(name, Fact(size, Source.SHAPES))
    _check_picture(facts, config_json)
    for name in (*_WHOLE, *_NUMBERS):
        whole, least = name in _WHOLE, _WHOLE.get(name, 0)
        value = config_number(where, config_json, name, whole=whole, least=least)
        if value is not None:
            facts.learn(name, Fact(value if whole else float(value), Source.CONFIG, name))
    preset = PRESETS[FULL]
    width = facts.known["audio_width"].value
    heads = {} if width % _AUDIO_HEAD_CHANNELS else {"audio_heads": width // _AUDIO_HEAD_CHANNELS}
    fill(facts, heads, Source.FAMILY, f"audio_width // {_AUDIO_HEAD_CHANNELS}")
    fill(facts, {"speakers": 1}, Source.FAMILY, "Seko-Talk")
    usual = {name: getattr(preset.model, name) for name in (*_WHOLE, *_NUMBERS) if name != "audio_heads"}
    fill(facts, usual, Source.ASSUMED, FULL)
    # The window in a Wan config.json is counted differently and ignored; `--ring-frames` and `--sink-frames` set the
    # sizes.
    stream = stream_facts(preset.stream, Source.ASSUMED, FULL)
    stream |= {name: Fact(getattr(preset.stream, name), Source.FAMILY, "Seko-Talk") for name in _EVERY_STREAM}
    stream |= _positions(where, config_json)
    return seen.as_in(
        FULL,
        preset,
        stream=stream,
        schedule=Fact(preset.schedule, Source.ASSUMED, FULL),
        questions={"window_positions": POSITIONS},
        unused=unused_fields(config_json, window=True),
    )


def _sizes(shapes: Shapes) -> dict[str, int]:
    """Return the sizes of picture branch and audio adapter that the shapes of tensors determine."""
    sizes = {
        dimension.field: shapes[dimension.key][dimension.axis]
        for dimension in _ADAPTER
        if len(shapes.get(dimension.key, ())) > dimension.axis
    }
    layers = {
        name.removeprefix(f"{DECODER}.").partition(".")[0] for name in shapes if name.startswith(DECODER)
    }
    picture = shapes.get(f"{PROJECTION}.1.weight", ())
    return sizes | {"audio_layers": len(layers), "image_dim": picture[0] if picture else 0}


def _positions(where: str, config_json: Mapping[str, Any]) -> dict[str, Fact]:
    """Return the RoPE positions that config.json states, at top level or in ``ar_config``; empty if it states
    none."""
    cache = config_json.get(_CACHE)
    merged = {**config_json, **(cache if isinstance(cache, dict) else {})}
    if _MODE not in merged:
        return {}
    try:
        fields = positions(f"the config.json of {where}", merged)
    except UsageError as fault:
        raise NotACheckpointError(str(fault)) from None
    return {name: Fact(value, Source.CONFIG, _MODE) for name, value in fields.items()}


def _check_picture(facts: Facts, config_json: Mapping[str, Any]) -> None:
    asked = config_json.get(_USE_PICTURE)
    if isinstance(asked, bool) and asked != bool(facts.known["image_dim"].value):
        raise CheckpointError(
            f"{facts.where} contradicts itself: {_USE_PICTURE} is {str(asked).lower()} by config.json, and the file "
            f"has {'no' if asked else 'a'} picture branch (img_emb); correct the one that is wrong"
        )
