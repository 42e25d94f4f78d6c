"""A family's artifact from a folder of weights, its programs run as they are. No tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seko_export.build_steps import build_artifact
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from tests.support.uncompiled import leave_uncompiled


@contextmanager
def artifact_of(options: BuildOptions, goal: Path) -> Iterator[Path]:
    """Build what the options ask for, and leave its programs uncompiled while it is used."""
    resolved = resolve_build(options)
    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        build_artifact(
            resolved.config,
            resolved.checkpoint,
            goal,
            media=resolved.media,
            backend="compile",
            compiler_cache=False,
        )
        yield goal
