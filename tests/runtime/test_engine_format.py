"""The page docs/engine-format.md against the code: every name, table, limit and example of the one is in the other."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime import errors
from seko_runtime.backends import BACKENDS, runtime_backend
from seko_runtime.executor.contract import CALL_ROWS, RANK
from seko_runtime.executor.programs_check import REF_PATTERN
from seko_runtime.format import manifest
from seko_runtime.format.manifest import Buffer, TensorSpec
from seko_runtime.format.safetensors_map import DTYPE_NAMES
from seko_runtime.video import contract
from seko_runtime.video import manifest as video_manifest
from seko_runtime.video.contract import DECODE_PROGRAMS, ENCODER_PROGRAMS
from seko_runtime.video.manifest import parse_video_manifest
from seko_runtime.video.ring import Ring

PAGE = (Path(__file__).parents[2] / "docs" / "engine-format.md").read_text(encoding="utf-8")
ABSTRACT = (manifest.Workload, video_manifest.VideoManifest)  # each is told as the class that it goes with
RECORDS = [
    record
    for module in (manifest, video_manifest)
    for _, record in inspect.getmembers(module, dataclasses.is_dataclass)
    if record.__module__ == module.__name__ and record not in ABSTRACT
]
ERRORS: dict[str, type[Exception]] = dict(inspect.getmembers(errors, inspect.isclass))
Table = list[list[str]]


def test_the_page_is_of_the_format_that_is_read() -> None:
    assert PAGE.startswith(f"# The artifact, format {manifest.FORMAT_VERSION}\n")


def test_every_record_of_the_manifest_has_a_table_of_exactly_its_fields() -> None:
    documented = {}
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        name = re.match(r".*\(`(\w+)`\)\n", section)
        assert name, section.splitlines()[0]
        documented[name[1]] = [unquoted(row[0]) for row in only(tables(section, "field"))]
    fields = {record.__name__: [field.name for field in dataclasses.fields(record)] for record in RECORDS}
    assert {name: sorted(rows) for name, rows in documented.items()} == {
        name: sorted(rows) for name, rows in fields.items()
    }


def test_the_fields_that_the_page_calls_optional_are_those_that_may_be_absent() -> None:
    """Taken out of the page's own example one by one, in every object of it."""
    optional = set()
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        record = re.findall(r"\(`(\w+)`\)", section)[0]
        rows = only(tables(section, "field"))
        optional |= {(record, unquoted(row[0])) for row in rows if "optional" in row[1]}
    found = set()
    for record, path in places(pooled_example()):
        table = pooled_example()
        target = table
        for step in path[:-1]:
            target = target[step]
        del target[path[-1]]
        try:
            parse_video_manifest(json.dumps(table).encode())
        except errors.ManifestError:
            continue
        found.add((record, path[-1]))
    assert found == optional


def test_dtypes_and_their_safetensors_names() -> None:
    rows = only(tables(PAGE, "name"))
    assert {unquoted(name): int(size) for name, size, _ in rows} == manifest.DTYPE_BYTES
    assert {unquoted(code): unquoted(name) for name, _, code in rows} == DTYPE_NAMES


def test_roles_programs_and_backends() -> None:
    assert tuple(unquoted(row[0]) for row in only(tables(PAGE, "role"))) == manifest.ROLES
    programs = [unquoted(row[0]) for row in only(tables(PAGE, "program"))]
    of_chunk = ["begin", "denoise", "context", "denoise_full", "context_full"]
    assert programs == ["prompt", *of_chunk, *ENCODER_PROGRAMS, *DECODE_PROGRAMS]
    assert [unquoted(row[0]) for row in only(tables(PAGE, "backend"))] == [one.name for one in BACKENDS]
    with pytest.raises(
        errors.EnvironmentLacksError, match="'other' is unknown, this runtime has aoti, compile"
    ):
        runtime_backend("other")


def test_the_buffers_that_have_a_meaning_by_name() -> None:
    rows = only(tables(PAGE, "named buffer"))
    wanted = {
        value
        for name, value in vars(contract).items()
        if name.isupper()
        and isinstance(value, str)
        and value not in ("text.embeddings", "conditioning_frames")
    }
    assert {CALL_ROWS, RANK} <= wanted
    assert {unquoted(row[0]) for row in rows} == wanted
    assert {unquoted(row[1]) for row in rows} <= set(manifest.ROLES)


def test_errors_and_exit_codes() -> None:
    rows = {unquoted(name): int(code) for name, code, _, _ in only(tables(PAGE, "error"))}
    assert rows == {name: getattr(errors, name).exit_code for name in rows}
    assert {name for name, one in ERRORS.items() if issubclass(one, errors.ArtifactError)} <= set(rows)
    for name, _, _, cause in only(tables(PAGE, "error")):
        base = re.match(r"an? `(\w+)`: ", cause)
        assert ERRORS[unquoted(name)].__base__ is (
            errors.SekoRuntimeError if base is None else ERRORS[base[1]]
        )
    raised = {
        unquoted(name): set(steps.split(", ")) - {""} for name, _, steps, _ in only(tables(PAGE, "error"))
    }
    assert {name for name, steps in raised.items() if not steps} == {"NumericError"}
    assert set().union(*raised.values()) == {row[0] for row in only(tables(PAGE, "step"))}


def test_limits_are_the_codes() -> None:
    for _, value, place in only(tables(PAGE, "limit")):
        module, constant = unquoted(place).split(".")
        room = "" if module == "errors" else "format."
        assert int(value) == getattr(importlib.import_module(f"seko_runtime.{room}{module}"), constant)


def test_the_rings_table_is_the_rings() -> None:
    ring = Ring(sink_frames=1, ring_frames=6, chunk_frames=3)
    for chunk, frames, slots, valid in only(tables(PAGE, "chunk")):
        first = 3 * int(chunk)
        assert frames.split() == [str(first + offset) for offset in range(3)]
        assert slots.split() == [str(slot) for slot in ring.write_slots(first)]
        assert int(valid) == ring.valid_frames(first)


def test_the_example_is_a_manifest_and_its_references_are_references() -> None:
    read = parse_video_manifest(json.dumps(example()).encode())
    assert parse_video_manifest(manifest_json(read)) == read
    assert_holds(json.loads(manifest_json(read)), example())
    refs = [
        ref for calls in read.programs.values() for call in calls for ref in (*call.inputs, *call.outputs)
    ]
    assert all(REF_PATTERN.fullmatch(ref) for ref in refs)


def test_names_that_look_like_errors_or_fields_of_the_code_exist() -> None:
    for name in re.findall(r"`(\w+Error)`", PAGE):
        assert name in ERRORS
    chunk_inputs = [unquoted(row[0]) for row in only(tables(PAGE, "chunk input"))]
    assert chunk_inputs == [one["name"] for one in example()["buffers"] if one["role"] == "chunk"]


def assert_holds(written: Any, shown: Any) -> None:
    """Check that what is written has all that the page shows; the page leaves out what has its default."""
    if isinstance(shown, dict):
        for name, part in shown.items():
            assert_holds(written[name], part)
    elif isinstance(shown, list):
        assert len(written) == len(shown)
        for pair in zip(written, shown, strict=True):
            assert_holds(*pair)
    else:
        assert written == shown


def example() -> dict[str, Any]:
    """The page's JSON, read anew, so that it may be changed."""
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    table = json.loads(block)
    assert isinstance(table, dict)
    return table


def pooled_example() -> dict[str, Any]:
    """The example with the fields of other sections: for these alone, since its programs are a batch's."""
    (pool,) = re.findall(r'^    ("pool": .*)$', PAGE, flags=re.MULTILINE)
    (rings,) = re.findall(r'^    ("rings": .*)$', PAGE, flags=re.MULTILINE)
    table = example() | {"format_version": manifest.FORMAT_VERSION, **json.loads(f"{{{pool}}}")}
    (inputs,) = re.findall(r'^    ("inputs": \[\{"name".*?\])$', PAGE, flags=re.MULTILINE | re.DOTALL)
    table |= json.loads(f"{{{inputs}}}")
    (ranks,) = re.findall(r'^    ("ranks": .*)$', PAGE, flags=re.MULTILINE)
    table |= json.loads(f"{{{ranks}}}")
    (streamed,) = re.findall(r'^    ("device_layers": .*)$', PAGE, flags=re.MULTILINE)
    (shared,) = re.findall(r'^    ("rank_axis": .*)$', PAGE, flags=re.MULTILINE)
    table["buffers"][0] |= json.loads(f"{{{streamed}, {shared}}}")
    (references,) = re.findall(r'^    ("reference_frames": .*)$', PAGE, flags=re.MULTILINE)
    table["workload"]["stream"] |= json.loads(f"{{{rings}, {references}}}")
    table["workload"]["golden"] |= {"reference": "reference"}
    table["programs"]["begin"][0] |= {"first_layer": 0, "first_place": 0}  # of a call without layers, no more
    return table


def places(table: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Every field of every record in a manifest's JSON: the record's name and the way to it."""
    found: list[tuple[str, list[Any]]] = []

    def walk(record: type, value: dict[str, Any], path: list[Any]) -> None:
        for name in value:
            found.append((record.__name__, [*path, name]))

    walk(manifest.Manifest, table, [])
    walk(manifest.Target, table["target"], ["target"])
    walk(manifest.Pool, table["pool"], ["pool"])
    workload = table["workload"]
    walk(video_manifest.VideoWorkload, workload, ["workload"])
    for name, record in (
        ("stream", video_manifest.Stream),
        ("kv", video_manifest.KvPool),
        ("schedule", video_manifest.Schedule),
        ("golden", video_manifest.Golden),
        ("text", video_manifest.Text),
        ("video", video_manifest.Video),
    ):
        walk(record, workload[name], ["workload", name])
    for name, record in (
        ("inputs", manifest.InputSpec),
        ("buffers", Buffer),
        ("weights", manifest.Weight),
        ("engines", manifest.EngineSpec),
    ):
        walk(record, table[name][0], [name, 0])
    walk(TensorSpec, table["engines"][0]["inputs"][0], ["engines", 0, "inputs", 0])
    walk(manifest.Call, table["programs"]["begin"][0], ["programs", "begin", 0])
    bounds = workload["golden"]["bounds"]
    walk(video_manifest.GoldenBound, bounds[0], ["workload", "golden", "bounds", 0])
    path = next(iter(table["files"]))
    walk(manifest.FileEntry, table["files"][path], ["files", path])
    assert {record for record, _ in found} == {record.__name__ for record in RECORDS}
    return found


def tables(text: str, first_heading: str) -> list[Table]:
    """Body rows of every table whose first column has that heading."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if rows[0][0] == first_heading:
            found.append(rows[2:])
    return found


def only(found: list[Table]) -> Table:
    assert len(found) == 1
    assert found[0]
    return found[0]


def unquoted(cell: str) -> str:
    """The name in a cell that is one `name`."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match, cell
    return match[1]
