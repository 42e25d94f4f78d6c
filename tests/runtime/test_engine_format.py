"""The pages on the format against the code: names, tables and limits of the one are in the other."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from seko_runtime import errors
from seko_runtime.backends import BACKENDS, runtime_backend
from seko_runtime.executor.contract import CALL_ROWS, RANK
from seko_runtime.format import manifest
from seko_runtime.format.safetensors_map import DTYPE_NAMES
from seko_runtime.video import contract
from seko_runtime.video.contract import DECODE_PROGRAMS, ENCODER_PROGRAMS
from seko_runtime.video.ring import Ring

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "engine-format.md").read_text(encoding="utf-8")
CHECKS = (DOCS / "artifact-checks.md").read_text(encoding="utf-8")
ERRORS: dict[str, type[Exception]] = dict(inspect.getmembers(errors, inspect.isclass))
Rows = list[list[str]]


def test_the_page_is_of_the_format_that_is_read() -> None:
    assert PAGE.startswith(f"# The artifact, format {manifest.FORMAT_VERSION}\n")


def test_the_page_leaves_the_fields_to_the_schema() -> None:
    """Whose test demands a meaning of each."""
    assert "`seko_runtime/video/manifest.schema.json`" in PAGE


def test_the_rings_table_is_the_rings() -> None:
    ring = Ring(sink_frames=1, ring_frames=6, chunk_frames=3)
    for chunk, frames, slots, valid in only(tables(PAGE, "chunk")):
        first = 3 * int(chunk)
        assert frames.split() == [str(first + offset) for offset in range(3)]
        assert slots.split() == [str(slot) for slot in ring.write_slots(first)]
        assert int(valid) == ring.valid_frames(first)


def test_dtypes_roles_and_backends() -> None:
    rows = only(tables(PAGE, "name"))
    assert {unquoted(name): int(size) for name, size, _ in rows} == manifest.DTYPE_BYTES
    assert {unquoted(code): unquoted(name) for name, _, code in rows} == DTYPE_NAMES
    assert tuple(unquoted(row[0]) for row in only(tables(PAGE, "role"))) == manifest.ROLES
    assert [unquoted(row[0]) for row in only(tables(PAGE, "backend"))] == [
        backend.name for backend in BACKENDS
    ]
    with pytest.raises(
        errors.EnvironmentLacksError, match="'other' is unknown, this runtime has aoti, compile"
    ):
        runtime_backend("other")


def test_programs_and_the_buffers_that_have_a_meaning_by_name() -> None:
    programs = [unquoted(row[0]) for row in only(tables(PAGE, "program"))]
    kinds = ("", "_full", "_first")
    of_chunk = ["begin", *(f"{pass_}{kind}" for kind in kinds for pass_ in ("denoise", "context"))]
    of_video = [contract.ENCODE_VIDEO_FIRST, contract.ENCODE_VIDEO]
    assert programs == ["prompt", *of_chunk, *ENCODER_PROGRAMS, *DECODE_PROGRAMS, *of_video]
    named = {unquoted(row[0]) for row in only(tables(PAGE, "named buffer"))}
    of_host = {row[0].split("`")[1] for row in only(tables(PAGE, "host buffer, int64"))}
    constants = [value for name, value in vars(contract).items() if name.isupper()]
    known = {value for value in constants if isinstance(value, str)} | {*contract.FRONT_CACHES}
    known -= {*of_video}  # names of programs
    assert {name.removesuffix("NAME") for name in named} | {"conditioning_frames", CALL_ROWS, RANK} == known
    assert of_host == {
        "seeds",
        "frames",
        "write_slots",
        "valid_tokens",
        "conditioning_frames",
        CALL_ROWS,
        RANK,
    }


def test_errors_and_exit_codes() -> None:
    rows = {unquoted(name): int(code) for name, code, _, _ in only(tables(CHECKS, "error"))}
    assert rows == {name: getattr(errors, name).exit_code for name in rows}
    assert {name for name, kind in ERRORS.items() if issubclass(kind, errors.ArtifactError)} <= set(rows)
    for name, _, _, cause in only(tables(CHECKS, "error")):
        base = re.match(r"an? `(\w+)`: ", cause)
        assert ERRORS[unquoted(name)].__base__ is (
            errors.SekoRuntimeError if base is None else ERRORS[base[1]]
        )
    raised = {unquoted(name): set(at.split(", ")) - {""} for name, _, at, _ in only(tables(CHECKS, "error"))}
    assert {name for name, steps in raised.items() if not steps} == {"NumericError"}
    assert set().union(*raised.values()) == {row[0] for row in only(tables(CHECKS, "step"))}
    for name in re.findall(r"`(\w+Error)`", PAGE + CHECKS):
        assert name in ERRORS


def test_limits_are_the_codes() -> None:
    for limit, value in only(tables(CHECKS, "limit")):
        module, _, constant = unquoted(limit.split(": ")[0]).rpartition(".")
        assert int(value) == getattr(importlib.import_module(f"seko_runtime.{module}"), constant), limit


def tables(text: str, first_heading: str) -> list[Rows]:
    """Body rows of every table whose first column has that heading."""
    rows_of_tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if rows[0][0] == first_heading:
            rows_of_tables.append(rows[2:])
    return rows_of_tables


def only(candidates: list[Rows]) -> Rows:
    assert len(candidates) == 1
    assert candidates[0]
    return candidates[0]


def unquoted(cell: str) -> str:
    """The name in a cell that is one `name`."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match, cell
    return match[1]
