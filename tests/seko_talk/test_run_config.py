"""LightX2V's run configurations: sizes that count the portrait and the sink in become those of a build, once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_export.errors import UsageError
from seko_export.families.seko_talk.presets import FULL, HYBRID, PRESETS
from seko_export.families.seko_talk.run_config import read_run_config
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build

LOCAL: dict[str, Any] = {
    "infer_steps": 4,
    "target_fps": 16,
    "target_height": 832,
    "target_width": 480,
    "sample_guide_scale": 1.0,
    "sample_shift": 5.0,
    "enable_cfg": False,
    "adapter_model_path": "/path/to/adapter",
    "ar_config": {
        "num_frame_per_chunk": 1,
        "step_kv_cache": True,
        "sink_size": 2,
        "local_attn_size": 21,
        "kv_offload": True,
    },
}
TWO_STEPS = LOCAL | {
    "infer_steps": 2,
    "ar_config": {
        "num_frame_per_chunk": 1,
        "sink_size": 2,
        "hybrid_attn": "W2-W2-W2-W2-W21",
        "rope_position_mode": "global",
        "rope_max_frames": 40,
    },
}


@pytest.mark.parametrize(("public_config", "preset"), [(LOCAL, FULL), (TWO_STEPS, HYBRID)])
def test_the_presets_are_what_the_public_files_say(
    public_config: Mapping[str, Any], preset: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(public_config))
    for other in (FULL, HYBRID):  # whatever is built says nothing that stays
        config = resolve_build(
            BuildOptions(preset=other, random_weights=0, target="cpu", run_config=file)
        ).config
        assert (config.workload.stream, config.workload.schedule) == (
            PRESETS[preset].stream,
            PRESETS[preset].schedule,
        )
    asked = BuildOptions(
        preset=FULL, random_weights=0, target="cpu", run_config=file, height=480, sink_frames=3
    )
    assert resolve_build(asked).config.workload.stream == replace(
        PRESETS[preset].stream, height=480, sink_frames=3
    )


def test_the_newer_names_of_the_picture_and_the_largest_chunk() -> None:
    cache = LOCAL["ar_config"] | {"num_frame_per_chunk": 20}
    config = {name: value for name, value in LOCAL.items() if not name.startswith("target")}
    fields, _ = read_run_config("it", config | {"size": [480, 832], "fps": 16, "ar_config": cache})
    assert (fields["height"], fields["width"], fields["ring_frames"], fields["chunk_frames"]) == (
        480,
        832,
        20,
        20,
    )


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.lists(st.integers(1, 30), min_size=2, max_size=6),
    st.integers(1, 40),
)
def test_as_many_frames_are_seen(chunk: int, sink: int, windows: list[int], local: int) -> None:
    """As in LightX2V's cache: the sink with the portrait, then so many chunks; or the local size and the portrait."""
    cache = {"num_frame_per_chunk": chunk, "sink_size": sink}
    hybrid = {"hybrid_attn": "-".join(f"W{window}" for window in windows)}
    fields, _ = read_run_config("it", LOCAL | {"ar_config": cache | hybrid})
    pinned = fields["reference_frames"] + fields["sink_frames"]
    assert [pinned + ring for ring in fields["layer_rings"]] == [sink + window * chunk for window in windows]
    fields, _ = read_run_config("it", LOCAL | {"ar_config": cache | {"local_attn_size": local + sink}})
    assert fields["reference_frames"] + fields["sink_frames"] + fields["ring_frames"] == local + sink + 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ar_config": None}, "has no ar_config"),
        ({"enable_cfg": True}, "enable_cfg is True, and only False is built"),
        ({"sample_guide_scale": 5}, "sample_guide_scale is 5"),
        ({"ref_state": 2}, "ref_state is 2, and only 1 is built"),
        ({"look_ahead": 0.5}, r"look_ahead is 0\.5, and only 0\.0 is built"),
        ({"use_31_block": False}, "use_31_block is False, and only True is built"),
        ({"infer_steps": 0}, "infer_steps is 0, expected a whole number"),
        ({"infer_steps": True}, "infer_steps is True"),
        ({"sample_shift": "5"}, "sample_shift is 5, expected a number"),
        ({"sample_shift": 1e-30}, "shift must be positive, got 1e-30"),
        ({"infer_steps": 1025}, "1025 denoise passes, expected at most 1024"),
        ({"size": [832]}, "expected height and width"),
        ({"ar_config": {"window": 3}}, "ar_config says window, which is not known"),
        ({"ar_config": LOCAL["ar_config"] | {"step_kv_cache": False}}, "ar_config.step_kv_cache is False"),
        ({"ar_config": LOCAL["ar_config"] | {"hybrid_attn": "W2"}}, "one of them"),
        ({"ar_config": TWO_STEPS["ar_config"] | {"hybrid_attn": "W2-w3"}}, "hybrid_attn is 'W2-w3'"),
        ({"ar_config": LOCAL["ar_config"] | {"rope_position_mode": "global"}}, "rope_max_frames is None"),
        ({"ar_config": LOCAL["ar_config"] | {"rope_position_mode": "older"}}, "expected local or global"),
    ],
)
def test_what_is_not_built_is_refused(changed: Mapping[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_run_config("it", {**LOCAL, **changed})


def test_other_families_have_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(LOCAL))
    with pytest.raises(UsageError, match="the family 'wan' has no run configurations"):
        resolve_build(BuildOptions(preset="tiny", target="cpu", run_config=tmp_path / "run.json"))
