"""A cache that is made again before each chunk (Krea): against a loop in float64 that starts from nothing each time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.backends import export_backend
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.registry import graph_of, presets
from seko_export.options.declaration import BuildOptions
from seko_export.video.plan.predict import PlanRequest, predict
from seko_export.video.plan.table import show
from seko_runtime.errors import ManifestError
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import DECODE_LATENTS
from tests.export.vae_oracle import SMALL, VaeOracle
from tests.support.asked import resolved
from tests.support.eager_pool import eager_pool
from tests.support.made_again import made_again
from tests.support.stacked import eager_session
from tests.support.tolerances import STREAM, relative_error
from tests.truth.eager_stream import random_text, random_wan_weights, small_config
from tests.truth.naive_dit import ShiftingDit
from tests.truth.naive_loop import NaiveLoop
from tests.truth.test_video_in import encoded, weights_of

SEED = 5
TIMES = (1000.0, 700.0)


@pytest.fixture(scope="module")
def oracle() -> VaeOracle:
    return VaeOracle(torch.float32)


@pytest.fixture(scope="module")
def exact() -> VaeOracle:
    return VaeOracle(torch.float64)


def config_of(chunk: int = 3) -> VideoBuild:
    """A small build whose cache is made again before each chunk."""
    config = small_config(chunk, chunk, chunk)
    stream = replace(config.workload.stream, height=32, width=48, window_positions=True, context="rebuild")
    return config.changed(stream=stream, schedule=Schedule(TIMES), vae=SMALL)


class KreaDit(ShiftingDit):
    """The naive model with absolute positions, whose cache is emptied from outside."""

    keys_before_rope = False


class KreaLoop(NaiveLoop):
    """Before each chunk but the first: an empty cache, one pass over three clean frames at frames 0 to 2 and time 0;
    then the chunk's passes at frames 3 to 5."""

    naive_dit = KreaDit

    def chunk(self, number: int, context: Tensor | None) -> Tensor:
        """Return the latents [C, F, h, w] of a chunk behind its context [C, F, h, w]."""
        frames = self.stream.chunk_frames
        self.dit.cached = [[] for _ in self.dit.cached]
        if context is not None:
            self.dit.step(context, 0.0, 0, commit=True)
        first = 0 if context is None else frames
        x = self.noise(number, 0)
        for at, time in enumerate(TIMES):
            clean = x - time / 1000 * self.dit.step(x, time, first, commit=False)
            after = TIMES[at + 1] / 1000 if at + 1 < len(TIMES) else 0.0
            x = (1 - after) * clean + after * self.noise(number, at + 1)
        return x


def frame_before(video: NDArray[np.uint8], frames: int) -> NDArray[np.uint8]:
    """The ninth last frame of a video [T, H, W, 3] whose chunks have three latent frames: all frames of the last two
    latent frames come behind it."""
    return video[-1 - 4 * (frames - 1)]


@pytest.mark.shows("context-rebuild")
@pytest.mark.parametrize("chunk", [3, 2])
def test_chunks_are_those_of_a_loop_written_out(chunk, oracle, exact, worst):
    """The picture that is encoded again is taken from the video that the session gives."""
    config = config_of(chunk)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive = KreaLoop(config, wan, text[0], SEED)
    context: Tensor | None = None
    with eager_session(config, weights_of(config, wan, oracle), text, [SEED]) as session:
        for number in range(4):
            made = session.run_chunk()
            latents = torch.from_numpy(made.to_host())[0]
            error = relative_error(latents, naive.chunk(number, context))
            worst("a cache made again, latents", error)
            assert error <= STREAM[torch.float32], number
            context = latents.double()
            if number > 0:
                picture = frame_before(made.video()[0], chunk)
                context[:, 0] = encoded(picture[None], exact)[:, 0]


def test_the_encoded_frame_matters(oracle):
    """With another picture, or none, the next chunk is another one."""
    config = config_of()
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive = KreaLoop(config, wan, text[0], SEED)
    with eager_session(config, weights_of(config, wan, oracle), text, [SEED]) as session:
        chunks = [session.run_chunk() for _ in range(2)]
        context = torch.from_numpy(chunks[1].to_host())[0].double()
        other = naive.chunk(2, context)
        made = torch.from_numpy(session.run_chunk().to_host())[0]
    assert relative_error(made, other) > 0.001


def opened(config: VideoBuild, oracle: VaeOracle) -> tuple[Mapping[str, Tensor], NDArray[np.float32]]:
    wan = random_wan_weights(config.model)
    return weights_of(config, wan, oracle), random_text(config.model, 1).numpy()


def test_a_pools_sessions_at_different_chunks_are_those_alone(oracle, tmp_path: Path) -> None:
    """One joins late; it is paused, saved, restored, stepped back, restarted; a new prompt needs no rebuilding."""
    config = config_of(2).changed(pool=PoolConfig(2, (2,)))
    weights, text = opened(config, oracle)
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as alone:
        wanted = [alone.run_chunk().to_host() for _ in range(5)]
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as early:
        chunks = [early.run_chunk().to_host() for _ in range(2)]
        late = pool.open_session(seed=SEED, text=text)
        pairs = [[chunk.to_host() for chunk in pool.run([early, late])] for _ in range(3)]
        late.save(tmp_path / "late")
        late.pause()
        late.resume()
        late.set_text(text, recache=True)
        assert np.array_equal(late.run_chunk().to_host(), wanted[3])
        late.close()
        with pool.restore(tmp_path / "late") as again:
            assert np.array_equal(again.run_chunk().to_host(), wanted[3])
            assert np.array_equal(again.run_chunk().to_host(), wanted[4])
            again.restart()
            assert all(np.array_equal(again.run_chunk().to_host(), chunk) for chunk in wanted[:3])
    chunks += [pair[0] for pair in pairs]
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=False))
    assert all(np.array_equal(pair[1], wanted[at]) for at, pair in enumerate(pairs))


def test_rows_of_a_batch_may_be_at_different_chunks(oracle, worst) -> None:
    """One is restarted, and its first chunks have no context and no encoded frame while the other one's have."""
    alone, both = config_of(2), config_of(2)
    both = both.changed(stream=replace(both.workload.stream, batch=2))
    wan, text = random_wan_weights(alone.model), random_text(alone.model, 2)
    wanted = []
    for row, seed in enumerate((SEED, SEED + 1)):
        with eager_session(alone, weights_of(alone, wan, oracle), text[row : row + 1], [seed]) as session:
            wanted.append([session.run_chunk().to_host()[0] for _ in range(4)])
    numbers = [(0, 0), (1, 1), (2, 0), (3, 1)]
    with eager_session(both, weights_of(both, wan, oracle), text, [SEED, SEED + 1]) as session:
        for call, at in enumerate(numbers):
            if call == 2:
                session.restart_row(1)
            made = session.run_chunk().to_host()
            for row, number in enumerate(at):
                error = relative_error(torch.from_numpy(made[row]), torch.from_numpy(wanted[row][number]))
                worst("a cache made again, rows of a batch", error)
                assert error <= STREAM[torch.float32], (call, row)


@pytest.mark.parametrize("engine", ["vae_encode", "head", "vae_decode"])
def test_a_chunk_that_failed_has_the_same_context(oracle, engine: str) -> None:
    """Also once its own frames were decoded over those that its context came from."""
    config = config_of(2)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    weights = weights_of(config, wan, oracle)
    with eager_session(config, weights, text, [SEED]) as session:
        wanted = [session.run_chunk().to_host() for _ in range(5)]
    chunks = made_again(config, weights, text, SEED, engine=engine, failing=(3, 4))
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=True))


def test_kreas_preset_and_the_programs_of_it() -> None:
    stream = presets()["krea-14b"].stream
    assert not presets()["krea-14b"].missing
    assert (stream.chunk_frames, stream.cache_frames, stream.context) == (3, 6, "rebuild")
    with pytest.raises(UsageError, match="give a --vae that encodes"):
        graph_of(resolved("krea-14b", random_weights=0).config)
    manifest = describe(config_of(), export_backend("eager"), (), {})
    assert manifest.workload.stream.rebuilt
    assert {"begin", "denoise", "context", "encode", "decode"} <= {*manifest.programs}
    plan = predict(PlanRequest(BuildOptions(preset="krea-14b", no_text=True), "h200"))
    assert plan["encode_s"] > 0
    assert "4 passes and the context pass" in (shown := show(plan))
    assert "encoding a frame again" in shown


def test_a_chunk_in_parts_has_lost_the_frame_that_is_encoded_again() -> None:
    config = config_of().changed(decode_frames=1)
    with pytest.raises(UsageError, match="leave out --decode-frames"):
        graph_of(config)
    stream = replace(config.workload.stream, window_positions=False, context="pass")
    in_parts = describe(config.changed(stream=stream), export_backend("eager"), (), {})
    assert in_parts.decode_parts == 3
    manifest = describe(config_of(), export_backend("eager"), (), {})
    parts = [
        next(part for part in in_parts.buffers if part.name == buffer.name)
        if buffer.name in (DECODE_LATENTS, "video", "video.first")
        else buffer
        for buffer in manifest.buffers
    ]
    with pytest.raises(ManifestError, match="decoded in one call"):
        resolve_video(replace(manifest, buffers=tuple(parts)))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sink_frames": 0}, "expected 3 sink frames and 3 ring frames, not 0 and 3"),
        ({"ring_frames": 6}, "not 3 and 6"),
        ({"window_positions": False}, "give --window-positions"),
        ({"reference_frames": 1}, "leave out --reference-frames"),
        ({"offload_cache": True}, "leave out --offload-cache"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(changed: dict[str, object], words: str) -> None:
    usual = {"sink_frames": 3, "ring_frames": 3, "window_positions": True, "context": "rebuild"}
    with pytest.raises(UsageError, match=words):
        resolved("tiny", layout={**usual, **changed})
