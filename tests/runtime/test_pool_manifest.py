"""The manifest of a pool: written, read back, and refused where its parts do not fit together."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.errors import ArtifactError
from seko_runtime.sessions.artifact import OpenedFiles
from seko_runtime.video.artifact import VideoArtifact
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.local_rows import LocalVideoRows
from seko_runtime.video.manifest import parse_video_manifest
from tests.runtime import toy
from tests.support.rows import rows_of

from .toy_pool import BUCKETS, SESSIONS, open_pool, pool_manifest


def test_the_manifest_of_a_pool_reads_back() -> None:
    manifest = toy.changed(pool_manifest(), golden=None, text=None, video=None)
    document = manifest_json(manifest)
    read = parse_video_manifest(_with_files(document))
    assert read.pool == manifest.pool
    assert (read.rows, read.call_rows) == (SESSIONS, BUCKETS[-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: replace(m, state_rows=4),
            "pool.buckets end with 4, the pool has 4 rows",
        ),
        (lambda m: replace(m, pool=replace(m.pool, buckets=(1, 2))), "unknown"),
        (
            lambda m: replace(m, buffers=tuple(b for b in m.buffers if b.name != "rows")),
            "host buffer 'rows'",
        ),
        (
            lambda m: _with_ref(m, "step.2", "buffer:valid_tokens[bucket]", "buffer:valid_tokens"),
            "valid_tokens is",
        ),
        (
            lambda m: _with_ref(m, "step.2", "buffer:valid_tokens[bucket]", "buffer:valid_tokens[row]"),
            "names a row",
        ),
        (
            lambda m: _with_ref(m, "prompt", "buffer:prompt.mean[row]", "buffer:prompt.mean[bucket]"),
            "outside",
        ),
    ],
)
def test_a_pool_that_does_not_fit_together(change: Callable[[Any], Any], words: str) -> None:
    resolve_video(pool_manifest())
    with pytest.raises(ArtifactError, match=words):
        resolve_video(change(pool_manifest()))


def _with_ref(manifest: Any, engine: str, old: str, new: str) -> Any:
    """The manifest with one reference of an engine's calls exchanged."""

    def changed(refs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new if ref == old else ref for ref in refs)

    programs = {
        name: tuple(
            replace(call, inputs=changed(call.inputs), outputs=changed(call.outputs))
            if call.engine == engine
            else call
            for call in calls
        )
        for name, calls in manifest.programs.items()
    }
    assert programs != manifest.programs
    return replace(manifest, programs=programs)


def _with_files(document: bytes) -> bytes:
    """The manifest with an entry for each file that it names."""
    table = json.loads(document)
    names = {entry["file"] for entry in (*table["engines"], *table["weights"])}
    table["files"] = {name: {"sha256": "0" * 64, "size": 1} for name in names}
    return json.dumps(table).encode()


class OpenedEngines:
    """What `open_pool` needs of an open artifact's engines."""

    def open_rows(self, _: object) -> LocalVideoRows:
        return rows_of(open_pool())


def test_an_artifact_keeps_no_pool_that_is_closed() -> None:
    """But for the last one, until the next is opened."""
    files = OpenedFiles(pool_manifest(), "0" * 64, "cpu", {})
    opened, pools = VideoArtifact(files, OpenedEngines()), []
    for _ in range(3):
        with opened.open_pool() as pool:
            pools.append(weakref.ref(pool))
        del pool
    gc.collect()
    assert [reference() is None for reference in pools] == [True, True, False]
