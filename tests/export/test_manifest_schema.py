"""The JSON schemas of the manifest: made of the dataclasses, and no stricter than the runtime."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError

from scripts.manifest_schema import SCHEMAS, schema_text
from seko_export import build_steps
from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import Manifest
from seko_runtime.opening.workloads import WORKLOADS
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import parse_video_manifest
from tests.runtime.test_manifest import JUNK, PLACES, as_table, with_video
from tests.speech.toy_speech import manifest as speech_manifest
from tests.support.manifest_schema import schema_file, validator


def test_the_runtimes_package_holds_the_schemas_of_its_dataclasses() -> None:
    """If not: python scripts/manifest_schema.py."""
    assert {schema_file(kind).resolve() for kind in WORKLOADS.own} == {path.resolve() for path in SCHEMAS}
    for path, kind in SCHEMAS.items():
        assert path.read_text(encoding="utf-8") == schema_text(kind)
        Draft202012Validator.check_schema(json.loads(schema_text(kind)))


@pytest.mark.parametrize("kind", WORKLOADS.own)
def test_a_schema_says_what_each_field_means(kind: str) -> None:
    """As the pages on the format leave that to it: it has the parameters in the dataclasses' docstrings."""
    records = json.loads(schema_file(kind).read_text(encoding="utf-8"))["$defs"]
    fields = {
        (name, field): told
        for name, record in records.items()
        for field, told in record["properties"].items()
    }
    assert [place for place, told in fields.items() if not told.get("description")] == []
    left_out = {(name, field) for name, field in fields if field not in records[name]["required"]}
    assert left_out == {place for place, told in fields.items() if "default" in told}


def test_the_toy_that_speaks_is_as_its_schema_says() -> None:
    table = json.loads(manifest_json(speech_manifest()))
    table["weights"] = []  # its own lie in no file
    validator("speech").validate(table)
    for place, value in (("kind", "video"), ("positions", 1), ("read_lengths", ["x"]), ("vocabulary", 0)):
        assert not validator("speech").is_valid({**table, "workload": {**table["workload"], place: value}})


@pytest.mark.parametrize(
    "manifest", [with_video(), speech_manifest()], ids=lambda manifest: manifest.workload.kind
)
def test_a_wrong_field_that_a_build_writes_fails_its_test(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every test that builds in its own process: tests/conftest.py."""
    written: Any = (tmp_path, None, None, (), None, (), None)
    manifest = replace(manifest, weights=())
    monkeypatch.setattr(build_steps, "hash_files", lambda _: {})
    monkeypatch.setattr(build_steps, "describe", lambda *_: manifest)
    build_steps._write_manifest(*written)
    assert (tmp_path / "manifest.json").read_bytes() == manifest_json(manifest)
    monkeypatch.setattr(build_steps, "describe", lambda *_: replace(manifest, backend="no name"))
    with pytest.raises(ValidationError, match="'no name' does not match"):
        build_steps._write_manifest(*written)


def test_the_largest_toy_is_as_the_schema_says() -> None:
    validator("video").validate(as_table(with_video()))


@settings(max_examples=400)
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
    validator("video").validate(table)


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
    assert not validator("video").is_valid(table)
