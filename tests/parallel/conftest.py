"""Artifacts of two ranks for the whole folder, one of them compiled, and the same model on one. On GPUs
`scripts/rank_proof.py` shows what these tests show on processes of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.random_checkpoint import write_random_checkpoint
from seko_export import build_steps
from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.config.video import VideoBuild
from seko_export.media.sources import MediaSources
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_runtime.backends import runtime_backend
from tests.conftest import Built, build_once
from tests.export.media_files import TEXT, VAE, write_text_encoder, write_vae
from tests.support.shared import made_once
from tests.support.uncompiled import leave_uncompiled

SIDE = 48  # pixels; a latent frame then has 9 tokens, which two ranks do not divide
LAYOUT = ("--height", str(SIDE), "--width", str(SIDE), "--sessions", "2", "--batch", "2")


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """Have every rank compute in one thread: bytes of two groups are compared, and sums depend on the threads."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The tiny model for two ranks, rank 1 with padding; engines of AOTInductor, a pool. Not to be changed."""
    return build_once(tmp_path_factory, "ranks", *LAYOUT, "--ranks", "2")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same build with a VAE and a text encoder, and exported programs as engines. Not to be changed."""

    def make(folder: Path) -> None:
        text = write_text_encoder(folder / "text")
        media = MediaSources(
            vae=write_vae(folder / "vae"), text_encoder=text, tokenizer=text / "tokenizer.json"
        )
        build_of_programs(folder, one_gpu().changed(ranks=2, vae=VAE, text=TEXT), media)

    return made_once(tmp_path_factory, "programs-ranks", make) / "artifact"


@contextmanager
def ranks_of_programs() -> Iterator[None]:
    """Have builds and openings with ``backend="compile"`` take several ranks, and nothing be compiled or verified.

    Engines are exported programs, collectives included, which each rank's process runs op by op. Compiled engines of
    two ranks are those of the artifact `two`.
    """
    built, several = build_steps.export_backend, replace(runtime_backend("compile"), several_ranks=True)

    def carrying_ranks(name: str) -> ExportBackend:
        return replace(built(name), capabilities=Capabilities(ranks=True, offloading=True))

    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        patch.setattr(build_steps, "export_backend", carrying_ranks)
        patch.setattr(build_steps, "too_few_devices", lambda _: True)
        patch.setattr("seko_runtime.opening.artifact.runtime_backend", lambda _: several)
        yield


def build_of_programs(folder: Path, config: VideoBuild, media: MediaSources) -> None:
    """Build an artifact of random weights in a folder, of programs that each rank runs op by op."""
    write_random_checkpoint(folder / "tiny", config.model, seed=0, dtype=torch.float32)
    with ranks_of_programs():
        build_steps.build_artifact(
            config,
            folder / "tiny",
            folder / "artifact",
            media=media,
            backend="compile",
            compiler_cache=False,
        )


def one_gpu() -> VideoBuild:
    """Return the configuration of the artifact `two` for one rank."""
    options = BuildOptions(preset="tiny", height=SIDE, width=SIDE, sessions=2, batch=(2,), target="cpu")
    return resolve_build(options).config


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return all weights of an artifact by name."""
    weights = {}
    for file in sorted((folder / "weights").iterdir()):
        weights |= load_file(file)
    return weights
