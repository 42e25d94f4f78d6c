"""A cache that is made again before each chunk has each chunk under its own cameras: against a loop written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seko_export.config.schedule import Schedule
from seko_export.config.video import VideoBuild
from seko_export.families.base import MediaTensors
from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.layers.sampler import gaussian
from seko_export.families.minwm.family import FAMILY
from seko_export.media.wan_vae.keys import vae_diffusers_names
from seko_export.media.wan_vae.modules import VaeTensors
from tests.export.vae_oracle import SMALL, VaeOracle
from tests.minwm.streams import PRESET, cameras_of, minwm_config, random_checkpoint
from tests.support.stacked import eager_session
from tests.support.tolerances import STREAM, relative_error
from tests.truth.eager_stream import random_text
from tests.truth.naive_minwm import NaiveMinwm, camera_matrix

SEED, TIMES = 5, (1000.0, 700.0)
CHUNK = PRESET.stream.chunk_frames


def rebuilt_config() -> VideoBuild:
    layout = {
        "sink_frames": CHUNK, "ring_frames": CHUNK, "window_positions": True, "context": "rebuild",
    }  # fmt: skip
    return minwm_config(layout=layout, vae=SMALL, schedule=Schedule(TIMES))


def weights_of(config: VideoBuild, oracle: VaeOracle) -> dict[str, Tensor]:
    names, theirs = vae_diffusers_names(oracle.config), oracle.vae.state_dict()
    vae = VaeTensors({ours: theirs[name] for ours, name in names.items() if name in theirs}, oracle.config)
    pieces = FAMILY.graph(config).pieces
    weights = dict(FAMILY.weights(pieces, random_checkpoint(), MediaTensors(vae=vae)))
    return weights | config.workload.schedule.tables(config.as_batch.workload.stream)


def matrices_of(config: VideoBuild, chunk: int) -> list[np.ndarray]:
    s, cameras = config.workload.stream, cameras_of(config, chunk)
    return [
        camera_matrix(pose.numpy(), float(lens[0]) / s.width, float(lens[1]) / s.height)
        for pose, lens in zip(cameras[POSES][0], cameras[INTRINSICS][0], strict=True)
    ]


def encoded(picture: NDArray[np.uint8], oracle: VaeOracle) -> Tensor:
    """Latents [C, h, w] of a picture [H, W, 3]."""
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, :, None].to(oracle.dtype) / 127.5 - 1
    return oracle.encode(pixels)[0, :, 0]


def naive_chunk(naive: NaiveMinwm, config: VideoBuild, number: int, context: Tensor | None) -> Tensor:
    """The latents [C, F, h, w] of a chunk behind its context: the chunk before, under the cameras that it had."""
    s, shape = config.workload.stream, config.model.out_channels
    naive.ordinary = [[] for _ in naive.ordinary]
    naive.camera = [[] for _ in naive.camera]
    if context is not None:
        naive.step(context, 0.0, 0, matrices_of(config, number - 1), commit=True)
    frames = torch.arange(number * CHUNK, (number + 1) * CHUNK)[None]

    def noise(draw: int) -> Tensor:
        size = (shape, s.latent_height, s.latent_width)
        return gaussian(torch.tensor([SEED]), frames, torch.tensor([draw]), size)[0].double()

    x = noise(0)
    for at, time in enumerate(TIMES):
        first = 0 if context is None else CHUNK
        clean = x - time / 1000 * naive.step(x, time, first, matrices_of(config, number))
        after = TIMES[at + 1] / 1000 if at + 1 < len(TIMES) else 0.0
        x = (1 - after) * clean + after * noise(at + 1)
    return x


def test_the_context_of_a_chunk_is_seen_by_its_own_cameras(worst: Callable[[str, float], None]) -> None:
    config, oracle = rebuilt_config(), VaeOracle(torch.float32)
    text, exact = random_text(config.model, 1), VaeOracle(torch.float64)
    naive = NaiveMinwm(random_checkpoint(), PRESET.model.heads, 2 * CHUNK, text[0])
    context: Tensor | None = None
    with eager_session(config, weights_of(config, oracle), text, [SEED]) as session:
        for number in range(4):
            inputs: dict[str, Any] = {name: each.numpy() for name, each in cameras_of(config, number).items()}
            made = session.run_chunk(inputs)
            latents = torch.from_numpy(made.to_host())[0]
            error = relative_error(latents, naive_chunk(naive, config, number, context))
            worst("minwm, a cache made again", error)
            assert error <= STREAM[torch.float32], number
            context = latents.double()
            if number:
                # the last video frame of the chunk's first latent frame
                context[:, 0] = encoded(made.video()[0][-1 - 4 * (CHUNK - 1)], exact)
