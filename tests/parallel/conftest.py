"""One artifact of two ranks for the whole folder, and the same model's stream on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seko_runtime import OpenArtifact, open_artifact
from tests.conftest import Built, build_once

LAYOUT = ("--height", "32", "--width", "64")


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The tiny model for two ranks, AOTInductor engines with an exact cache; not to be changed."""
    return build_once(tmp_path_factory, "ranks", *LAYOUT, "--ranks", "2")


@pytest.fixture(scope="module")
def opened(two: Built) -> Iterator[OpenArtifact]:
    """That artifact, its two processes running."""
    with open_artifact(two.folder) as artifact:
        yield artifact
