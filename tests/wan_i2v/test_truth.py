"""Every chunk past the wrap against two truths: a naive model in float64, and diffusers' class with an image branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from scripts.checkpoint_configs import i2v_diffusers_config
from seko_export.families.wan_i2v.family import FAMILY
from seko_export.families.wan_i2v.keys import i2v_shapes
from seko_export.families.wan_layout import picture_branch
from seko_export.families.wan_layout.namings import wan_to_diffusers
from tests.support.tolerances import ORACLE, STEP, relative_error
from tests.truth.eager_stream import random_text
from tests.truth.test_diffusers_oracle import MaskedSelfAttention, full_forward
from tests.wan_i2v.streams import BARE, KINDS, ONE, TWO, Reference, begun, i2v_config, random_checkpoint

CHUNKS, LAST_FRAME = 4, 7  # the cache holds 5 latent frames, a chunk is 2


@pytest.mark.shows("wan_i2v")
@pytest.mark.parametrize(("kind", "layout"), [*((kind, {}) for kind in KINDS), (ONE, {"context": "reuse"})])
def test_every_chunk_is_the_naive_models(
    kind: str, layout: Mapping[str, str], worst: Callable[[str, float], None]
) -> None:
    config = i2v_config(kind, layout=layout)
    checkpoint, text = random_checkpoint(config), random_text(config.model, 1)
    stream = begun(config, checkpoint, text, LAST_FRAME)
    naive = Reference(config, checkpoint, text[0], LAST_FRAME)
    frames = config.workload.stream.chunk_frames
    for number in range(CHUNKS):
        for done in stream.run_chunk([number * frames], [3]):
            if done.velocity is not None:
                error = relative_error(done.velocity[0], naive.velocity(done.latents[0], done.timestep))
                worst(f"image to video, {kind}, against the naive model", error)
                assert error <= STEP[torch.float32]
            if done.kept:
                naive.commit(done.latents[0], done.timestep)
    assert CHUNKS * frames > config.workload.stream.cache_frames + frames


@pytest.mark.shows("flf2v")
def test_a_last_picture_shows_in_its_frame_and_where_that_is_seen() -> None:
    """Without one, chunks in front of its frame are the same."""
    config = i2v_config(TWO)
    checkpoint, text = random_checkpoint(config), random_text(config.model, 1)
    last, frames = 3, config.workload.stream.chunk_frames
    streams = [begun(config, checkpoint, text, frame) for frame in (last, 0)]
    for number in range(2):
        with_last, without_last = (stream.run_chunk([number * frames], [3])[-1].latents for stream in streams)
        assert torch.equal(with_last, without_last) == (number < last // frames)


@pytest.mark.parametrize("kind", [TWO, BARE])
def test_every_chunk_is_diffusers(kind: str, worst: Callable[[str, float], None]) -> None:
    """One masked forward over all frames since the start, with the condition beside the latents.

    diffusers tells text from picture by a text of 512 tokens, and takes the two pictures' features one after the other
    along the batch.
    """
    config = i2v_config(kind, text_tokens=512)
    checkpoint, text = random_checkpoint(config), random_text(config.model, 1)
    oracle = WanTransformer3DModel.from_config(i2v_diffusers_config(config.model)).eval()
    oracle.load_state_dict({wan_to_diffusers(name): checkpoint[name] for name in i2v_shapes(config.model)})
    for block in oracle.blocks:
        block.attn1.set_processor(MaskedSelfAttention())
    stream = begun(config, checkpoint, text, LAST_FRAME)
    condition = Reference(config, checkpoint, text[0], LAST_FRAME)
    features = FAMILY.golden_inputs(config, None).get(picture_branch.FEATURES)
    if features is not None:
        features = features.unflatten(1, (config.model.seen_pictures, -1)).flatten(0, 1)
    s = config.workload.stream
    clean: list[Tensor] = []
    for number in range(CHUNKS):
        passes = stream.run_chunk([number * s.chunk_frames], [3])
        for done in passes[:-1]:
            latents = torch.cat([*clean, done.latents], 2)
            frames = latents.shape[2]
            whole = torch.cat((latents, condition.condition(frames)[None].float()), 1)
            times = torch.zeros(1, frames)
            times[:, -s.chunk_frames :] = done.timestep
            wanted = full_forward(oracle, s, whole, times, text, masked=True, features=features)
            error = relative_error(done.velocity, wanted[:, :, -s.chunk_frames :])
            worst(f"image to video, {kind}, against diffusers", error)
            assert error <= ORACLE[torch.float32], (number, done.timestep)
        clean.append(passes[-1].latents)


def test_the_parts_of_the_model_show() -> None:
    """The branch and the condition change the velocity by far more than the bars above."""
    config = i2v_config(ONE)
    checkpoint, text = random_checkpoint(config), random_text(config.model, 1)
    velocities = []
    for changed in ((), ("input.picture",), ("input.condition",)):
        stream = begun(config, checkpoint, text, LAST_FRAME)
        for name in changed:
            stream.buffers[name].copy_(stream.buffers[name].flip(-1))
        stream.set_text(text)
        velocities.append(stream.run_chunk([0], [3])[0].velocity)
    for other in velocities[1:]:
        assert relative_error(other, velocities[0]) > 0.01
