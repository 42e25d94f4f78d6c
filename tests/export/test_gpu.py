"""What only a GPU shows of a build: bf16 engines by FlashAttention's rule, FP4 rows at different chunks, goldens."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scripts.bench.children import last_json
from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.weights import model_weights
from seko_export.families.model_files import load_checkpoint
from seko_export.families.wan.presets import PRESETS
from seko_export.host.environment import has_fp8, resolve_target
from seko_export.media.load import load_vae
from seko_export.media.sources import MediaSources
from seko_export.media.wan_vae.modules import VaeDecode
from seko_export.video import bounds as golden_bounds
from seko_export.video import recording as golden
from seko_export.video.workload import VideoExport
from seko_runtime import OpenArtifact, open_artifact
from tests.export.media_files import TEXT, VAE, write_text_encoder, write_vae
from tests.support.stacked import open_stacked
from tests.support.tolerances import FP8_MATMULS_PASS, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHUNKS = 4  # the last one evicts frames and runs the unmasked block


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.pt"
    write_random_checkpoint(path, model(), format="self-forcing", seed=0, dtype=torch.float32)
    return path


@pytest.fixture(scope="module", params=["plain", "fused"])
def exact_artifact(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    goal = tmp_path_factory.mktemp("exact") / "artifact"
    config = gpu_config("bf16", batch=1).changed(fused=request.param == "fused")
    assert build_artifact(config, checkpoint, goal).kernels == request.param
    return goal


@pytest.fixture(scope="module", params=["plain", "fused", "fused attention", "fused fp8"])
def fp4_artifact(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    fused, fp8 = request.param != "plain", request.param == "fused fp8"
    in_8_bits = fp8 or request.param == "fused attention"
    if in_8_bits:
        needs_fp8()
    goal = tmp_path_factory.mktemp("fp4") / "artifact"
    config = gpu_config("fp4", batch=2).changed(
        fused=fused, fp8=fp8, attention="fp8" if in_8_bits else "torch"
    )
    result = build_artifact(config, checkpoint, goal)
    assert result.kernels == ("fused" if fused else "plain")
    return goal


def test_bf16_engines_keep_flash_attentions_rule(checkpoint: Path, exact_artifact: Path) -> None:
    """Their error against float32 is at most twice that of the same model in bf16 eager torch."""
    gpu = gpu_config("bf16", batch=1)
    cpu = VideoBuild(
        gpu.model, VideoConfig(gpu.workload.stream, gpu.workload.schedule, "fp32"), TargetConfig("cpu")
    )
    truth, eager = eager_chunks(cpu, checkpoint), eager_chunks(gpu, checkpoint)
    with open_artifact(exact_artifact) as artifact:
        engine = replayed_chunks(artifact, [0])
    for number in range(CHUNKS):
        allowed = 2 * relative_error(eager[number], truth[number])
        assert relative_error(torch.from_numpy(engine[number]), truth[number]) <= allowed


def test_goldens_of_an_exact_cache_hold(exact_artifact: Path) -> None:
    with open_artifact(exact_artifact) as artifact:
        assert all(error.within for error in artifact.verify())


def test_goldens_of_an_fp4_cache_hold(fp4_artifact: Path) -> None:
    with open_artifact(fp4_artifact) as artifact:
        assert all(error.within for error in artifact.verify())


def test_goldens_hold_where_a_window_fits_no_tile(checkpoint: Path, tmp_path: Path) -> None:
    """A window of 30 tokens: what attention and its bias are given is no multiple of 8."""
    config = gpu_config("bf16", batch=1)
    stream = StreamConfig(height=32, width=48, chunk_frames=2, sink_frames=1, ring_frames=4)
    build_artifact(config.changed(stream=stream), checkpoint, tmp_path / "artifact")
    with open_artifact(tmp_path / "artifact") as artifact:
        assert all(error.within for error in artifact.verify())


def test_a_chunk_is_one_launch_of_two_captured_graphs(exact_artifact: Path) -> None:
    with open_artifact(exact_artifact) as artifact, open_stacked(artifact) as session:
        for _ in range(CHUNKS):
            session.run_chunk()
        assert session.stats.captured_graphs == 2
        assert session.stats.graph_launches == CHUNKS


def test_full_and_filling_rows_share_one_graph_of_fused_layers(checkpoint: Path, tmp_path: Path) -> None:
    needs_fp8()
    config = gpu_config("fp4", batch=1).changed(fused=True, attention="fp8")
    build_artifact(config, checkpoint, tmp_path / "artifact")
    with open_artifact(tmp_path / "artifact") as artifact, open_stacked(artifact) as session:
        for _ in range(CHUNKS):
            session.run_chunk()
        assert (session.stats.captured_graphs, session.stats.graph_launches) == (1, CHUNKS)


def test_full_and_filling_rows_share_one_graph_of_16_bit_attention(tmp_path: Path) -> None:
    """Over an exact cache, and as near to it as torch's attention: the build's goldens say so."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90 alone")
    wide = dataclasses.replace(model(), dim=256, heads=2)
    write_random_checkpoint(tmp_path / "wide.pt", wide, format="self-forcing", seed=0, dtype=torch.float32)
    config = gpu_config("bf16", batch=2).changed(model=wide, fused=True, attention="bf16")
    result = build_artifact(config, tmp_path / "wide.pt", tmp_path / "artifact")
    assert result.attention == "bf16"
    with open_artifact(tmp_path / "artifact") as artifact:
        assert all(error.within for error in artifact.verify())
        with open_stacked(artifact, seeds=[0, 1]) as session:
            for _ in range(CHUNKS):
                session.run_chunk()
            assert (session.stats.captured_graphs, session.stats.graph_launches) == (1, CHUNKS)


@pytest.mark.parametrize(
    ("fp8", "more"),
    [(False, golden_bounds.TOLERANCES[torch.bfloat16]["lossy"]), (True, 2 * FP8_MATMULS_PASS)],
)
def test_fused_layers_of_full_width_are_as_near_to_the_exact_track_as_plain_ones(
    fp8: bool, more: float, tmp_path: Path
) -> None:
    """Two layers of the 1.3B model at 480x832; the build itself holds the engines to the eager fused layers.

    ``more``: what bfloat16 may be off by; of fp8 matmuls twice `FP8_MATMULS_PASS`, as there are two passes.
    """
    needs_fp8()
    preset = PRESETS["self-forcing-1.3b"]
    model = dataclasses.replace(preset.model, layers=2)
    stream = dataclasses.replace(preset.stream, ring_frames=6)
    plain = VideoBuild(model, VideoConfig(stream, Schedule.warped(2), "fp4"), TargetConfig("cuda"))
    write_random_checkpoint(tmp_path / "wide.pt", model, format="self-forcing", seed=0, dtype=torch.float32)
    fused = build_artifact(
        plain.changed(fused=True, fp8=fp8, attention="fp8"),
        tmp_path / "wide.pt",
        tmp_path / "artifact",
    )
    loaded = load_checkpoint(tmp_path / "wide.pt", model)
    tensors = dict(model_weights(make_pieces(plain), loaded)) | plain.workload.schedule.tables(stream)
    known = golden.record(plain, tensors, lambda *_: None).error_vs_exact
    for ours, theirs in zip(fused.kv["error_vs_exact"], known, strict=True):
        assert ours <= theirs + more


_COMPILED = """
import json, sys
import triton
from pathlib import Path
from tests.export import test_gpu

compiled = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.name)
test_gpu.use_kernels(sys.argv[1], Path(sys.argv[2]))
print(json.dumps(compiled))
"""


def test_a_recording_finds_the_kernels_that_another_process_has_compiled(tmp_path: Path) -> None:
    """Those of the layers: what stands before and behind them has its own variant of the norm."""
    needs_fp8()
    environ = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    beside, recording = (
        last_json("-c", _COMPILED, what, str(tmp_path / "model.pt"), environ=os.environ | environ)
        for what in ("compile", "record")
    )
    assert {"kv_write_kernel", "attention_hopper_kernel"} < set(beside)
    assert set(recording) <= {"row_norm_kernel"}


def use_kernels(what: str, checkpoint: Path) -> None:
    """Compile the kernels of a recording, or record, in a process of the test above."""
    wide = dataclasses.replace(model(), dim=256, heads=2)
    config = gpu_config("fp4", batch=1).changed(model=wide, fused=True, attention="fp8")
    if what == "compile":
        compiler = VideoExport().kernel_compiler(config)
        assert compiler is not None
        compiler()
        return
    write_random_checkpoint(checkpoint, wide, format="self-forcing", seed=0, dtype=torch.float32)
    tensors = dict(model_weights(make_pieces(config), load_checkpoint(checkpoint, wide)))
    golden.record(config, tensors | config.workload.schedule.tables(config.workload.stream), lambda *_: None)


def test_rows_at_different_chunks_agree_with_rows_that_started_together(fp4_artifact: Path) -> None:
    """Row 1 starts anew after two chunks: it must give what a fresh row with its seed gives, to the bit."""
    with open_artifact(fp4_artifact) as artifact:
        together = replayed_chunks(artifact, [5, 7])
        with open_stacked(artifact, seeds=[5, 6]) as session:
            apart = []
            for number in range(CHUNKS + 2):
                if number == 2:
                    session.restart_row(1, seed=7)
                apart.append(session.run_chunk().to_host())
    for number in range(2):
        assert np.array_equal(apart[number][0], together[number][0])
    # Both graphs compute a row from that row alone; only the masked graph is sure to be the same one here.
    for number in range(2):
        assert np.array_equal(apart[number + 2][1], together[number][1])
    for number in range(2, CHUNKS):
        difference = torch.from_numpy(apart[number + 2][1])
        assert (
            relative_error(difference, torch.from_numpy(together[number][1]))
            < golden_bounds.TOLERANCES[torch.bfloat16]["lossy"]
        )


def test_two_runs_give_equal_bytes(fp4_artifact: Path) -> None:
    with open_artifact(fp4_artifact) as artifact:
        first, second = (replayed_chunks(artifact, [1, 2]) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_text_and_video_in_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    """The build holds every engine to its module; frames are those of the latents, decoded in float32 at once."""
    vae, text = write_vae(tmp_path / "vae"), write_text_encoder(tmp_path / "text_encoder")
    config = gpu_config("bf16", batch=2).changed(vae=VAE, text=TEXT)
    media = MediaSources(vae, text, text / "tokenizer.json")
    build_artifact(config, checkpoint, tmp_path / "artifact", media=media)
    latents, frames = [], []
    with open_artifact(tmp_path / "artifact") as artifact:
        assert all(error.within for error in artifact.verify())
        with open_stacked(artifact, seeds=[0, 1], prompt=golden.GOLDEN_PROMPT) as session:
            for _ in range(CHUNKS):
                chunk = session.run_chunk()
                latents.append(torch.from_numpy(chunk.to_host()))
                frames.append(torch.from_numpy(chunk.video()))
    half = VaeDecode(VAE, first=True, frames=3 * CHUNKS).eval().requires_grad_(False)
    half.load_state_dict(dict(load_vae(vae, VAE, half="decoder").items()), strict=False)
    wanted = ((half(torch.cat(latents, dim=2))[0].double() + 1) * 127.5).permute(0, 2, 3, 4, 1)
    got = torch.cat(frames, dim=1).double()
    assert (
        float((got - wanted).square().mean().sqrt())
        <= golden_bounds.VIDEO_TOLERANCES[torch.bfloat16]["exact"]
    )


def needs_fp8() -> None:
    if not has_fp8(resolve_target("auto")):
        pytest.skip("this GPU has no fp8 numbers")


def model() -> ModelConfig:
    return PRESETS["tiny"].model


def gpu_config(scheme: str, *, batch: int) -> VideoBuild:
    stream = StreamConfig(height=64, width=96, chunk_frames=3, sink_frames=1, ring_frames=6, batch=batch)
    return VideoBuild(model(), VideoConfig(stream, Schedule.warped(), scheme), TargetConfig("cuda"))


def eager_chunks(config: VideoBuild, checkpoint: Path) -> list[torch.Tensor]:
    tensors = dict(model_weights(make_pieces(config), load_checkpoint(checkpoint, config.model)))
    on_device = {
        n: t.to(config.target.device)
        for n, t in (tensors | config.workload.schedule.tables(config.workload.stream)).items()
    }
    chunks = golden.run_eager(
        config, on_device, golden.golden_text(config), [0], range(CHUNKS), lambda *_: None, None
    )
    return [chunks[number].latents for number in range(CHUNKS)]


def replayed_chunks(artifact: OpenArtifact, seeds: list[int]) -> list[NDArray[np.float32]]:
    with open_stacked(artifact, seeds=seeds) as session:
        return [session.run_chunk().to_host() for _ in range(CHUNKS)]
