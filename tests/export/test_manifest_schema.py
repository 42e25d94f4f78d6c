"""The JSON schema of the manifest: made of the dataclasses, and no stricter than the runtime."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from seko_export.video.manifest_schema import SCHEMA_PATH, schema_text
from seko_runtime.errors import ArtifactError
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import parse_video_manifest
from tests.manifest_schema import SCHEMA, validator
from tests.runtime.test_manifest import JUNK, PLACES, as_table, with_video


def test_the_runtimes_package_holds_the_schema_of_its_dataclasses() -> None:
    """If not: python -m seko_export.video.manifest_schema."""
    assert SCHEMA.samefile(SCHEMA_PATH)
    assert SCHEMA_PATH.read_text(encoding="utf-8") == schema_text()
    Draft202012Validator.check_schema(json.loads(schema_text()))


def test_the_largest_toy_is_as_the_schema_says() -> None:
    validator().validate(as_table(with_video()))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([place for place in PLACES if place]), JUNK, st.booleans())
def test_what_the_runtime_reads_the_schema_accepts(
    place: tuple[Any, ...], junk: object, remove: bool
) -> None:
    table = inner = as_table(with_video())
    for key in place[:-1]:
        inner = inner[key]
    if remove:
        del inner[place[-1]]
    else:
        inner[place[-1]] = junk
    try:
        resolve_video(parse_video_manifest(json.dumps(table).encode()))
    except ArtifactError:
        return
    validator().validate(table)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format_version",), 2),
        (("workload", "kind"), "speech"),
        (("buffers", 0, "role"), "chunk"),
        (("buffers", 0, "shape", 0), 0),
        (("weights", 0, "file"), "../x"),
        (("weights", 0, "file"), "a/./b"),
        (("engines", 0, "name"), ".x"),
        (("target", "device"), "rocm"),
        (("programs", "begin", 0, "inputs", 0), "buffer:x[layer]"),
        (("programs", "begin", 0, "inputs", 0), "buffer:x[01]"),
        (("workload", "stream", "fps"), 1.5),
        (("workload", "golden", "tolerance"), "1"),
    ],
)
def test_it_refuses_what_the_format_does_not_have(place: tuple[Any, ...], value: object) -> None:
    table = inner = as_table(with_video())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert not validator().is_valid(table)
