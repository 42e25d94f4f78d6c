"""Text encoder and VAE as ONNX: each piece, run by onnxruntime, against the eager piece."""

from __future__ import annotations

import pytest
import torch

from seko_export.backends.onnx_form.translate import piece_model
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.wan.presets import PRESETS
from seko_export.lowering.agree import LEVELS, TOLERANCES, random_inputs
from tests.export.media_files import TEXT, VAE
from tests.support.new_thread import in_new_thread
from tests.support.tolerances import relative_error

from . import forms

STREAM = StreamConfig(32, 48, chunk_frames=2, sink_frames=1, ring_frames=3)
CONFIG = VideoBuild(
    PRESETS["tiny"].model,
    VideoConfig(STREAM, Schedule.warped(), "fp32", text=TEXT, vae=VAE),
    TargetConfig("cpu"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["text_start", "text_layer", "text_end", "vae_encode", "vae_decode_first", "vae_decode"]
)
def test_a_media_piece_gives_what_its_module_gives(name: str) -> None:
    piece = make_pieces(CONFIG)[name]
    run = forms.runner(in_new_thread(piece_model, piece))
    inputs = random_inputs(piece, "cpu")
    with torch.no_grad():
        wanted = FlatModule(piece)(*inputs)
    for argument, ours, truth in zip(piece.outputs, run(*inputs), wanted, strict=True):
        assert (ours.shape, ours.dtype) == (truth.shape, truth.dtype), argument.name
        if argument.dtype == torch.uint8:
            assert (ours.double() - truth.double()).square().mean().sqrt() <= LEVELS[torch.float32]
        else:
            assert relative_error(ours, truth) <= TOLERANCES[torch.float32], argument.name
