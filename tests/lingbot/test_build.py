"""The tiny preset as an artifact: built, verified, and replayed by the runtime alone as the eager model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from seko_export.build_steps import build_artifact
from seko_export.video.recording import golden_text
from seko_runtime import open_artifact
from seko_runtime.errors import UsageError
from tests.lingbot.streams import given_of, lingbot_config, random_checkpoint
from tests.support.cameras import camera_of, chunk_of
from tests.support.stacked import eager_session, open_stacked
from tests.support.tolerances import relative_error
from tests.support.uncompiled import leave_uncompiled
from tests.truth.eager_stream import weights_of

# Four passes in float32 that feed on each other, over a few chunks: some ten times the bar of one pass.
STREAM_BAR = 5e-5
CHUNKS = 4  # past the wrap: the cache holds 5 latent frames, a chunk is 2


def test_it_is_built_verified_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held to the eager model. Programs run as they are; test_gpu.py compiles them, also over an FP4 cache."""
    config, checkpoint = lingbot_config("fp32"), random_checkpoint()
    save_file(checkpoint, tmp_path / "tiny.safetensors")
    leave_uncompiled(monkeypatch)
    built = build_artifact(
        config, tmp_path / "tiny.safetensors", tmp_path / "artifact", backend="compile", compiler_cache=False
    )
    assert built.golden_error <= 1e-3
    table, text = given_of(config, None)["condition"].numpy(), golden_text(config).numpy()
    with open_artifact(built.artifact) as artifact:
        kinds = {spec.name: (spec.shape, spec.per, spec.kind) for spec in artifact.manifest.inputs}
        assert kinds == {
            "condition": ((20, 30, 4, 6), "session", "picture_condition"),
            "camera": ((2, 3, 4), "chunk", "camera_poses"),
            "intrinsics": ((2, 4), "chunk", "camera_intrinsics"),
        }
        assert artifact.manifest.workload.stream.latent_shape[0] == config.model.out_channels == 16
        assert all(error.within for error in artifact.verify())
        with pytest.raises(UsageError, match="input 'condition' is required per session"):
            open_stacked(artifact, seeds=[3], inputs={})
        (declared,) = (spec for spec in artifact.manifest.controls or () if spec.kind == "camera")
        assert declared.inputs == {"poses": "camera", "intrinsics": "intrinsics"}
        assert declared.parameters["keys"]["KeyW"] == "ahead"
        keys = camera_of(artifact.manifest, "iw-9,wl-9,none-9")
        steps = [chunk_of(keys) for _ in range(CHUNKS)]
        with open_stacked(artifact, seeds=[3], text=text, inputs={"condition": table}) as session:
            with pytest.raises(UsageError, match="input 'camera' is required for every chunk"):
                session.run_chunk()
            chunks = [session.run_chunk(step).to_host() for step in steps]
    with eager_session(config, weights_of(config, checkpoint), torch.from_numpy(text), [3]) as session:
        for replayed, step in zip(chunks, steps, strict=True):
            eager = torch.from_numpy(session.run_chunk(step).to_host())
            assert relative_error(torch.from_numpy(replayed), eager) <= STREAM_BAR
