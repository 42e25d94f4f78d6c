"""The registry of workloads: which the runtime knows, and what it says of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seko_runtime import read_manifest, register_workload
from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.opening.artifact import check_artifact
from seko_runtime.opening.workloads import workload_of
from seko_runtime.video.workload import WORKLOAD

from .conftest import Edit


def test_an_unknown_kind_is_refused_with_the_names_of_the_known(artifact: Path, edit_manifest: Edit) -> None:
    edit_manifest(artifact, lambda m: replace(m, workload=replace(m.workload, kind="smell")))
    for use in (read_manifest, check_artifact):
        with pytest.raises(ManifestError, match="workload is 'smell', this runtime knows speech, video"):
            use(artifact)


def test_video_is_built_in_and_stays_so() -> None:
    assert workload_of("video") is WORKLOAD
    with pytest.raises(UsageError, match="'video' is built in"):
        register_workload(WORKLOAD)
    with pytest.raises(UsageError, match="workload is a str, expected a RuntimeWorkload"):
        register_workload("smell")  # type: ignore[arg-type]
