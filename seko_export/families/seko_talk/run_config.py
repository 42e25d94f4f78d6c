"""Reader of LightX2V's run configurations of Seko-Talk AR: picture size, passes, windows and positions, in the
exporter's terms.

LightX2V's window sizes include the portrait and the sink; the reader converts them to Seko's sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from seko_export.config.schedule import Schedule
from seko_export.errors import UsageError
from seko_export.families.seko_talk.presets import evenly

REFERENCES = 1  # the portrait
# Fields of `ar_config` that only concern how LightX2V runs the model.
_ITS_OWN = frozenset({"kv_offload", "async_vae_decode", "kv_quant"})
# Fields about portrait and voice with the only supported value: a run configuration with another value is for another
# model.
_ONE_WAY: dict[str, float] = {
    "ref_state": 1,
    "use_31_block": True,
    "audio_sr": 16_000,
    "audio_feat_fps": 50,
    "audio_window": 1.0,
    "look_ahead": 0.0,
    "audio_feat_window_neighbor_frame": 0,
}
_WINDOWS = re.compile(r"W[1-9][0-9]{0,3}(-W[1-9][0-9]{0,3})*", re.ASCII)


def read_run_config(where: str, config_json: Mapping[str, Any]) -> tuple[dict[str, Any], Schedule]:
    """Return the fields of the stream's layout and the schedule that a run configuration states.

    Parameters
    ----------
    where : str
        Name of the run configuration's file, for error messages.
    config_json : mapping
        Content of the run configuration's file.

    Raises
    ------
    UsageError
        If the run configuration is for another model, or asks for something that the exporter does not support.
    """
    cache = config_json.get("ar_config")
    if not isinstance(cache, Mapping):
        raise UsageError(f"--run-config {where} has no ar_config: it is not of an autoregressive Seko-Talk")
    known = {"num_frame_per_chunk", "step_kv_cache", "sink_size", "local_attn_size", "hybrid_attn"}
    odd = {*cache} - known - {"rope_position_mode", "rope_max_frames"} - _ITS_OWN
    if odd:
        raise UsageError(f"--run-config {where}: ar_config says {', '.join(sorted(odd))}, which is not known")
    for name, needed, value in (
        ("enable_cfg", False, config_json.get("enable_cfg", False)),
        ("sample_guide_scale", 1, config_json.get("sample_guide_scale", 1)),
        ("ar_config.step_kv_cache", True, cache.get("step_kv_cache", True)),
        *((name, built, config_json.get(name, built)) for name, built in _ONE_WAY.items()),
    ):
        if value != needed:
            raise UsageError(f"--run-config {where}: {name} is {str(value)[:40]}, and only {needed} is built")
    if "speakers" in config_json:
        raise UsageError(
            f"--run-config {where}: speakers is {str(config_json['speakers'])[:40]}, which no run configuration of "
            "LightX2V says; take it out and give --speakers N"
        )
    height, width = _sides(where, config_json)
    chunk, sink = _whole(where, cache, "num_frame_per_chunk"), _whole(where, cache, "sink_size")
    rings = _rings(where, cache, chunk, sink)
    fields = {
        "height": height,
        "width": width,
        "fps": _whole(where, config_json, "fps" if "fps" in config_json else "target_fps"),
        "chunk_frames": chunk,
        "reference_frames": REFERENCES,
        "sink_frames": sink - REFERENCES,
        "ring_frames": max(rings),
        "layer_rings": rings if len(rings) > 1 else (),
        "pass_caches": True,
        **positions(f"--run-config {where}", cache),
    }
    return fields, evenly(
        _whole(where, config_json, "infer_steps"), _number(where, config_json, "sample_shift")
    )


def _rings(where: str, cache: Mapping[str, Any], chunk: int, sink: int) -> tuple[int, ...]:
    hybrid = cache.get("hybrid_attn")
    if (hybrid is None) == ("local_attn_size" not in cache):
        raise UsageError(f"--run-config {where}: ar_config has local_attn_size or hybrid_attn, one of them")
    if hybrid is None:
        return (_whole(where, cache, "local_attn_size") + REFERENCES - sink,)
    if not isinstance(hybrid, str) or not _WINDOWS.fullmatch(hybrid):
        raise UsageError(
            f"--run-config {where}: hybrid_attn is {str(hybrid)[:40]!r}, expected chunks as W2-W2-W21"
        )
    return tuple(int(part[1:]) * chunk for part in hybrid.split("-"))


def positions(where: str, cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the layout that determine the RoPE positions of frames. Without ``rope_position_mode`` in
    the run configuration, LightX2V's mode ``local`` is used.

    Raises
    ------
    UsageError
        If ``rope_position_mode`` has another value, or is ``global`` without ``rope_max_frames``.
    """
    mode = cache.get("rope_position_mode", "local")
    if mode == "local":
        return {"window_positions": True, "rope_max_frames": 0}
    if mode != "global":
        raise UsageError(f"{where}: rope_position_mode is {str(mode)[:40]!r}, expected local or global")
    return {"window_positions": True, "rope_max_frames": _whole_number(where, cache, "rope_max_frames")}


def _sides(where: str, config_json: Mapping[str, Any]) -> tuple[int, int]:
    size = config_json.get("size")
    if size is None:
        return _whole(where, config_json, "target_height"), _whole(where, config_json, "target_width")
    if not isinstance(size, list) or len(size) != 2:
        raise UsageError(f"--run-config {where}: size is {str(size)[:40]}, expected height and width")
    return _whole(where, {"size": size[0]}, "size"), _whole(where, {"size": size[1]}, "size")


def _whole(where: str, config_json: Mapping[str, Any], name: str) -> int:
    return _whole_number(f"--run-config {where}", config_json, name)


def _whole_number(where: str, config_json: Mapping[str, Any], name: str) -> int:
    value = config_json.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 16:
        raise UsageError(f"{where}: {name} is {str(value)[:40]}, expected a whole number of at least 1")
    return value


def _number(where: str, config_json: Mapping[str, Any], name: str) -> float:
    value = config_json.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1000:
        raise UsageError(f"--run-config {where}: {name} is {str(value)[:40]}, expected a number above 0")
    return float(value)
