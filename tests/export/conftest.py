"""An artifact to be damaged, and the command in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from seko_export.cli.commands import main
from tests.conftest import Built


@pytest.fixture
def artifact(fp4: Built, tmp_path: Path) -> Path:
    """A copy of the FP4 artifact, to be damaged."""
    return Path(shutil.copytree(fp4.folder, tmp_path / "copy"))


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Run the command in this process: no start of Python and torch to pay for."""
    return lambda *arguments: CliRunner().invoke(main, [str(a) for a in arguments])
