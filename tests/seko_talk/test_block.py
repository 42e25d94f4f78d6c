"""The transformer with portrait, picture and voices against a whole-sequence reference per pass, past the wrap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from seko_export.errors import UsageError
from seko_export.families.seko_talk import audio
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.seko_talk.keys import TIME
from seko_export.families.seko_talk.presets import evenly
from tests.seko_talk.streams import (
    BUFFERS,
    Reference,
    begun,
    random_checkpoint,
    random_reference,
    talk_config,
)
from tests.support.tiers import first_is_fast
from tests.support.tolerances import ORACLE, relative_error
from tests.truth.eager_stream import random_text

BAR = ORACLE[torch.float32]
CASES = {
    "as LightX2V": ({}, {}),
    "chunk 3, no sink": ({}, {"chunk_frames": 3, "sink_frames": 0, "ring_frames": 5}),
    "hybrid, two voices, the portrait apart": (
        {"layers": 3, "speakers": 2},
        {"layer_rings": (2, 2, 6), "ring_frames": 6, "references_apart": True},
    ),
    "chunk 1": ({}, {"chunk_frames": 1, "ring_frames": 3}),
    "chunk 20, no picture branch": (
        {"image_dim": 0},
        {"height": 16, "width": 32, "chunk_frames": 20, "ring_frames": 20},
    ),
    "hybrid, frames at most 9": (
        {"layers": 3},
        {"layer_rings": (2, 2, 6), "ring_frames": 6, "rope_max_frames": 9},
    ),
}


@pytest.mark.parametrize("case", first_is_fast(CASES, 3))
def test_every_chunk_past_the_wrap_agrees_with_one_forward_a_pass(case, worst):
    model, layout = CASES[case]
    config = talk_config(model=model, layout=layout)
    s, checkpoint, text = config.workload.stream, random_checkpoint(config), random_text(config.model, 1)
    portrait = random_reference(config)
    stream = begun(config, checkpoint, text, portrait)
    reference = Reference(config, checkpoint, text, portrait)
    chunks = s.cache_frames // s.chunk_frames + 3
    for number in range(chunks):
        voices = FAMILY.golden_inputs(config, number)[audio.AUDIO]
        stream.buffers[BUFFERS[audio.AUDIO]].copy_(voices)
        reference.begin(voices)
        for at, done in enumerate(stream.run_chunk([number * s.chunk_frames], [3])):
            error = relative_error(done.velocity[0], reference.velocity(at, done.latents, done.timestep))
            worst(f"seko-talk, {case}", error)
            assert error <= BAR, (number, at)
    assert chunks * s.chunk_frames > s.cache_frames + s.chunk_frames


def test_the_audio_of_each_frame_matters():
    """What the reference above would not see is refuted: voices that are one latent frame late."""
    config = talk_config()
    checkpoint, text, portrait = (
        random_checkpoint(config),
        random_text(config.model, 1),
        random_reference(config),
    )
    stream = begun(config, checkpoint, text, portrait)
    voices = FAMILY.golden_inputs(config, 0)[audio.AUDIO]
    stream.buffers[BUFFERS[audio.AUDIO]].copy_(voices)
    done = stream.run_chunk([0], [3])[0]
    for shift, agrees in ((0, True), (1, False), (-1, False)):
        reference = Reference(config, checkpoint, text, portrait)
        reference.begin(voices.roll(shift, 2))
        error = relative_error(done.velocity[0], reference.velocity(0, done.latents, done.timestep))
        assert (error <= BAR) == agrees
        assert agrees or error > 1000 * BAR


@pytest.mark.parametrize(
    ("layout", "other", "agreed"),
    [
        # The newest frame may be one later: equal until then.
        ({"rope_max_frames": 6}, {"rope_max_frames": 7}, 3),
        # The portrait is one frame further from all others.
        ({"references_apart": True}, {"references_apart": False}, 0),
    ],
)
def test_positions_matter(layout: Mapping[str, Any], other: Mapping[str, Any], agreed: int) -> None:
    """A reference with other positions agrees for as many chunks as they are the same, and not from there on."""
    config = talk_config(layout=layout)
    checkpoint, text, portrait = (
        random_checkpoint(config),
        random_text(config.model, 1),
        random_reference(config),
    )
    stream = begun(config, checkpoint, text, portrait)
    odd = config.changed(stream=replace(config.workload.stream, **other))
    reference = Reference(odd, checkpoint, text, portrait)
    errors = []
    for number in range(4):
        voices = FAMILY.golden_inputs(config, number)[audio.AUDIO]
        stream.buffers[BUFFERS[audio.AUDIO]].copy_(voices)
        reference.begin(voices)
        done = stream.run_chunk([number * 2], [3])
        errors.append(
            relative_error(done[0].velocity[0], reference.velocity(0, done[0].latents, done[0].timestep))
        )
    assert all((error <= BAR) == (number < agreed) for number, error in enumerate(errors))
    assert errors[agreed] > 100 * BAR


def test_the_adapters_times_are_those_of_diffusers(worst) -> None:
    """Cosines, then sines, of 937.5 and the like; two linear layers; shift, scale and gate for each pass."""
    embeddings = pytest.importorskip("diffusers.models.embeddings", reason="diffusers is not installed")
    config = talk_config()
    m, times, checkpoint = config.model, evenly(4).timesteps, random_checkpoint(config)
    assert times == pytest.approx((1000, 937.5, 2500 / 3, 625))
    embed = embeddings.TimestepEmbedding(m.audio_freq_dim, m.dim)
    embed.load_state_dict(
        {
            name.removeprefix(f"{TIME}."): tensor
            for name, tensor in checkpoint.items()
            if name.startswith(f"{TIME}.linear")
        }
    )
    waves = embeddings.Timesteps(m.audio_freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
    with torch.no_grad():
        inner = torch.nn.functional.silu(embed(waves(torch.tensor(times))))
    weight, bias = (checkpoint[f"{TIME}.time_proj.{leaf}"] for leaf in ("weight", "bias"))
    wanted = torch.nn.functional.linear(inner, weight, bias).unflatten(-1, (3, m.dim))
    error = relative_error(audio.time_table(checkpoint, m, times, torch.float32), wanted)
    worst("the adapter's times", error)
    assert error <= BAR


def test_positions_that_cannot_be_are_refused() -> None:
    for odd, message in (
        ({"rope_max_frames": 6, "window_positions": False}, "give --window-positions beside it"),
        ({"rope_max_frames": 4}, "below the 5 latent frames of sink and ring"),
        ({"references_apart": True, "rope_max_frames": 6}, "and no --rope-max-frames"),
        (
            {"references_apart": True, "reference_frames": 0},
            "give --window-positions and --reference-frames 1",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            talk_config(layout=odd)
