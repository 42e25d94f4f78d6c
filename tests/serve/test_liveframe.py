"""liveframe, a harness of others, plays the small world through `scripts/liveframe_adapter.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.shared import made_once
from tests.support.uncompiled import UNCOMPILED

from .artifacts import make_world

pytest.importorskip("liveframe", reason="needs liveframe, of the extra clients")
pytest.importorskip("cv2", reason="needs liveframe[world], of the extra clients")

from liveframe.world.actions import ActionScript
from liveframe.world.backend import WorldBackend
from liveframe.world.ledger import verify_world_ledger
from liveframe.world.runner import run_suite
from liveframe.world.session import WorldCase, run_case

from scripts.liveframe_adapter import ARTIFACT, SekoWorld

PICTURE = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)


class Kept(list[Any]):
    """Keeps the frames of a case, in the place of the harness' own sink."""

    add = list.append

    def finalize(self) -> list[Path]:
        return []


@pytest.fixture
def backend(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> SekoWorld:
    folder = made_once(tmp_path_factory, "serve-world", make_world)
    monkeypatch.setenv(ARTIFACT, str(folder / "artifact"))
    monkeypatch.setenv(UNCOMPILED, "1")
    return SekoWorld()


@pytest.mark.slow
def test_its_smoke_suite_passes_and_a_case_is_the_same_again(backend: SekoWorld, tmp_path: Path) -> None:
    """Ten seconds of video in chunks of 9 and 12 frames, and a ledger that it verifies; each later session begins
    with 9 frames, too."""
    assert isinstance(backend, WorldBackend)
    told = backend.capabilities
    assert (told.chunk_frames_first, told.chunk_frames, told.resolution) == (9, 12, (96, 96))
    assert told.actions == frozenset("WSADLRUN0")
    folder, summary = run_suite(backend, suite="smoke", run_root=tmp_path, model_name="world-sample")
    assert (summary["cases"], summary["failures"]) == (1, 0)
    (case,) = json.loads((folder / "report.json").read_text())["cases"]
    assert case["metrics"]["native_frames"] % 12 == 9
    assert verify_world_ledger(folder / "ledger.json")["files"]
    videos = []
    for name in ("first", "again"):
        kept = Kept()
        script = WorldCase(name, PICTURE, ActionScript.from_segments([(0, "W+L", 21)]), seed=3)
        result = run_case(backend, script, capture=kept)
        assert (result.status, result.error) == ("ok", None)
        assert [len(frames) for frames in kept] == [9, 12]
        videos.append(np.concatenate(kept))
    assert np.array_equal(videos[0], videos[1])
    backend.close()
