"""One artifact of two ranks for the whole folder, and the same model's stream on one. On GPUs `scripts/rank_proof.py`
shows what these tests show on processes of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from seko_export import build_steps
from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.config.video import VideoBuild
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_runtime import OpenArtifact, open_artifact
from seko_runtime.backends import runtime_backend
from tests.conftest import Built, build_once
from tests.export.media_files import VAE, write_vae
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
    """The tiny model and VAE for two ranks, rank 1 with padding; engines of AOTInductor, a pool. Not to be changed."""
    vae = write_vae(tmp_path_factory.mktemp("ranks_vae"))
    return build_once(tmp_path_factory, "ranks", *LAYOUT, "--ranks", "2", "--vae", str(vae))


@pytest.fixture(scope="module")
def opened(two: Built) -> Iterator[OpenArtifact]:
    """That artifact, its two processes running."""
    with open_artifact(two.folder) as artifact:
        yield artifact


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


def one_gpu() -> VideoBuild:
    """Return the configuration of the same build for one rank."""
    options = BuildOptions(preset="tiny", height=SIDE, width=SIDE, sessions=2, batch=(2,), target="cpu")
    return resolve_build(options).config.changed(vae=VAE)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return all weights of an artifact by name."""
    weights = {}
    for file in sorted((folder / "weights").iterdir()):
        weights |= load_file(file)
    return weights
