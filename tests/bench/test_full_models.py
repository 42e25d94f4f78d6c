"""The benches of full-size models at their tiny presets' size, uncompiled: every part makes its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.trials import tried

pytestmark = pytest.mark.slow


def rows_of(tmp_path: Path, case: str) -> list[dict[str, Any]]:
    """Return the rows of a case of which no part failed."""
    trial = tried(tmp_path, case)
    assert (trial.code, trial.summary["failed"]) == (0, {})
    return trial.rows


def test_every_part_of_lingbot_makes_its_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "lingbot")
    assert [row["figure"] for row in rows] == [
        "lingbot_v2_chunk_ms",
        "lingbot_v2_chunk_ms",
        "lingbot_vs_compiled",
        "lingbot_camera_share",
        "lingbot_key_to_frame",
        "world_first_picture_s",
        "lingbot_720p_fits",
    ]
    assert all(row["value"] > 0 and row["bar"] is None for row in rows)
    once, every = rows[:2]
    assert once["shape"].endswith("camera once a chunk")
    assert every["shape"].endswith("camera once a pass")
    assert once["camera_bytes"] > every["camera_bytes"] > 0
    assert rows[3]["value"] < 1


def test_every_part_of_loops_makes_its_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "loops")
    figures = ["context_reuse_vs_pass", "v2v_fps_1p3b", "rolling_fps", "krea14_fps"]
    assert [row["figure"] for row in rows] == figures
    assert all(row["value"] > 0 for row in rows)
    assert "4 chunks a pass" in rows[2]["shape"]


def test_every_part_of_seko_talk_makes_its_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "seko_talk")
    step, heard, launches, fits, hybrid = rows
    assert [row["figure"] for row in rows] == [
        "talk_step_vs_compiled",
        "talk_audio_ms",
        "talk_launches_per_chunk",
        "talk_sessions_fit",
        "talk_hybrid_sessions_fit",
    ]
    assert step["value"] == round(step["step_ms"] / step["compiled_step_ms"], 6)
    assert 0 < heard["value"] < 1
    assert heard["calls"] == 2 + 2  # HuBERT, the projector, and the keys and values of two layers
    assert launches["value"] == 0  # without a GPU
    assert (fits["value"], hybrid["value"]) == (2, 4)
    assert hybrid["kv_bytes"] > fits["kv_bytes"] > 0


def test_every_part_of_worlds_makes_its_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "matrix_game")
    fps, fps_parts, compiled, key, key_parts, _, _, sessions, late = rows
    figures = ["mg2_fps", "mg2_step_vs_compiled", "serve_key_to_picture", "serve_key_to_shown"]
    figures += ["worlds_sessions", "worlds_misses"]
    assert list(dict.fromkeys(row["figure"] for row in rows)) == figures
    for whole, parts in ((fps, fps_parts), (key, key_parts)):
        assert (whole["figure"], "by single latents" in whole["shape"]) == (parts["figure"], False)
        assert "by single latents" in parts["shape"]
    assert fps["value"] == pytest.approx(1e3 * 12 / fps["chunk_ms"])  # a chunk of three latent frames
    assert compiled["value"] == round(compiled["chunk_ms"] / compiled["compiled_ms"], 6)
    assert key["presses"] == 2
    assert key["value"] == round(key["latency_ms"]["p99"] / key["chunk_ms"], 6)
    # A machine that is busy with other work refuses the second.
    refused = sum(sessions["refused"].values())
    assert (sessions["value"] + refused, sessions["late"]) == (2, late["value"])
    assert sessions["value"] >= 1
    assert sessions["chunks"] >= 4
    assert [row["figure"] for row in rows_of(tmp_path, "minwm")] == ["minwm_fps"]


def test_what_begins_too_late_is_named(tmp_path: Path) -> None:
    trial = tried(tmp_path, "lingbot", "--seconds", "0")
    assert trial.code == 1
    assert trial.summary["skipped"] == ["chunk", "compiled", "share", "key", "first_picture", "fits"]
    assert trial.rows == []
