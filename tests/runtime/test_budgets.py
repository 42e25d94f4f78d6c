"""A small manifest cannot exhaust the machine: each is refused with a second of CPU and 256 MiB, in a child process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime import errors
from seko_runtime.errors import (
    MAX_MESSAGE_LETTERS,
    ArtifactError,
    ManifestError,
    SekoRuntimeError,
)
from seko_runtime.format import budgets
from seko_runtime.format.artifact_files import ArtifactFiles
from seko_runtime.format.json_fields import MAX_JSON_DEPTH, MAX_JSON_VALUES, parse_json
from seko_runtime.format.manifest import Buffer, Call, EngineSpec, FileEntry, InputSpec, TensorSpec, Weight
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest

from . import toy

CHECK = Path(__file__).with_name("bounded_check.py")
F32 = "float32"
Table = dict[str, Any]


def whole() -> VideoManifest:
    manifest = toy.toy_manifest()
    paths = {entry.file for entry in (*manifest.weights, *manifest.engines)}
    return replace(manifest, files={path: FileEntry("0" * 64, 1) for path in paths})


def as_table(manifest: VideoManifest) -> Table:
    table: Table = json.loads(manifest_json(manifest))
    return table


def bounded(folder: Path, document: bytes, cpu_seconds: int = 1) -> tuple[str, int, str]:
    """Check a folder that holds this manifest, in a child: class, exit code and message of the error."""
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(document)
    command = [sys.executable, str(CHECK), str(folder), str(cpu_seconds)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-600:]
    name, code, message = json.loads(done.stdout)
    return name, code, message


def wide_engine(inputs: int, mutates: int = 0) -> EngineSpec:
    specs = tuple(TensorSpec(f"i{at}", (4, 4), F32) for at in range(inputs))
    return EngineSpec("wide", "engines/copy.pt2", specs, (), tuple(spec.name for spec in specs[:mutates]))


def with_calls(engine: EngineSpec, *calls: Call, **changes: object) -> VideoManifest:
    """The toy with one more engine, which `begin` calls so."""
    manifest = whole()
    begin = manifest.programs["begin"] + calls
    engines = (*manifest.engines, engine)
    return toy.changed(manifest, engines=engines, programs={**manifest.programs, "begin": begin}, **changes)  # type: ignore[arg-type]


def many_references() -> VideoManifest:
    return with_calls(wide_engine(500), *[Call("wide", ("weight:layers.0.weight",) * 500, ())] * 600)


def in_1024_passes(*calls: Call, **changes: object) -> VideoManifest:
    """The toy with one more engine, which takes 150 inputs and which each pass calls so."""
    manifest = whole()
    schedule = replace(
        manifest.workload.schedule, denoise_passes=1024, timesteps=(1.0,) * 1024, sigmas=(0.5,) * 1024
    )
    engines = (*manifest.engines, wide_engine(150))
    programs = {**manifest.programs, "denoise": calls, "denoise_full": calls}
    return toy.changed(manifest, schedule=schedule, engines=engines, programs=programs, **changes)  # type: ignore[arg-type]


def many_different_references() -> VideoManifest:
    """Fewer than the budget of references, but every one of them is another."""
    known = tuple(
        replace(weight, shape=(1025,)) if weight.name == "gain" else weight for weight in whole().weights
    )
    tables = tuple(Weight(f"table.{at}", (1024, 4, 4), F32, known[0].file) for at in range(150))
    call = Call("wide", tuple(f"weight:{table.name}[pass]" for table in tables), ())
    return in_1024_passes(call, weights=(*known, *tables))


def many_passes() -> VideoManifest:
    return in_1024_passes(*[Call("wide", ("weight:layers.0.weight",) * 150, ())] * 8)


def many_passes_of_empty_calls() -> VideoManifest:
    return in_1024_passes(*[Call("nowhere", (), ())] * 1000)


def many_written_inputs() -> VideoManifest:
    """Not too many of anything: 30,000 inputs, all of them written in place, are looked through once."""
    seen = Buffer("seen", (4, 4), F32, "state")
    call = Call("wide", ("buffer:seen",) * 30_000, ())
    return with_calls(wide_engine(30_000, mutates=30_000), call, buffers=(*whole().buffers, seen))


def deep_paths() -> VideoManifest:
    """Folders inside of folders, of which each would be remembered with its whole path."""
    files = {f"{at:06d}/{'a/' * 500}x": FileEntry("0" * 64, 1) for at in range(8000)}
    return replace(whole(), files={**whole().files, **files})


@pytest.mark.parametrize(
    ("make_manifest", "error", "words"),
    [
        (many_references, ManifestError, "the references to"),
        (many_different_references, ManifestError, "different references"),
        (many_passes, ManifestError, "references, more than"),
        (many_passes_of_empty_calls, ManifestError, "references, more than"),
        (many_written_inputs, ArtifactError, "is not in"),
        (deep_paths, ManifestError, "at most 16 parts"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_manifest_that_asks_for_too_much_work_is_refused_at_once(
    tmp_path: Path, make_manifest: Callable[[], VideoManifest], error: type[SekoRuntimeError], words: str
) -> None:
    name, code, message = bounded(tmp_path / "artifact", manifest_json(make_manifest()))
    assert (name, code) == (error.__name__, 4)
    assert words in message


def with_model(content: str) -> bytes:
    """A manifest whose free table holds this."""
    table = as_table(whole())
    return json.dumps({**table, "model": {"a": "HERE"}}).replace('"HERE"', content).encode()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (with_model("[" + "{}," * 5_000_000 + "{}]"), "arrays and objects"),
        (with_model("[" + "1.5," * 4_000_000 + "1]"), "values"),
        (with_model("[" * 200 + "]" * 200), "nested too deeply"),
        (with_model("[" * 100_000 + "]" * 100_000), "nested too deeply"),
        (with_model('{"' + "k" * 2000 + '": 1}'), "key of more than"),
    ],
    ids=["tables", "values", "nesting", "deep_nesting", "long_key"],
)
def test_a_document_that_asks_for_too_much_memory_is_refused_at_once(
    tmp_path: Path, document: bytes, words: str
) -> None:
    name, code, message = bounded(tmp_path / "artifact", document)
    assert (name, code) == ("ManifestError", 4)
    assert words in message


def test_what_is_as_nested_as_allowed_is_read() -> None:
    deep = MAX_JSON_DEPTH - 1
    assert parse_json(b'{"a":' * deep + b"[]" + b"}" * deep, "it")
    assert parse_json(b"[" + b"1," * (MAX_JSON_VALUES - 2) + b"1]", "it")
    for document in (
        b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1),
        b"[" + b"1," * MAX_JSON_VALUES + b"1]",
    ):
        with pytest.raises(ManifestError):
            parse_json(document, "it")


def more_buffers(count: int) -> VideoManifest:
    added = tuple(Buffer(f"b{at}", (1,), "uint8", "state") for at in range(count - len(whole().buffers)))
    return replace(whole(), buffers=(*whole().buffers, *added))


def more_inputs(count: int) -> VideoManifest:
    added = tuple(InputSpec(f"i{at}", (1,), "uint8", "nowhere", "session") for at in range(count))
    return replace(whole(), inputs=added)


def more_weights(count: int) -> VideoManifest:
    known = whole().weights
    added = tuple(Weight(f"w{at}", (1,), "uint8", known[0].file) for at in range(count - len(known)))
    return replace(whole(), weights=(*known, *added))


def more_engines(count: int) -> VideoManifest:
    known = whole().engines
    added = tuple(
        replace(known[-1], name=f"e{at}", inputs=(), outputs=()) for at in range(count - len(known))
    )
    return replace(whole(), engines=(*known, *added))


def more_signature(count: int) -> VideoManifest:
    known = sum(len(engine.inputs) + len(engine.outputs) for engine in whole().engines)
    added = replace(wide_engine(count - known), name="wide")
    return replace(whole(), engines=(*whole().engines, added))


def more_files(count: int) -> VideoManifest:
    added = {f"more/{at}": FileEntry("0" * 64, 1) for at in range(count - len(whole().files))}
    return replace(whole(), files={**whole().files, **added})


def more_calls(count: int) -> VideoManifest:
    empty = replace(wide_engine(0), name="empty")
    known = sum(map(len, whole().programs.values()))
    programs = {
        **whole().programs,
        "prompt": whole().programs["prompt"] + (Call("empty", (), ()),) * (count - known),
    }
    return replace(whole(), engines=(*whole().engines, empty), programs=programs)


def more_references(count: int) -> VideoManifest:
    calls = [call for several in whole().programs.values() for call in several]
    known = sum(len(call.inputs) + len(call.outputs) for call in calls)
    call = Call("copy", ("weight:gain",) * (count - known), ())
    return replace(whole(), programs={**whole().programs, "prompt": (*whole().programs["prompt"], call)})


def more_buffer_bytes(count: int) -> VideoManifest:
    known = sum(buffer.nbytes for buffer in whole().buffers)
    return replace(whole(), buffers=(*whole().buffers, Buffer("large", (count - known,), "uint8", "state")))


def more_file_bytes(count: int) -> VideoManifest:
    known = sum(file.size for file in whole().files.values())
    return replace(whole(), files={**whole().files, "large": FileEntry("0" * 64, count - known)})


@pytest.mark.parametrize(
    ("manifest_with", "most", "words"),
    [
        (more_buffers, budgets.MAX_BUFFERS, "the buffers to"),
        (more_buffer_bytes, budgets.MAX_BUFFER_BYTES, "buffers brings the bytes to"),
        (more_inputs, budgets.MAX_INPUTS, "the inputs to"),
        (more_weights, budgets.MAX_WEIGHTS, "the weights to"),
        (more_engines, budgets.MAX_ENGINES, "the engines to"),
        (more_signature, budgets.MAX_SIGNATURE_TENSORS, "the tensors of engine signatures to"),
        (more_files, budgets.MAX_FILES, "the files to"),
        (more_file_bytes, budgets.MAX_FILE_BYTES, "files brings the bytes to"),
        (more_calls, budgets.MAX_CALLS, "the calls to"),
        (more_references, budgets.MAX_REFERENCES, "the references to"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_budget_is_taken_to_its_end_and_no_further(
    manifest_with: Callable[[int], VideoManifest], most: int, words: str
) -> None:
    parse_video_manifest(manifest_json(manifest_with(most)))
    with pytest.raises(ManifestError, match=f"{words} {most + 1}, at most {most} are read"):
        parse_video_manifest(manifest_json(manifest_with(most + 1)))


def test_the_programs_are_counted_before_any_is_put_in() -> None:
    """Had one call been looked at, it would be refused for the engine that is not there."""
    call = Call("nowhere", ("value:x",) * 1600, ())
    with pytest.raises(ManifestError, match=r"references, more than 1572864"):
        resolve_video(in_1024_passes(call))


HOSTILE_NAMES = {
    "control": "\x1b]0;owned\x07" * 90,
    "line_feeds": "x\nerror: all is well\n" * 40,
    "lone_surrogate": "\ud800" * 1000,
    "right_to_left": "\u202egnp.exe" * 100,
    "wide": "\U0001f600" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_what_a_message_quotes_is_one_printable_line_of_bounded_length(name: str) -> None:
    for error in {var for var in vars(errors).values() if isinstance(var, type)}:
        message = str(error(f"{name * 4000} is no name; rebuild the artifact"))
        assert len(message) <= MAX_MESSAGE_LETTERS
        assert message.isprintable()
        assert message.endswith("is no name; rebuild the artifact")
        assert message.encode()


def test_a_message_that_is_short_and_printable_is_left_as_it_is() -> None:
    for message in ("", "program 'début' lacks an engine", "x" * MAX_MESSAGE_LETTERS):
        assert str(ManifestError(message)) == message


def test_a_manifest_of_long_names_is_refused_in_few_words(tmp_path: Path) -> None:
    table = as_table(whole())
    table["programs"] |= {f"\U0001f600\x7f{at}" * 100: [] for at in range(8)}
    name, _, message = bounded(tmp_path / "artifact", json.dumps(table).encode())
    assert name == "ManifestError"
    assert len(message) <= MAX_MESSAGE_LETTERS
    table = as_table(whole())
    table["weights"][0]["file"] = "x" * (9 << 20)
    name, _, message = bounded(tmp_path / "other", json.dumps(table).encode())
    assert name == "ManifestError"
    assert len(message) <= MAX_MESSAGE_LETTERS


def test_what_is_within_all_budgets_is_checked_to_the_end(tmp_path: Path) -> None:
    """The references of a thousand calls fit: what is wrong is said of the files, which are looked at next."""
    engine = wide_engine(100)
    manifest = with_calls(engine, *[Call("wide", ("weight:layers.0.weight",) * 100, ())] * 1000)
    assert bounded(tmp_path / "artifact", manifest_json(manifest))[0] == ArtifactError.__name__


LISTED, ENGINE, WEIGHTS = "more/listed.bin", "engines/step.pt2", "weights/0.safetensors"


def with_sparse_file(folder: Path, path: str, size: int) -> bytes:
    """Make a folder with a file of holes, and every other file that its manifest lists; return that manifest."""
    manifest = whole()
    manifest = replace(manifest, files={**manifest.files, path: FileEntry("0" * 64, size)})
    for name, entry in manifest.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        os.truncate(folder / name, entry.size)
    return manifest_json(manifest)


@pytest.mark.parametrize(
    ("path", "size"),
    [(LISTED, 320 << 20), (WEIGHTS, 320 << 20), (ENGINE, 140 << 20)],
    ids=lambda value: str(value),
)
def test_a_file_is_hashed_in_memory_that_does_not_grow_with_it_or_is_read_once(
    tmp_path: Path, path: str, size: int
) -> None:
    """In 256 MiB: of twice the memory that is needed there is none."""
    name, _, message = bounded(tmp_path, with_sparse_file(tmp_path, path, size), cpu_seconds=60)
    assert name == "ArtifactError"
    assert message.startswith(f"{path} has SHA-256")


def test_what_would_be_read_into_memory_has_a_budget(tmp_path: Path) -> None:
    document = with_sparse_file(tmp_path, ENGINE, budgets.MAX_HELD_BYTES)
    name, code, message = bounded(tmp_path, document)
    assert (name, code) == ("ManifestError", 4)
    assert message.startswith("what is read into memory brings the bytes to")


@pytest.mark.parametrize("frozen_file", [True, False])
@pytest.mark.parametrize("change", [-1, 1, -5000])
def test_a_file_that_changes_its_size_behind_the_check_is_named(
    tmp_path: Path, change: int, frozen_file: bool
) -> None:
    content = bytes(5000)
    (tmp_path / "it").write_bytes(content)
    files = {"it": FileEntry(hashlib.sha256(content).hexdigest(), len(content))}
    folder = ArtifactFiles(tmp_path)
    try:
        folder.open_all(files)
        os.truncate(tmp_path / "it", len(content) + change)
        with pytest.raises(ArtifactError, match=f"5000 bytes when it was opened and {5000 + change} when"):
            folder.verified(files, frozenset(files) if frozen_file else frozenset())
        os.truncate(tmp_path / "it", len(content))
        assert folder.verified(files, frozenset()) == {"it": content}
    finally:
        folder.close()
