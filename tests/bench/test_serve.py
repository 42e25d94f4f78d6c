"""The server's benches at a tiny model's size, uncompiled: the parts make their rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "serve_full.py"


def test_parts_make_their_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        str(BENCH),
        "--preset",
        "tiny",
        "--eager",
        "--work",
        str(tmp_path),
        "--rows",
        str(rows),
    ]
    command += ["--parts", "s3,key,encode", "--misses-s3-of", "4", "--presses", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["figure"] for row in results] == [
        "serve_misses_s3",
        "serve_key_to_picture",
        "serve_encode_cores",
    ]
    late, key, cores = results
    assert late["chunks"] >= 4 - 2  # but for the one that each viewer collects
    assert key["presses"] == 2
    assert key["value"] > 0
    assert cores["value"] > 0
