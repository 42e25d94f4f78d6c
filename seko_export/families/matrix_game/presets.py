"""Presets of Matrix-Game 2.0's distilled models, and tiny ones for tests."""

from __future__ import annotations

from dataclasses import replace

from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.matrix_game.model import MatrixGameModel
from seko_export.families.video import FOR_TESTS, Preset

UNIVERSAL, GTA, TEMPLE_RUN = "matrix-game-2-universal", "matrix-game-2-gta", "matrix-game-2-templerun"
TINY, TINY_GTA, TINY_TEMPLE_RUN = "matrix-game-tiny", "matrix-game-tiny-gta", "matrix-game-tiny-templerun"
SHIFT = 5.0
THREE, FOUR = (
    Schedule.warped(steps, SHIFT) for steps in ((1000.0, 666.0, 333.0), (1000.0, 750.0, 500.0, 250.0))
)
_SOURCE = "Skywork/Matrix-Game-2.0 (MIT); numbers of a copy of its code, and of LightX2V"
_NEEDS = (
    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth of the same folder for --image-encoder, and its "
    "Wan2.1_VAE.pth for --vae"
)
_UNVERIFIED = (
    "no file was opened; whether the stored norms of the action modules' queries and keys are all 1 (the authors' code "
    "does not multiply by them)"
)
_MODEL = MatrixGameModel(name=UNIVERSAL, layers=30, dim=1536, heads=12, ffn_dim=8960)
# 12 is the rate of the authors' files.
_STREAM = StreamConfig(height=352, width=640, chunk_frames=3, sink_frames=0, ring_frames=6, fps=12)
_TINY = MatrixGameModel(
    name=TINY,
    layers=2,
    dim=128,
    heads=2,
    ffn_dim=192,
    freq_dim=64,
    image_dim=32,
    image_tokens=5,
    action_layers=1,
    action_heads=2,
    keyboard_width=8,
)
_TINY_STREAM = replace(_STREAM, height=32, width=48)


def _of_game(model: MatrixGameModel, name: str, keyboard: int, *, mouse: bool) -> MatrixGameModel:
    return replace(model, name=name, keyboard=keyboard, mouse=mouse)


PRESETS: dict[str, Preset] = {
    UNIVERSAL: Preset(
        _MODEL,
        _STREAM,
        THREE,
        files=("base_distilled_model/base_distill.safetensors",),
        source=_SOURCE,
        needs=_NEEDS,
        unverified=_UNVERIFIED,
    ),
    GTA: Preset(
        _of_game(_MODEL, GTA, 2, mouse=True),
        replace(_STREAM, ring_frames=4),
        THREE,
        files=("gta_distilled_model/gta_keyboard2dim.safetensors",),
        source=_SOURCE,
        needs=_NEEDS,
        unverified=f"{_UNVERIFIED}; the ring of 4, as the authors' file has it, where LightX2V's has 6",
    ),
    TEMPLE_RUN: Preset(
        _of_game(_MODEL, TEMPLE_RUN, 7, mouse=False),
        _STREAM,
        FOUR,
        files=("templerun_distilled_model/templerun_7dim_onlykey.safetensors",),
        source=_SOURCE,
        needs=_NEEDS,
        unverified=_UNVERIFIED,
    ),
    TINY: Preset(_TINY, _TINY_STREAM, THREE, source=FOR_TESTS),
    TINY_GTA: Preset(
        _of_game(_TINY, TINY_GTA, 2, mouse=True),
        replace(_TINY_STREAM, ring_frames=4),
        THREE,
        source=FOR_TESTS,
    ),
    TINY_TEMPLE_RUN: Preset(
        _of_game(_TINY, TINY_TEMPLE_RUN, 7, mouse=False), _TINY_STREAM, FOUR, source=FOR_TESTS
    ),
}
