"""The transformer with its camera and condition against a whole-sequence reference, past the wrap."""

from __future__ import annotations

import pytest
import torch

from seko_export.families.layers.fused_block import set_fp8
from seko_export.families.lingbot.camera import TOKENS, CameraInLayer, ScaleShift
from seko_kernels.matmul import quantise_weight
from tests.lingbot.streams import INPUTS, Reference, given_of, lingbot_config, random_checkpoint
from tests.support.tolerances import FP8_MATMULS_PASS, ORACLE, relative_error
from tests.truth.eager_stream import EagerStream, random_text

BAR = ORACLE[torch.float32]


@pytest.mark.parametrize("how", ["chunk", "pass", "none"])
@pytest.mark.parametrize(
    "layout", [{}, {"chunk_frames": 3, "sink_frames": 0, "ring_frames": 6}, {"context": "reuse"}]
)
def test_every_chunk_past_the_wrap_agrees_with_one_masked_forward(how, layout, worst):
    config = lingbot_config(how=how, layout=layout)
    s, checkpoint, text = config.workload.stream, random_checkpoint(), random_text(config.model, 1)
    stream = EagerStream(config, checkpoint, text)
    table = given_of(config, None)["condition"]
    stream.buffers[INPUTS["condition"]].copy_(table)
    reference = Reference(config, checkpoint, text[0], table[0])
    chunks = s.cache_frames // s.chunk_frames + 3
    for number in range(chunks):
        inputs = given_of(config, number)
        for name, value in inputs.items():
            stream.buffers[INPUTS[name]].copy_(value)
        reference.begin({name: value[0] for name, value in inputs.items()})
        passes = stream.run_chunk([number * s.chunk_frames], [3])
        # The first and last pass alone: a masked forward over the whole stream is slow.
        for done in (passes[0], [done for done in passes if done.velocity is not None][-1]):
            error = relative_error(done.velocity[0], reference.velocity(done.latents[0], done.timestep))
            worst(f"lingbot, camera {how}", error)
            assert error <= BAR, (number, done.timestep)
        reference.commit(passes[-1].latents[0], passes[-1].timestep)
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


@pytest.mark.parametrize("how", ["chunk", "pass"])
@pytest.mark.parametrize("excepted", [(), (1,)])
def test_the_cameras_matmuls_are_fp8_as_the_layers_are(how, excepted):
    """Once a chunk, one engine serves all layers: a layer that is excepted keeps the whole camera as it was."""
    config = lingbot_config("fp4", how=how)
    config = config.changed(fused=True, attention="fp8", fp8=True, fp8_except=excepted)
    stream = EagerStream(config, random_checkpoint(), random_text(config.model, 1))
    part = "injection" if how == "chunk" else "after_attention"
    for name in ScaleShift.fp8_linears:
        for layer in range(config.model.layers):
            fp8 = layer not in excepted if how == "pass" else not excepted
            assert (f"blocks.{layer}.{part}.{name}.weight_fp8" in stream.weights) == fp8
            assert (f"blocks.{layer}.{part}.{name}.weight" in stream.weights) != fp8


@pytest.mark.parametrize("name", ScaleShift.fp8_linears)
def test_a_hidden_state_steered_in_fp8_is_the_one_of_bfloat16(name, worst):
    """And one matrix whose scales are twice too large is seen."""
    model, generator = lingbot_config().model, torch.Generator().manual_seed(5)
    plain, ours = (CameraInLayer(model, torch.bfloat16).requires_grad_(False) for _ in range(2))
    set_fp8(ours)
    checkpoint = random_checkpoint()
    for part, layer in plain.named_children():
        layer.weight.copy_(checkpoint[f"blocks.0.{part}.weight"])
        layer.bias.copy_(checkpoint[f"blocks.0.{part}.bias"])
        steered = ours.get_submodule(part).requires_grad_(False)
        steered.bias.copy_(layer.bias)
        values, scale = quantise_weight(layer.weight)
        steered.weight_fp8.copy_(values)
        steered.weight_scale.copy_(scale)
    hidden, tokens = (torch.randn(2, 24, model.dim, generator=generator) for _ in range(2))
    inputs = {TOKENS: tokens.bfloat16()}
    wanted = plain(hidden, inputs)
    error = relative_error(ours(hidden, inputs), wanted)
    worst("lingbot, a hidden state steered in fp8", error)
    assert 0 < error <= FP8_MATMULS_PASS
    ours.get_submodule(name).weight_scale.mul_(2)
    assert relative_error(ours(hidden, inputs), wanted) > FP8_MATMULS_PASS
