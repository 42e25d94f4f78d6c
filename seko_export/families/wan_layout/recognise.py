"""Recognition of a model with Wan's layers by shapes and a config.json of Wan's code, of diffusers, or of Seko's
sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.key_table import KeyTable, Shapes
from seko_export.checkpoints.sources import OpenedFiles, shown
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.recognition import (
    STREAM_FIELDS,
    Fact,
    Facts,
    Recognised,
    Source,
    config_number,
    fill,
    learn_config,
    shape_facts,
    stream_facts,
)
from seko_export.families.video import Preset
from seko_export.families.wan_layout.picture_sizes import has_condition

# Seko's field -> names in a config.json: Wan's, diffusers', Seko's.
_MODEL_FIELDS: dict[str, tuple[str, ...]] = {
    "layers": ("num_layers", "layers"),
    "dim": ("dim",),
    "heads": ("num_heads", "num_attention_heads", "heads"),
    "ffn_dim": ("ffn_dim",),
    "in_channels": ("in_dim", "in_channels"),
    "out_channels": ("out_dim", "out_channels"),
    "text_dim": ("text_dim",),
    "text_tokens": ("text_len", "text_tokens"),
    "freq_dim": ("freq_dim",),
    "norm_eps": ("eps", "norm_eps"),
    "rope_theta": ("rope_theta",),
}
_HEAD_DIM, _WINDOW, _SINK, _CHUNK = (
    "attention_head_dim",
    "local_attn_size",
    "sink_size",
    "num_frame_per_block",
)
# Wan's field for a window of tokens; the stream's window is local_attn_size
_ATTENTION_WINDOW = "window_size"
_TIMES = "timesteps"
_SHIFTS = ("timestep_shift", "flow_shift", "shift")
_PARTS = ("model", "stream", "schedule")  # value of a field in the config.json of Seko's sample

# Channels of a head in every published Wan model: 12 heads in 1.3B, 24 in 5B, 40 in 14B. Without a config.json (a
# Self-Forcing .pt has none) the family assumes this size, the build prints it, and --heads overrides it. If the width
# is no multiple of 128, the user must give --heads.
_HEAD_CHANNELS = 128
USUAL_STREAM = StreamConfig(height=480, width=832, chunk_frames=3, sink_frames=0, ring_frames=21)
# Of models whose latents have the channels of Wan 2.2's VAE: LongLive-2's layout.
USUAL_STREAM_2_2 = StreamConfig(
    height=704, width=1280, chunk_frames=8, sink_frames=8, ring_frames=24, fps=24, spatial_stride=16
)
_CHANNELS_2_2 = 48
_USUAL = {"text_tokens": 512, "norm_eps": 1e-6}
_FIXED = {"rope_theta": 10_000.0}  # a literal in Wan's code


@dataclass(frozen=True)
class Seen:
    """What a family looks at to tell its models from others with Wan's layers.

    Parameters
    ----------
    where : str
        Name of the checkpoint in messages.
    shapes : mapping of str to tuple of int
        Shapes of the tensors whose keys the family's naming translates, by the exporter's names.
    config_json : mapping
        Content of the config.json beside the weights; empty without one.
    wan : Recognised
        What Wan's tensors and fields state.
    facts : Facts
        The facts about the model, to which the family adds its own.
    """

    where: str
    shapes: Shapes
    config_json: Mapping[str, Any]
    wan: Recognised
    facts: Facts

    @property
    def has_condition(self) -> bool:
        """Whether the model's input also has a mask and a picture's latents besides the noisy latents."""
        return has_condition(*(self.wan.model[f"{side}_channels"].value for side in ("in", "out")))

    @property
    def layout(self) -> dict[str, Fact]:
        """The fields of the stream's layout that the checkpoint states."""
        return {name: fact for name, fact in self.wan.stream.items() if fact.is_read}

    def as_in(self, name: str, preset: Preset, **known: Any) -> Recognised:
        """Return what is known of a model of the class that a preset's model has. The layout and the passes are those
        of the preset, unless the checkpoint states them; ``known`` are other fields of `Recognised`."""
        usual: dict[str, Any] = {
            "stream": stream_facts(preset.stream, Source.ASSUMED, name) | self.layout,
            "schedule": self.wan.schedule or Fact(preset.schedule, Source.ASSUMED, name),
        }
        return replace(self.wan, model=self.facts.known, kind=type(preset.model), **(usual | known))


def recognise(
    where: str,
    opened: OpenedFiles,
    config_json: Mapping[str, Any] | None,
    *,
    family: str,
    keys: KeyTable,
) -> Recognised | None:
    """Return the facts that a file and its config.json state about a model with Wan's layers; None if the file holds no
    such model.

    Each family passes its name and its key table; see `VideoFamily.recognise`.
    """
    facts = shape_facts(where, keys, opened)
    if facts is None:
        return None
    stream, schedule = Facts(where), None
    if config_json is not None:
        parts = [config_json.get(part) for part in _PARTS]
        if isinstance(parts[0], dict):  # the form of config.json in Seko's sample
            model, layout, times = (part if isinstance(part, dict) else {} for part in parts)
            config_json = {**model, **times}
            learn_config(stream, layout, {name: (name,) for name in STREAM_FIELDS})
        learn_config(facts, config_json, _MODEL_FIELDS)
        _check_attention(where, config_json)
        _learn_head_dim(facts, config_json)
        _learn_window(stream, config_json)
        schedule = _schedule(where, config_json)
    dim = facts.known["dim"].value
    heads = {} if dim % _HEAD_CHANNELS else {"heads": dim // _HEAD_CHANNELS}
    fill(facts, {**heads, **_USUAL}, Source.ASSUMED, "Wan")
    fill(facts, _FIXED, Source.FAMILY, "Wan")
    is_2_2 = facts.known["out_channels"].value == _CHANNELS_2_2
    usual = stream_facts(USUAL_STREAM_2_2 if is_2_2 else USUAL_STREAM, Source.ASSUMED, "Wan")
    return Recognised(
        family,
        keys.naming_of(opened).name,
        facts.known,
        usual | stream.known,
        schedule,
        foreign=keys.foreign_keys(opened),
    )


def unused_fields(config_json: Mapping[str, Any] | None, *, window: bool) -> tuple[str, ...]:
    """Return the fields of a config.json that are about timesteps, with their values; if ``window`` is true, also the
    fields about the window.

    A family that ignores fields about timesteps or the window reports them to the user. A window of -1 and a sink of 0
    are left out of the result, because they state nothing.
    """
    fields = config_json or {}
    parts = (fields.get("stream"), fields.get("schedule"))
    fields = {
        **fields,
        **{name: value for part in parts if isinstance(part, dict) for name, value in part.items()},
    }
    names = (*_SHIFTS, _TIMES, *((_WINDOW, _SINK, _CHUNK) if window else ()))
    nothing = {_WINDOW: -1, _SINK: 0}
    return tuple(
        shown(f"{name} {fields[name]}")
        for name in names
        if fields.get(name) is not None and fields[name] != nothing.get(name)
    )


def is_config(config_json: Mapping[str, Any]) -> bool:
    """Return whether a config.json may describe a Wan model, rather than a VAE, a scheduler or a model of
    transformers."""
    name = config_json.get("_class_name")
    if "architectures" in config_json or (
        isinstance(name, str) and "Model" not in name and "Transformer" not in name
    ):
        return False
    model = config_json.get("model")
    known = {name for names in _MODEL_FIELDS.values() for name in names}
    known |= {_HEAD_DIM, _WINDOW, _SINK, _CHUNK, *_SHIFTS}
    return bool(known & set(model if isinstance(model, dict) else config_json))


def _check_attention(where: str, config_json: Mapping[str, Any]) -> None:
    """Refuse a config.json of a model that attends to a window along each axis, which the exporter does not
    support."""
    size = config_json.get(_ATTENTION_WINDOW)
    if size is not None and size != [-1, -1]:
        raise NotACheckpointError(
            f"{_ATTENTION_WINDOW} in the config.json of {where} is {shown(repr(size))}, and only models that attend to "
            "all tokens, [-1, -1], are built"
        )


def _learn_head_dim(facts: Facts, config_json: Mapping[str, Any]) -> None:
    """Use the width of a head that diffusers' config.json states. If the number of heads is known, it determines the
    model's width; otherwise it determines the number of heads."""
    size = config_number(facts.where, config_json, _HEAD_DIM, whole=True)
    if size is None:
        return
    if "heads" in facts.known:
        facts.learn("dim", Fact(facts.known["heads"].value * size, Source.CONFIG, f"heads times {_HEAD_DIM}"))
        return
    dim = facts.known["dim"].value
    if dim % size:
        raise CheckpointError(
            f"{facts.where} contradicts itself: dim is {dim} by shapes, and no multiple of the {size} that config.json "
            f"({_HEAD_DIM}) says; correct the one that is wrong"
        )
    facts.learn("heads", Fact(dim // size, Source.CONFIG, _HEAD_DIM))


def _learn_window(stream: Facts, config_json: Mapping[str, Any]) -> None:
    """Learn the sizes of chunk, sink and ring from config.json. Wan's window includes the sink; -1 means all frames of
    a video of fixed length."""
    chunk = config_number(stream.where, config_json, _CHUNK, whole=True)
    if chunk is not None:
        stream.learn("chunk_frames", Fact(chunk, Source.CONFIG, _CHUNK))
    window = config_number(stream.where, config_json, _WINDOW, whole=True, least=-1)
    sink = config_number(stream.where, config_json, _SINK, whole=True, least=0)
    if window is not None and window > 0:
        ring = window - (sink or 0)
        if ring < 1:
            raise NotACheckpointError(
                f"the config.json of {stream.where} has {_SINK} {sink} and {_WINDOW} {window}, which includes it: "
                "expected a larger window"
            )
        stream.learn("ring_frames", Fact(ring, Source.CONFIG, f"{_WINDOW} minus {_SINK}"))
        stream.learn("sink_frames", Fact(sink or 0, Source.CONFIG, _SINK))
    elif sink:  # a sink of 0 without a window is the authors' default and states nothing
        stream.learn("sink_frames", Fact(sink, Source.CONFIG, _SINK))


def _schedule(where: str, config_json: Mapping[str, Any]) -> Fact | None:
    """Return the timesteps of the passes: those of Seko's sample, or Self-Forcing's four, warped with the stated
    shift."""
    shifts = Facts(where)
    for name in _SHIFTS:
        value = config_number(where, config_json, name, whole=False)
        if value is not None:
            shifts.learn("shift", Fact(float(value), Source.CONFIG, name))
    shift = shifts.known.get("shift")
    times = config_json.get(_TIMES)
    try:
        if isinstance(times, list):
            numbered = {str(at): time for at, time in enumerate(times)}
            steps = tuple(config_number(where, numbered, at, whole=False) for at in numbered)
            return Fact(Schedule(steps, shift=None if shift is None else shift.value), Source.CONFIG, _TIMES)
        return shift and Fact(Schedule.warped(shift=shift.value), Source.CONFIG, shift.detail)
    except (TypeError, UsageError) as fault:
        raise NotACheckpointError(f"the config.json of {where} has impossible times: {fault}") from fault
