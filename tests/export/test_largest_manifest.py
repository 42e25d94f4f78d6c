"""The largest artifact that we have in mind needs at most a tenth of every budget of the runtime's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from seko_export.artifact.describe import describe
from seko_export.artifact.manifest_json import manifest_json
from seko_export.backends import export_backend
from seko_export.config.media import TextEncoderConfig
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import dtype_name
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.wan.presets import PRESETS
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_runtime.format import budgets, json_fields
from seko_runtime.format.manifest import FileEntry, Weight
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest

SHARD_BYTES = 256 << 20
FIVE = Schedule.warped((1000.0, 800.0, 600.0, 400.0, 200.0))


def largest() -> VideoBuild:
    """Wan 14B, text encoder and VAE: 5 passes with a cache each, four sizes of calls, two kinds of rings."""
    preset = PRESETS["wan-14b"]
    stream = replace(preset.stream, sink_frames=3, pass_caches=True, layer_rings=(6, 21))
    pool = PoolConfig(64, (1, 2, 4, 8))
    video = VideoConfig(stream, FIVE, "fp4", text=TextEncoderConfig(), vae=WanVaeConfig(), pool=pool)
    return VideoBuild(preset.model, video, TargetConfig("cuda", fused=True, fp8=True, fp8_except=(0, 39)))


def described(config: VideoBuild) -> VideoManifest:
    """The manifest of a build, its weights laid into shards as a build does."""
    weights: dict[str, Weight] = {}
    for piece in make_pieces(config).values():
        for layer in piece.served or (0,):
            for argument in piece.signature:
                if not argument.ref.startswith("weight:"):
                    continue
                name, indexed, _ = (
                    argument.ref.removeprefix("weight:").replace("{layer}", str(layer)).partition("[")
                )
                if name in weights:
                    continue
                passes = len(config.workload.schedule.timesteps) + (name == "schedule.timestep")
                rows = (
                    (config.workload.call_rows, *argument.shape[1:])
                    if "[bucket]" in argument.ref
                    else argument.shape
                )
                shape = (passes, *rows) if indexed else argument.shape
                weights[name] = Weight(name, shape, dtype_name(argument.dtype))
    shard = 0
    sizes: dict[str, int] = {}
    for name, weight in weights.items():
        file = f"weights/{shard:05d}.safetensors"
        sizes[file] = sizes.get(file, 0) + weight.nbytes
        shard += sizes[file] > SHARD_BYTES
        weights[name] = replace(weight, file=file)
    manifest = describe(config, export_backend("aoti"), tuple(weights.values()), {})
    paths = {entry.file: sizes.get(entry.file, 1 << 24) for entry in (*manifest.weights, *manifest.engines)}
    if manifest.workload.text is not None:
        paths[manifest.workload.text.tokenizer] = 1 << 24
    return replace(manifest, files={path: FileEntry("0" * 64, size) for path, size in paths.items()})


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


def test_a_tenth_of_every_budget_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = described(largest())
    document = manifest_json(manifest)
    for module in (json_fields, budgets):
        for name, most in vars(module).items():
            if name.startswith("MAX_") and name != "MAX_INTEGER":
                monkeypatch.setattr(module, name, most // 10)
    for name in ("MAX_RESOLVED_REFERENCES", "MAX_DISTINCT_REFERENCES"):
        monkeypatch.setattr(f"seko_runtime.executor.programs_check.{name}", getattr(budgets, name))
    monkeypatch.setattr(budgets, "MAX_PATH_PARTS", 2)  # the one of which an eighth is taken
    assert depth(json.loads(document)) <= json_fields.MAX_JSON_DEPTH
    assert len(document) <= json_fields.MAX_JSON_BYTES
    calls = resolve_video(parse_video_manifest(document))
    assert sum(len(run) for runs in calls.values() for run in runs) > 4000  # it is the large one
