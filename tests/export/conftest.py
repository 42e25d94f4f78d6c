"""An artifact to be damaged, one with text and video, and the command in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from seko_export.cli.commands import main
from tests.conftest import Built, build_once
from tests.export.media_files import write_text_encoder, write_vae


@pytest.fixture
def artifact(fp4: Built, tmp_path: Path) -> Path:
    """A copy of the FP4 artifact, to be damaged."""
    return Path(shutil.copytree(fp4.folder, tmp_path / "copy"))


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The tiny model with text encoder and VAE, two rows of 32x32 pixels, AOTInductor engines."""
    home = tmp_path_factory.mktemp("media_files")
    vae, text = write_vae(home / "vae"), write_text_encoder(home / "text_encoder")
    options = ("--vae", str(vae), "--text-encoder", str(text), "--height", "32", "--width", "32")
    return build_once(tmp_path_factory, "media", *options, "--batch", "2")


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Run the command in this process: no start of Python and torch to pay for."""
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])
