"""The transformer with its camera and condition against a whole-sequence reference, past the wrap."""

from __future__ import annotations

import pytest
import torch

from tests.lingbot.streams import INPUTS, Reference, given_of, lingbot_config, random_checkpoint
from tests.tolerances import ORACLE, relative_error
from tests.truth.eager_stream import EagerStream, random_text

BAR = ORACLE[torch.float32]


@pytest.mark.parametrize("how", ["chunk", "pass", "none"])
@pytest.mark.parametrize("layout", [{}, {"chunk_frames": 3, "sink_frames": 0, "ring_frames": 6}])
def test_every_chunk_past_the_wrap_agrees_with_one_masked_forward(how, layout, worst):
    config = lingbot_config(how=how, layout=layout)
    s, checkpoint, text = config.stream, random_checkpoint(), random_text(config.model, 1)
    stream = EagerStream(config, checkpoint, text)
    table = given_of(config, None)["condition"]
    stream.buffers[INPUTS["condition"]].copy_(table)
    reference = Reference(config, checkpoint, text[0], table[0])
    chunks = s.cache_frames // s.chunk_frames + 3
    for number in range(chunks):
        given = given_of(config, number)
        for name, value in given.items():
            stream.buffers[INPUTS[name]].copy_(value)
        reference.begin({name: value[0] for name, value in given.items()})
        passes = stream.run_chunk([number * s.chunk_frames], [3])
        # The first and last pass alone: a masked forward over the whole stream is slow.
        for done in (passes[0], passes[-2]):
            error = relative_error(done.velocity[0], reference.velocity(done.latents[0], done.timestep))
            worst(f"lingbot, camera {how}", error)
            assert error <= BAR, (number, done.timestep)
        reference.commit(passes[-1].latents[0])
    assert chunks * s.chunk_frames > s.cache_frames + s.chunk_frames


def test_the_camera_of_each_chunk_matters():
    """What the reference above would not see is refuted: another camera, none, and that of the chunk before."""
    config = lingbot_config()
    checkpoint, text = random_checkpoint(), random_text(config.model, 1)
    table = given_of(config, None)["condition"]
    stream = EagerStream(config, checkpoint, text)
    stream.buffers[INPUTS["condition"]].copy_(table)
    for name, value in given_of(config, 0).items():
        stream.buffers[INPUTS[name]].copy_(value)
    done = stream.run_chunk([0], [3])[0]
    for other in (lingbot_config(how="none"), lingbot_config()):
        reference = Reference(other, checkpoint, text[0], table[0])
        reference.begin({name: value[0] for name, value in given_of(config, 1).items()})
        error = relative_error(done.velocity[0], reference.velocity(done.latents[0], done.timestep))
        assert error > 1000 * BAR
