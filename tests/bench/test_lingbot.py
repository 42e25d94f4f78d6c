"""The bench of lingbot-world at the tiny preset's size, uncompiled: every part makes its row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "lingbot.py"
PARTS = "chunk,compiled,share,key,fits"


def run(tmp_path: Path, parts: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), "--preset", "lingbot-tiny", "--eager", "--work", str(tmp_path / "work"),
               "--rows", str(tmp_path / "rows.jsonl"), "--chunks", "2", "--latencies", "2",
               "--parts", parts]  # fmt: skip
    return subprocess.run([*command, *more], capture_output=True, text=True, check=False)


def test_every_part_makes_its_row(tmp_path: Path) -> None:
    done = run(tmp_path, PARTS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == {}
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["figure"] for row in rows] == [
        "lingbot_v2_chunk_ms",
        "lingbot_v2_chunk_ms",
        "lingbot_vs_compiled",
        "lingbot_camera_share",
        "lingbot_key_to_frame",
        "lingbot_720p_fits",
    ]
    assert all(row["value"] > 0 and row["bar"] is None for row in rows)
    once, every = rows[:2]
    assert once["shape"].endswith("camera once a chunk")
    assert every["shape"].endswith("camera once a pass")
    assert once["camera_bytes"] > every["camera_bytes"] > 0
    assert rows[3]["value"] < 1


def test_what_begins_too_late_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "chunk", "--seconds", "0")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["skipped"] == ["chunk"]
    assert not (tmp_path / "rows.jsonl").exists()
