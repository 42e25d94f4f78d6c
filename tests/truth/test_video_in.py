"""An input video: encoded chunk by chunk, mixed with noise, denoised at scaled times; against loops written out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from scripts.random_vae import tiny_spread
from seko_export.checkpoints.random import random_weight
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.families.base import MediaTensors
from seko_export.families.layers.weights import model_weights
from seko_export.families.registry import graph_of
from seko_export.media.taehv.config import TaehvConfig
from seko_export.media.taehv.vae import decoder_shapes, encoder_shapes
from seko_export.media.wan_vae.keys import vae_diffusers_names
from seko_export.media.wan_vae.modules import VaeTensors
from seko_runtime.errors import DeviceMemoryError, TornStreamError
from seko_runtime.video.device import VideoDevice
from tests.export.vae_oracle import SMALL, SMALL_2_2, VaeOracle
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import STREAM, VAE, relative_error
from tests.truth.eager_stream import random_text, random_wan_weights, small_config
from tests.truth.naive_loop import NaiveLoop
from tests.truth.naive_taehv import encoded as naive_encoded
from tests.truth.test_chunk_passes import described

SEED, LEVELS = 5, 255
TIMES = (1000.0, 937.5, 2500.0 / 3, 625.0)  # Self-Forcing's, warped with shift 5


@pytest.fixture(scope="module")
def oracle() -> VaeOracle:
    return VaeOracle(torch.float32)


@pytest.fixture(scope="module")
def exact() -> VaeOracle:
    return VaeOracle(torch.float64)


def config_of(
    strength: float | None = 0.6, chunk: int = 2, sink: int = 2, ring: int = 4, **more
) -> VideoBuild:
    config = small_config(chunk, sink, ring, **more)
    stream = replace(config.workload.stream, height=32, width=48, strength=strength)
    return config.changed(stream=stream, schedule=Schedule(TIMES), vae=SMALL)


def weights_of(config: VideoBuild, wan: Mapping[str, Tensor], oracle: VaeOracle) -> dict[str, Tensor]:
    names, theirs = vae_diffusers_names(oracle.config), oracle.vae.state_dict()
    vae = VaeTensors({ours: theirs[name] for ours, name in names.items() if name in theirs}, oracle.config)
    weights = dict(model_weights(graph_of(config).pieces, wan, MediaTensors(vae=vae)))
    return weights | config.workload.schedule.tables(config.as_batch.workload.stream)


def video_of(stream: StreamConfig, chunks: int, seed: int = 0) -> NDArray[np.uint8]:
    """A video of so many chunks, [T, H, W, 3], smooth in space and moving."""
    frames = 1 + 4 * (chunks * stream.chunk_frames - 1)
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, frames, 4, 6, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, (frames, stream.height, stream.width), mode="trilinear")
    return (fine[0].permute(1, 2, 3, 0) * LEVELS).to(torch.uint8).numpy()


def cut(video: NDArray[np.uint8], stream: StreamConfig) -> list[NDArray[np.uint8]]:
    """The video as the input of each chunk, [4F, H, W, 3]; the first chunk's array begins with frames that are not
    read."""
    each = 4 * stream.chunk_frames
    padded = np.concatenate((np.full((3, *video.shape[1:]), 77, np.uint8), video))
    return [padded[at : at + each] for at in range(0, len(padded), each)]


def inputs_of(frames: NDArray[np.uint8], strength: float) -> dict[str, NDArray]:
    level = np.array([strength], np.float32)
    return {"video": frames, "strength": level, "time_scale": level.repeat(2)}


def encoded(video: NDArray[np.uint8], oracle: VaeOracle) -> Tensor:
    """Latents [C, F, h, w] of the whole video at once, by diffusers."""
    pixels = torch.from_numpy(video).permute(3, 0, 1, 2)[None].to(oracle.dtype) / (LEVELS / 2) - 1
    return oracle.encode(pixels)[0]


class VideoLoop(NaiveLoop):
    """The loop from the facts: each chunk begins between the video's latents and noise."""

    def turned(self, chunk: int, latents: Tensor, strength: float, times: Sequence[float]) -> Tensor:
        """Return the latents [C, F, h, w] of a chunk: all times and levels are those of the schedule times the
        strength."""
        first = chunk * self.stream.chunk_frames
        own = latents[:, first : first + self.stream.chunk_frames]
        x = (1 - strength) * own + strength * self.noise(chunk, 0)
        for at, time in enumerate(times):
            clean = x - strength * time / 1000 * self.dit.step(x, strength * time, first, commit=False)
            after = strength * times[at + 1] / 1000 if at + 1 < len(times) else 0.0
            x = (1 - after) * clean + after * self.noise(chunk, at + 1)
        self.dit.step(x, 0.0, first, commit=True)
        return x


@pytest.mark.parametrize("latents_of", ["Wan 2.1", "Wan 2.2"])
def test_chunks_are_those_of_a_loop_written_out(latents_of, oracle, exact, worst):
    """The video is encoded in calls of a chunk, there at once; strengths change from chunk to chunk."""
    config = config_of()
    if latents_of == "Wan 2.2":
        oracle, exact = VaeOracle(torch.float32, SMALL_2_2), VaeOracle(torch.float64, SMALL_2_2)
        model = replace(config.model, in_channels=48, out_channels=48)
        stream = replace(config.workload.stream, height=64, width=96, spatial_stride=16)
        config = replace(config, model=model, workload=replace(config.workload, stream=stream, vae=SMALL_2_2))
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    strengths = [0.6, 0.3, 1.0, 0.0, 0.8]
    if latents_of == "Wan 2.2":
        strengths = strengths[:2]  # its encoder is the difference
    video = video_of(config.workload.stream, len(strengths))
    naive, latents = VideoLoop(config, wan, text[0], SEED), encoded(video, exact)
    with eager_session(config, weights_of(config, wan, oracle), text, [SEED]) as session:
        for chunk, (frames, strength) in enumerate(
            zip(cut(video, config.workload.stream), strengths, strict=True)
        ):
            made = torch.from_numpy(session.run_chunk(inputs_of(frames, strength)).to_host())[0]
            error = relative_error(made, naive.turned(chunk, latents, strength, TIMES))
            worst("chunks of an input video", error)
            assert error <= STREAM[torch.float32], chunk


def test_strength_0_returns_the_video_within_the_vaes_error(oracle, worst):
    config = config_of(strength=0.0)
    text = random_text(config.model, 1)
    video = video_of(config.workload.stream, 2)
    latents = encoded(video, oracle)
    decoded = oracle.decode(latents[None])[0].permute(1, 2, 3, 0)  # what the VAE itself makes of the video
    weights = weights_of(config, random_wan_weights(config.model), oracle)
    with eager_session(config, weights, text, [SEED]) as session:
        chunks = [session.run_chunk(inputs_of(frames, 0.0)) for frames in cut(video, config.workload.stream)]
        made = [torch.from_numpy(chunk.to_host())[0] for chunk in chunks[-1:]]
        shown = chunks[-1].video()[0]
    error = relative_error(made[-1], latents[:, -config.workload.stream.chunk_frames :])
    worst("strength 0 against the encoder", error)
    assert error <= VAE[torch.float32] * 5
    levels = ((decoded.clamp(-1, 1) + 1) * (LEVELS / 2)).round()[-len(shown) :]
    assert np.abs(shown.astype(int) - levels.numpy().astype(int)).max() <= 1


def test_strength_1_is_text_to_video_whatever_the_frames(oracle):
    """The same bytes as an artifact without an input video makes of the same noise."""
    config = config_of()
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    plain = config_of(strength=None)
    with eager_session(plain, weights_of(plain, wan, oracle), text, [SEED]) as session:
        wanted = [session.run_chunk().to_host() for _ in range(2)]
    for seed in (1, 2):
        frames = cut(video_of(config.workload.stream, 2, seed), config.workload.stream)
        with eager_session(config, weights_of(config, wan, oracle), text, [SEED]) as session:
            made = [session.run_chunk(inputs_of(own, 1.0)).to_host() for own in frames]
        assert all(np.array_equal(*pair) for pair in zip(made, wanted, strict=True))


def test_rows_of_a_pool_are_at_chunks_and_strengths_of_their_own(oracle, tmp_path):
    """A session that joins another one's calls, pauses and restarts gets the bytes that it gets alone."""
    config = config_of().changed(pool=PoolConfig(3, (2,)))
    weights = weights_of(config, random_wan_weights(config.model), oracle)
    text = random_text(config.model, 1).numpy()
    early, late = (cut(video_of(config.workload.stream, 5, seed), config.workload.stream) for seed in (1, 2))
    alone = {}
    for strength, frames in ((0.7, early), (0.4, late[:1])):
        with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as session:
            alone[strength] = [session.run_chunk(inputs_of(own, strength)).to_host() for own in frames]
    with eager_pool(config, weights) as pool:
        one, two = pool.open_session(seed=SEED, text=text), pool.open_session(seed=SEED, text=text)
        first = [one.run_chunk(inputs_of(early[at], 0.7)).to_host() for at in range(2)]
        both = [
            pool.run([one, two], [inputs_of(early[at + 2], 0.7), inputs_of(late[at], 0.4)]) for at in range(1)
        ]
        pairs = [[chunk.to_host() for chunk in pair] for pair in both]
        one.pause()
        two.run_chunk(inputs_of(late[1], 0.4))
        one.resume()
        three = [one.run_chunk(inputs_of(early[3], 0.7)).to_host()]
        one.save(tmp_path / "one")
        one.close()
        with pool.restore(tmp_path / "one") as again:
            three.append(again.run_chunk(inputs_of(early[4], 0.7)).to_host())
        two.restart()
        anew = two.run_chunk(inputs_of(late[0], 0.4)).to_host()
        two.close()
    made = [*first, pairs[0][0], *three]
    assert all(np.array_equal(*pair) for pair in zip(made, alone[0.7], strict=True))
    assert np.array_equal(pairs[0][1], alone[0.4][0])
    assert np.array_equal(anew, alone[0.4][0])


def test_a_call_that_fails_encodes_its_frames_once(oracle, monkeypatch):
    """The encoder has gone on when a chunk fails: the same call again gives the same bytes, other frames are refused,
    and so is a snapshot, until the session restarts."""
    config = config_of().changed(pool=PoolConfig(2, (1,)))
    weights = weights_of(config, random_wan_weights(config.model), oracle)
    text = random_text(config.model, 1).numpy()
    frames = cut(video_of(config.workload.stream, 3), config.workload.stream)
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as session:
        wanted = [session.run_chunk(inputs_of(own, 0.5)).to_host() for own in frames]
    run_chunk, failing = VideoDevice.run_chunk, [False]

    def at_times(*arguments: Any) -> int:
        if failing[0]:
            raise DeviceMemoryError("none is left")
        return run_chunk(*arguments)

    monkeypatch.setattr(VideoDevice, "run_chunk", at_times)
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as session:
        for own, made in zip(frames[:2], wanted, strict=False):
            failing[0] = True
            with pytest.raises(DeviceMemoryError):
                session.run_chunk(inputs_of(own, 0.5))
            failing[0] = False
            with pytest.raises(TornStreamError, match="was encoded before its call failed"):
                session.run_chunk(inputs_of(255 - own, 0.5))
            with pytest.raises(TornStreamError, match="was encoded before its call failed"):
                session.snapshot()
            assert np.array_equal(session.run_chunk(inputs_of(own, 0.5)).to_host(), made)
        failing[0] = True
        with pytest.raises(DeviceMemoryError):
            session.run_chunk(inputs_of(frames[2], 0.5))
        failing[0] = False
        session.restart()
        assert np.array_equal(session.run_chunk(inputs_of(frames[0], 0.5)).to_host(), wanted[0])


def test_a_tiny_codec_encodes_the_video_alone(worst):
    """Without a whole VAE; strength 0 leaves what its encoder makes of the whole video, one frame after another."""
    tiny = TaehvConfig(16, (8, 6, 4, 4), encoder_width=8)
    config = config_of(strength=0.0).changed(vae=tiny)
    shapes = {**decoder_shapes(tiny), **encoder_shapes(tiny)}
    codec = {
        name: random_weight(name, shape, seed=3, dtype=torch.float32, spread=tiny_spread)
        for name, shape in shapes.items()
    }
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    weights = dict(model_weights(graph_of(config).pieces, wan, MediaTensors(vae=codec)))
    weights |= config.workload.schedule.tables(config.as_batch.workload.stream)
    video = video_of(config.workload.stream, 2)
    whole = torch.from_numpy(np.concatenate((video[:1].repeat(3, 0), video))).permute(0, 3, 1, 2) / LEVELS
    expected = naive_encoded(codec, whole, 1)
    with eager_session(config, weights, text, [SEED]) as session:
        chunks = [session.run_chunk(inputs_of(own, 0.0)) for own in cut(video, config.workload.stream)]
        made = torch.from_numpy(chunks[-1].to_host())[0]
    error = relative_error(made, expected[:, -config.workload.stream.chunk_frames :])
    worst("strength 0, tiny codec", error)
    assert error <= VAE[torch.float32]


# -- StreamDiffusionV2 --------------------------------------------------------------------------------------------

TWO = (700.0, 500.0)


def table_level(time: float, shift: float = 8.0) -> float:
    """The noise level of the training time that is nearest to a time."""
    parts = np.arange(1, 1001) / 1000
    levels = shift * parts / (1 + (shift - 1) * parts)
    return float(levels[np.abs(1000 * levels - time).argmin()])


class MotionLoop:
    """The loop of the facts: a cache for each pass, no context pass, and a first pass at int(1000 * level) - 100."""

    def __init__(
        self, config: VideoBuild, wan: Mapping[str, Tensor], text: Tensor, seed: int, level: float
    ) -> None:
        self.passes = [NaiveLoop(config, wan, text, seed) for _ in TWO]
        self.start = self.level = level

    def turned(self, chunk: int, raw: Tensor, frames: NDArray[np.uint8]) -> Tensor:
        """Return the latents of a chunk of one latent frame; ``frames`` are its video frames and the one before."""
        pixels = frames.astype(np.float64) / (LEVELS / 2) - 1
        changes = [float(np.sqrt(np.mean((b - a) ** 2))) for a, b in itertools.pairwise(pixels)]
        motion = min(1.0, max([0.0, *changes]) / 0.2)
        self.level = 0.9 * (self.start - 0.1 * motion) + 0.1 * self.level
        times = [int(1000 * self.level) - 100, TWO[1]]
        noise = self.passes[0].noise
        x = (1 - self.level) * raw[:, chunk : chunk + 1] + self.level * noise(chunk, 0)
        for at, (loop, time) in enumerate(zip(self.passes, times, strict=True)):
            clean = x - table_level(time) * loop.dit.step(x, time, chunk, commit=True)
            after = table_level(times[1]) if at == 0 else 0.0
            x = (1 - after) * clean + after * noise(chunk, at + 1)
        return x


def motion_config() -> VideoBuild:
    config = config_of(strength=0.8, chunk=1, sink=2, ring=3)
    stream = replace(config.workload.stream, motion_strength=True, pass_caches=True)
    return config.changed(stream=stream, schedule=Schedule.trained(TWO, 8.0))


@pytest.mark.shows("streamdiffusion-v2")
def test_streamdiffusion_v2_is_the_loop_of_its_facts(oracle, exact, worst):
    """Latents come un-normalised from the encoder, the level follows the motion, each pass has a cache: past the
    wrap. The control gives the numbers."""
    config = motion_config()
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    video = video_of(config.workload.stream, 7)
    video[17:25] = video[17]  # a part without motion
    mean, std = (value.view(-1, 1, 1, 1) for value in (exact.mean, exact.std))
    raw = encoded(video, exact) * std + mean
    naive = MotionLoop(config, wan, text[0], SEED, 0.8)
    (spec,) = (c for c in described(config).control_specs if c.kind == "video_in")
    with eager_session(config, weights_of(config, wan, oracle), text, [SEED]) as session:
        control = session.sessions[0].controls[spec.name]
        levels = []
        for chunk in range(7):
            own = video[max(0, 4 * chunk - 4) : 4 * chunk + 1]  # and the frame before
            control.take({"frame": own[-4:] if chunk else own})
            made = torch.from_numpy(session.run_chunk().to_host())[0]
            error = relative_error(made, naive.turned(chunk, raw, own))
            levels.append(naive.level)
            worst("StreamDiffusionV2", error)
            assert error <= STREAM[torch.float32], chunk
    assert max(levels) - min(levels) > 0.01  # the controller has moved


def test_one_cache_for_both_passes_is_another_model(oracle):
    """The authors' modes `single` and `single-wo` differ: only the first has a cache for each pass."""
    config = motion_config()
    single = config.changed(stream=replace(config.workload.stream, pass_caches=False))
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    made = []
    for each in (config, single):
        frames = cut(video_of(each.workload.stream, 2), each.workload.stream)
        with eager_session(each, weights_of(each, wan, oracle), text, [SEED]) as session:
            made.append([session.run_chunk(inputs_of(own, 0.8)).to_host() for own in frames])
    assert np.array_equal(made[0][0], made[1][0])  # a first chunk reads no cache
    assert not np.allclose(made[0][1], made[1][1], atol=1e-3)
