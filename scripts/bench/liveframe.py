"""liveframe, a harness of others, over models of random weights: `scripts/liveframe_adapter.py` without an artifact.

``liveframe_failures`` counts the cases of the suite ``smoke`` that failed, of ten seconds of video, and one more if the
same actions again gave other frames. The rows tell frame counts and times; random weights show nothing of quality.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from liveframe.world.actions import ActionScript
from liveframe.world.runner import run_suite
from liveframe.world.session import WorldCase, run_case

from scripts.bench.full_model import FAST, FullModelBench
from scripts.bench.rows import append_row
from scripts.liveframe_adapter import SekoWorld
from seko_export import BuildOptions
from seko_export.config.video import VideoBuild
from seko_export.media.wan_vae.config import VAE_PRESETS
from seko_export.options.resolve import resolve_build
from seko_export.video.recording import golden_inputs, golden_text
from seko_runtime import Pool, VideoManifest

SUITE, AGAIN_CHUNKS = "smoke", 2
VAES = (
    replace(VAE_PRESETS["wan-2.1"], base_dim=8),
    replace(VAE_PRESETS["wan-2.2"], base_dim=8, decoder_base_dim=12),
)


class Bench(FullModelBench):
    """The options, and the models one after another."""

    def config(self, preset: str) -> VideoBuild:
        """Return a build with a narrow VAE of the model's latents."""
        asked = BuildOptions(preset=preset, no_vae=True, no_text=True, **{**FAST, "resident_window": True})
        config = resolve_build(asked).config
        (vae,) = (vae for vae in VAES if vae.z_dim == config.model.out_channels)
        return config.changed(vae=vae)


class RandomWorld(SekoWorld):
    """A pool's model as liveframe's `WorldBackend`."""

    def __init__(self, config: VideoBuild, pool: Pool) -> None:
        super().__init__(Path())
        self._config, self._pool = config, pool

    @property
    def manifest(self) -> VideoManifest:
        """The pool's manifest."""
        return self._pool.manifest

    def load(self) -> None:
        """Do nothing: the pool is open."""

    def reset(self, image: np.ndarray, prompt: str | None, seed: int) -> None:
        """Begin a stream with random conditions."""
        del image, prompt
        if self._session is not None:
            self._session.close()
        text = golden_text(self._config) if self._config.model.takes_text else None
        inputs = golden_inputs(self._config, None)
        self._session = self._pool.open_session(seed=seed, text=text, inputs=inputs or None)
        self._steps = 0


class _Kept(list[Any]):
    """Keeps the frames of a case, in the place of the harness' own sink."""

    add = list.append

    def finalize(self) -> list[Path]:
        return []


def _video(world: RandomWorld, name: str) -> np.ndarray:
    kept, told = _Kept(), world.capabilities
    frames = (told.chunk_frames_first or told.chunk_frames) + (AGAIN_CHUNKS - 1) * told.chunk_frames
    key = min(told.actions - {"0"})
    script = ActionScript.from_segments([(0, key, frames)])
    run_case(world, WorldCase(name, np.zeros((*told.resolution, 3), np.uint8), script, seed=3), capture=kept)
    return np.concatenate(kept)


def measure(bench: Bench, preset: str) -> None:
    """Append the row of one model."""
    config = bench.config(preset)
    bench.compile([config])
    with bench.pool(config) as pool, tempfile.TemporaryDirectory() as runs:
        world = RandomWorld(config, pool)
        same = np.array_equal(_video(world, "first"), _video(world, "again"))
        _, summary = run_suite(world, suite=SUITE, run_root=Path(runs), model_name=preset)
        head = summary["headline"]
        video = pool.manifest.workload.video
    assert video is not None  # the build has a VAE
    s = config.workload.stream
    latency = head["control_latency_p50_median"]
    words = (
        f"of {summary['cases']} cases; chunks of {video.first_frames}, then {video.chunk_frames} frames, "
        f"{head['generated_fps_median']:.1f} a second, an action to its frames {latency:.2f} s, "
        f"{'the same' if same else 'other'} frames again"
    )
    shape = f"{preset}, {s.height}x{s.width}, suite {SUITE}, random weights"
    append_row(
        bench.options.rows, "liveframe_failures", shape, summary["failures"] + (not same), words, 0.0,
        engines="uncompiled" if bench.options.eager else "aoti", weights="random", **head,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure the models of the case."""
    bench = Bench(options)
    for preset in options.models:
        measure(bench, preset)
    return 0
