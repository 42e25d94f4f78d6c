"""What only a GPU shows of speech: engines verify, a step is one launch, and who shares a call changes no byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seko_export import build
from seko_export.speech.options import SpeechOptions
from seko_runtime import open_artifact
from seko_runtime.speech.artifact import SpeechArtifact, speech_artifact
from tests.support.rows import rows_of
from tests.voxcpm2.models import with_heads
from tests.voxcpm2.test_build import numbers, write_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POSITIONS, PATCHES = 96, 5
TEXTS = ("hello 世界", "the thin world", "你好")


@pytest.fixture(
    scope="module",
    params=[{}, {"fp8": True}, {"kv": "int8"}, {"fp4_kv": True}],
    ids=["exact", "fp8", "int8", "fp4"],
)
def artifact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SpeechArtifact]:
    """An artifact of three sessions in calls of two, its engines compiled for this machine's GPU."""
    home: Path = tmp_path_factory.mktemp("speech")
    # in bfloat16, with heads as the kernels of few tokens take them
    write_folder(home / "model", with_heads(128, dtype="bfloat16"))
    sizes: dict[str, Any] = {"sessions": 3, "batch": (2,), "positions": POSITIONS, "prefill": (16,)}
    build(SpeechOptions(home / "model", **sizes, **request.param), home / "artifact", compiler_cache=False)
    with open_artifact(home / "artifact") as opened:
        yield speech_artifact(opened)


def test_goldens_hold(artifact: SpeechArtifact) -> None:
    assert artifact.manifest.target.device == "cuda"
    assert all(error.within for error in artifact.verify())


def test_a_step_is_one_launch(artifact: SpeechArtifact) -> None:
    with artifact.open_pool() as pool, pool.open_session(seed=1) as session:
        list(session.speak(TEXTS[0], patches=2))
        rows, row = rows_of(pool), session._running_row()
        device = rows.device()
        with rows.memory.ordered():
            launches, _ = device.step(numbers(rows, row))
    assert launches == 1


def test_who_shares_a_call_changes_no_byte(artifact: SpeechArtifact) -> None:
    """Three texts in calls of two, of which one begins while the others are spoken; and each text alone."""
    alone = []
    for seed, text in enumerate(TEXTS):
        with artifact.open_pool() as pool, pool.open_session(seed=seed) as session:
            alone.append([sound.tobytes() for sound in session.speak(text, patches=PATCHES)])
    together: list[list[bytes]] = [[] for _ in TEXTS]
    with artifact.open_pool() as pool, ExitStack() as stack:
        sessions = [stack.enter_context(pool.open_session(seed=seed)) for seed in range(len(TEXTS))]
        for session, text in zip(sessions[:2], TEXTS, strict=False):
            session.begin(text, patches=PATCHES)
        for step in range(3 * PATCHES):
            if step == 2:
                sessions[2].begin(TEXTS[2], patches=PATCHES)
            order = [(step + place) % 3 for place in range(3)]
            company = [number for number in order if sessions[number].speaks][:2]
            sounds = pool.step([sessions[number] for number in company]) if company else []
            for number, sound in zip(company, sounds, strict=True):
                if sound is not None:
                    assert np.isfinite(sound).all()
                    together[number].append(sound.tobytes())
    assert together == alone
    assert all(alone)
