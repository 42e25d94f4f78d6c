"""The manifest: round trip, every way to be wrong a ManifestError, and the static check of programs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.errors import (
    ArtifactError,
    ManifestError,
)
from seko_runtime.format.manifest import FORMAT_VERSION, Call, FileEntry
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import VideoManifest, Viewer, ViewerPicture, parse_video_manifest

from . import toy, toy_whole

VIEWER = Viewer("It knows shapes.", ("a red disc", "a ring"), (ViewerPicture("viewer/0.png", "A disc"),))


def whole_manifest(**changes: object) -> VideoManifest:
    return listed(toy.toy_manifest(golden=toy.GOLDEN, **changes))


def listed(manifest: VideoManifest) -> VideoManifest:
    """With an entry for every file that a table names."""
    paths = {weight.file for weight in manifest.weights} | {engine.file for engine in manifest.engines}
    paths |= {*manifest.workload.files, toy.GOLDEN.file}
    return replace(manifest, files={path: FileEntry("0" * 64, 1) for path in paths})


def with_video(**changes: object) -> VideoManifest:
    golden = replace(toy_whole.GOLDEN, seeds=(0, 1))
    return listed(toy_whole.whole_manifest(2, **{"golden": golden, "viewer": VIEWER, **changes}))


def as_table(manifest: VideoManifest) -> Any:
    return json.loads(manifest_json(manifest))


def read(table: object) -> VideoManifest:
    return parse_video_manifest(json.dumps(table).encode())


def test_json_round_trip_is_exact_and_deterministic() -> None:
    for manifest in (whole_manifest(), with_video()):
        document = manifest_json(manifest)
        assert parse_video_manifest(document) == manifest
        assert manifest_json(parse_video_manifest(document)) == document
    assert manifest_json(whole_manifest(producer={"b": "ü", "a": "1"})) == manifest_json(
        whole_manifest(producer={"a": "1", "b": "ü"})
    )


def test_unknown_fields_are_ignored_and_optional_ones_may_be_absent() -> None:
    manifest = whole_manifest()
    table = as_table(manifest)
    table["added_later"] = {"anything": [1]}
    table["workload"]["stream"]["added_later"] = 1
    assert read(table) == manifest
    del table["workload"]["golden"], table["target"]["cpu_flags"], table["target"]["cuda"]
    assert read(table) == toy.changed(manifest, golden=None)


@pytest.mark.parametrize("other", [FORMAT_VERSION + 1, 10])
def test_another_format_is_named_before_anything_else_is_read(other: int) -> None:
    message = f"format version {other}, this runtime reads {FORMAT_VERSION}; install"
    with pytest.raises(ManifestError, match=message):
        read({"format_version": other, "everything": "else changed"})


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../b", "a//b", "./a", "a\\b", "", "a/", "a\0b", "a\nb", "x" * 300, "a/."],
)
def test_a_path_that_is_no_plain_relative_one_is_refused_wherever_it_stands(path: str) -> None:
    for place in ("weight", "engine", "golden", "files", "text", "viewer"):
        table = as_table(with_video())
        if place == "weight":
            table["weights"][0]["file"] = path
        elif place == "engine":
            table["engines"][0]["file"] = path
        elif place == "golden":
            table["workload"]["golden"]["file"] = path
        elif place == "text":
            table["workload"]["text"]["tokenizer"] = path
        elif place == "viewer":
            table["workload"]["viewer"]["pictures"][0]["file"] = path
        else:
            table["files"][path] = {"sha256": "0" * 64, "size": 1}
        with pytest.raises(ManifestError, match="expected a relative path"):
            read(table)


def test_a_viewer_is_shown_a_bounded_number_of_prompts_and_pictures() -> None:
    table = as_table(with_video())
    for name, entry in (("prompts", "a"), ("pictures", {"file": "viewer/0.png"})):
        wrong = {**table["workload"]["viewer"], name: [entry] * 65}
        with pytest.raises(ManifestError, match=f"viewer.{name} brings the {name} to 65, at most 64"):
            read({**table, "workload": {**table["workload"], "viewer": wrong}})


@pytest.mark.parametrize("table", ["stream", "video"])
@pytest.mark.parametrize(
    ("height", "width"), [(1 << 31, 1 << 31), (1 << 13, (1 << 13) + 1), (1, (1 << 26) + 1)]
)
def test_a_picture_that_no_machine_holds_is_refused_before_any_is_made(
    table: str, height: int, width: int
) -> None:
    """A preview is as large as the stream's table says, whatever the buffers are."""
    manifest = as_table(with_video())
    manifest["workload"][table] |= {"height": height, "width": width}
    with pytest.raises(
        ManifestError, match=f"{table} brings the pixels to {height * width}, at most 67108864"
    ):
        read(manifest)
    manifest["workload"][table] |= {"height": 1 << 13, "width": 1 << 13}
    read(manifest)


def _places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    places = [path]
    if isinstance(value, dict):
        places += [place for key in value for place in _places(value[key], (*path, key))]
    if isinstance(value, list):
        places += [place for index in range(len(value)) for place in _places(value[index], (*path, index))]
    return places


PLACES = _places(as_table(with_video()))
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)


@settings(max_examples=600)
@given(st.sampled_from(PLACES), JUNK, st.booleans())
def test_whatever_stands_anywhere_the_answer_is_a_manifest_or_a_manifest_error(
    place: tuple[Any, ...], junk: object, remove: bool
) -> None:
    table = as_table(with_video())
    if not place:
        table = junk
    else:
        inner = table
        for key in place[:-1]:
            inner = inner[key]
        if remove:
            del inner[place[-1]]
        else:
            inner[place[-1]] = junk
    try:
        resolve_video(read(table))
    except ArtifactError:
        return  # anything else is a traceback, and fails here


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_manifest(document: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_video_manifest(document)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"format_version": NaN}',
        b'{"format_version": 1, "format_version": 1}',
        b'{"format_version": true}',
        b'{"format_version": 1.0}',
        b'{"format_version": 0}',
        b'{"format_version": ' + b"9" * 6000 + b"}",
        b"[" * 100_000,
        b'{"format_version": 1, "name": "\\ud800"}',
        b" " * ((16 << 20) + 1),
    ],
    ids=range(12),
)
def test_json_traps_are_manifest_errors(document: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_video_manifest(document)


def test_a_used_file_must_be_listed() -> None:
    table = as_table(whole_manifest())
    del table["files"]["engines/step.pt2"]
    with pytest.raises(ManifestError, match=r"'engines/step.pt2' is used but has no entry"):
        read(table)


def test_programs_resolve_indices_and_passes() -> None:
    programs = resolve_video(toy.toy_manifest())
    assert [len(programs[name]) for name in ("prompt", "begin", "denoise", "context")] == [
        1,
        1,
        toy.PASSES,
        1,
    ]
    steps = [call for call in programs["denoise"][1] if call.engine == "step"]
    assert [call.inputs[1].name for call in steps] == ["layers.0.weight", "layers.1.weight"]
    assert [call.inputs[2].index for call in steps] == [(1,), (1,)]
    assert [call.inputs[6].index for call in steps] == [(0,), (1,)]
    context = next(call for call in programs["context"][0] if call.engine == "step")
    assert context.inputs[2].index == (toy.PASSES,)


def with_begin(*inputs: str, output: str = "buffer:latents") -> VideoManifest:
    manifest = toy.toy_manifest()
    call = Call("begin", inputs or ("buffer:seeds", "buffer:frames", "weight:cell"), (output,))
    return replace(manifest, programs={**manifest.programs, "begin": (call,)})


@pytest.mark.parametrize(
    ("manifest", "error", "words"),
    [
        (
            with_begin("buffer:seeds", "buffer:frames", "weight:none"),
            ManifestError,
            "weight 'none' does not exist",
        ),
        (
            with_begin("buffer:seeds", "buffer:frames"),
            ArtifactError,
            "2 inputs, the engine's signature has 3",
        ),
        (with_begin("buffer:seeds", "buffer:frames", "weight:gain"), ArtifactError, "float32 [3]"),
        (with_begin("buffer:seeds", "value:x", "weight:cell"), ManifestError, "value 'x' does not exist"),
        (with_begin("buffer:seeds", "buffer:frames", "file:cell"), ManifestError, "no reference"),
        (with_begin("buffer:seeds", "buffer:frames", "weight:cell[12]"), ManifestError, "has no index 12"),
        (with_begin("buffer:seeds", "buffer:frames", "weight:cell[0][0]"), ManifestError, "has no index 0"),
        (with_begin("buffer:seeds", "buffer:frames", "weight:cell[01]"), ManifestError, "no reference"),
        (with_begin("buffer:seeds", "buffer:frames", "weight:cell[-1]"), ManifestError, "no reference"),
        (with_begin("buffer:seeds", "buffer:frames", "weight:{layer}"), ManifestError, "no reference"),
        (
            with_begin("buffer:seeds", "buffer:frames", "weight:cell[pass]"),
            ManifestError,
            "names a pass outside",
        ),
        (with_begin(output="buffer:frames"), ArtifactError, "frames is int64"),
        (with_begin(output="weight:cell"), ArtifactError, "weight cell"),
        (with_begin(output="buffer:text.embeddings"), ArtifactError, "text.embeddings"),
    ],
)
def test_a_program_that_does_not_fit_is_refused_with_both_sides(
    manifest: VideoManifest, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        resolve_video(manifest)
    assert words in str(caught.value)


@given(
    st.lists(st.integers(1, 4), max_size=4).map(tuple),
    st.lists(st.integers(0, 4), max_size=5).map(tuple),
)
def test_a_references_indices_select_what_numpys_do(shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    manifest = with_begin("buffer:seeds", "buffer:frames", f"weight:cell{''.join(f'[{at}]' for at in index)}")
    weights = tuple(
        replace(weight, shape=shape) if weight.name == "cell" else weight for weight in manifest.weights
    )
    try:
        selected = np.empty(shape)[index].shape
    except IndexError:
        selected = None
    engines = tuple(
        replace(engine, inputs=(*engine.inputs[:2], replace(engine.inputs[2], shape=selected or ())))
        if engine.name == "begin"
        else engine
        for engine in manifest.engines
    )
    manifest = replace(manifest, weights=weights, engines=engines)
    if selected is None:
        with pytest.raises(ManifestError, match="has no index"):
            resolve_video(manifest)
        return
    call = resolve_video(manifest)["begin"][0][0]
    assert (call.inputs[2].name, call.inputs[2].index) == ("cell", index)


def test_writing_to_what_a_failed_chunk_could_not_restore_is_refused() -> None:
    manifest = toy.toy_manifest()
    prompt = manifest.programs["prompt"]
    for programs in ({"begin": prompt}, {"context": prompt}):
        with pytest.raises(ManifestError, match=r"writes buffer prompt.mean of role session"):
            resolve_video(replace(manifest, programs={**manifest.programs, **programs}))
    begin = manifest.programs["begin"]
    with pytest.raises(ManifestError, match="writes buffer latents of role state, may write session"):
        resolve_video(replace(manifest, programs={**manifest.programs, "prompt": begin}))


def test_tables_that_contradict_themselves_are_refused() -> None:
    manifest = toy.toy_manifest()
    for changes, words in (
        ({"buffers": (*manifest.buffers, manifest.buffers[0])}, "'kv' twice"),
        ({"kv": replace(manifest.workload.kv, pool_bytes=1)}, "kv.pool_bytes is 1"),
        ({"output": "kv"}, "output 'kv'"),
        ({"golden": replace(toy.GOLDEN, seeds=(1, 2))}, "golden.seeds has 2"),
        ({"programs": {"begin": ()}}, "programs lack"),
        ({"programs": {**manifest.programs, "denoise_full": (), "warm": ()}}, "unknown"),
        (
            {"buffers": (*manifest.buffers, replace(manifest.buffers[3], name="other"))},
            "host buffer 'other'",
        ),
        (
            {
                "buffers": tuple(
                    replace(b, dtype="int32") if b.name == "seeds" else b for b in manifest.buffers
                )
            },
            "seeds",
        ),
    ):
        with pytest.raises(ManifestError) as caught:
            resolve_video(toy.changed(manifest, **changes))
        assert words in str(caught.value)


def test_a_number_that_json_cannot_say_again_is_refused() -> None:
    document = manifest_json(whole_manifest(model={"n": 1.5})).replace(b"1.5", b"1e999")
    with pytest.raises(ManifestError, match="1e999"):
        parse_video_manifest(document)


@pytest.mark.parametrize("seed", [-(1 << 62), 1 << 62])
def test_a_golden_seed_that_no_session_takes_is_refused(seed: int) -> None:
    table = as_table(whole_manifest())
    table["workload"]["golden"]["seeds"] = [seed]
    with pytest.raises(ManifestError, match=r"golden\.seeds"):
        read(table)


def renamed(manifest: VideoManifest, name: str, **changes: Any) -> tuple[Any, ...]:
    """The manifest's buffers with one of them changed; ``drop`` takes it out."""
    if changes.get("drop"):
        return tuple(buffer for buffer in manifest.buffers if buffer.name != name)
    return tuple(replace(buffer, **changes) if buffer.name == name else buffer for buffer in manifest.buffers)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("conditioning_frames", {"shape": (1,)}, "host buffer conditioning_frames"),
        ("conditioning_frames", {"dtype": "int32"}, "host buffer conditioning_frames"),
        ("conditioning_frames", {"drop": True}, "belong together"),
        ("conditioning.latents", {"drop": True}, "belong together"),
        ("conditioning.latents", {"dtype": "bfloat16"}, "buffer conditioning.latents is session bfloat16"),
        ("conditioning.latents", {"role": "state"}, "buffer conditioning.latents is state"),
        (
            "text.ids",
            {"shape": (1, 6)},
            "buffer text.ids is session int64 [1, 6], expected session int64 [1, 5]",
        ),
        ("text.ids", {"shape": (2, 5)}, "buffer text.ids"),
        ("text.ids", {"dtype": "int32"}, "buffer text.ids"),
        ("text.ids", {"drop": True}, "buffer text.ids is not there"),
        ("text.encoded", {"shape": (2, 5, 4)}, "buffer text.encoded"),
        ("text.encoded", {"dtype": "float16"}, "buffer text.encoded"),
        ("text.embeddings", {"drop": True}, "needs the buffer text.embeddings"),
        ("image", {"shape": (8, 24, 4)}, "buffer image is session uint8 [8, 24, 4]"),
        ("image", {"shape": (8,)}, "buffer image"),
        ("image", {"dtype": "float32"}, "buffer image"),
        ("image", {"drop": True}, "buffer image is not there"),
        ("image.latents", {"shape": (4, 2, 1, 3)}, "buffer image.latents"),
        ("decode.latents", {"shape": (2, 4, 3, 1, 3)}, "buffer decode.latents"),
        ("decode.latents", {"role": "state"}, "buffer decode.latents"),
        ("decode.latents", {"drop": True}, "buffer decode.latents is not there"),
        ("decode.latents", {"shape": (2, 4, 1, 1, 3)}, "buffer video.first is"),  # decoded in two parts
        ("video", {"shape": (2, 9, 8, 24, 3)}, "buffer video is"),
        ("video", {"dtype": "float32"}, "buffer video is"),
        ("video.first", {"shape": (2, 8, 8, 24, 3)}, "buffer video.first is"),
        ("vae.cache.00", {"shape": (1, 2, 1, 3, 4)}, "axis 0 is not the 2 rows"),
        ("vae.cache.00", {"shape": ()}, "axis 0 is not the 2 rows"),
    ],
)
def test_a_buffer_of_text_pictures_or_video_that_does_not_fit(
    name: str, changes: dict[str, Any], words: str
) -> None:
    manifest = with_video()
    resolve_video(manifest)
    with pytest.raises(ManifestError) as caught:
        resolve_video(replace(manifest, buffers=renamed(manifest, name, **changes)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("program", "old", "new", "words"),
    [
        ("decode", "buffer:video[row]", "buffer:video", "is taken whole"),
        ("decode", "buffer:decode.latents[row]", "buffer:latents", "role state"),
        ("decode", "buffer:vae.cache.00[row]", "buffer:vae.cache.00[pass]", "names a pass outside"),
        ("decode", "buffer:vae.cache.00[row]", "weight:vae.cache.00[row]", "names a row"),
        ("decode", "buffer:vae.cache.00[row]", "buffer:vae.cache.00[row][row]", "names a row"),
        ("begin", "buffer:seeds", "buffer:seeds[row]", "names a row"),
        ("prompt", "buffer:prompt.mean", "buffer:prompt.mean[row]", "prompt.mean is float32 [4]"),
        ("begin", "buffer:conditioning.latents", "buffer:decode.latents", "runs beside it"),
        ("text", "buffer:text.encoded", "buffer:text.embeddings", ""),
        ("decode_first", "buffer:video.first[row]", "buffer:video[row]", "video"),
    ],
)
def test_a_reference_that_only_other_programs_may_have(program: str, old: str, new: str, words: str) -> None:
    manifest = with_video()
    calls = tuple(
        replace(
            call,
            inputs=tuple(new if ref == old else ref for ref in call.inputs),
            outputs=tuple(new if ref == old else ref for ref in call.outputs),
        )
        for call in manifest.programs[program]
    )
    assert calls != manifest.programs[program]
    with pytest.raises(ArtifactError) as caught:
        resolve_video(replace(manifest, programs={**manifest.programs, program: calls}))
    assert words in str(caught.value)


def test_decoding_writes_its_own_buffers_alone_and_not_what_it_is_fed_with() -> None:
    manifest = with_video()
    engine = toy.EngineSpec(
        "feed",
        "engines/copy.pt2",
        manifest.engines[0].inputs[:1],
        (toy.TensorSpec("y", (4, 2, 1, 3), "float32"),),
    )
    engine = replace(engine, inputs=(toy.TensorSpec("x", (4, 2, 1, 3), "float32"),))
    call = Call("feed", ("buffer:decode.latents[row]",), ("buffer:decode.latents[row]",))
    programs = {**manifest.programs, "decode": (*manifest.programs["decode"], call)}
    with pytest.raises(ManifestError, match=r"writes buffer decode.latents, which the host fills"):
        resolve_video(replace(manifest, engines=(*manifest.engines, engine), programs=programs))


@pytest.mark.parametrize(
    ("changes", "drop", "words"),
    [
        ({"text": None}, None, "table text and the program text belong together"),
        ({}, "text", "table text and the program text belong together"),
        ({"video": None}, None, "table video and the program decode belong together"),
        ({}, "decode", "one of decode_first and decode"),
        ({}, "decode_first", "one of decode_first and decode"),
    ],
)
def test_a_table_and_its_programs_are_there_together(
    changes: dict[str, Any], drop: str | None, words: str
) -> None:
    manifest = with_video()
    programs = {name: calls for name, calls in manifest.programs.items() if name != drop}
    with pytest.raises(ManifestError, match=words):
        resolve_video(toy.changed(manifest, programs=programs, **changes))


def test_a_golden_of_video_needs_video_and_a_batch_without_end_is_refused() -> None:
    golden = replace(toy.GOLDEN, video_step=2)
    with pytest.raises(ManifestError, match="makes no video"):
        resolve_video(toy.changed(whole_manifest(), golden=golden))
    manifest = with_video()
    with pytest.raises(ManifestError, match="host buffer seeds is"):
        resolve_video(toy.changed(manifest, state_rows=1 << 31, golden=None))


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        ("text", "tokens", 0),
        ("text", "pad_id", -1),
        ("text", "truncate", 1),
        ("video", "first_frames", 0),
        ("video", "width", 1.5),
        ("schedule", "shift", 0),
        ("schedule", "shift", "5"),
        ("golden", "video_step", -1),
        ("golden", "prompt", "a\nb"),
    ],
)
def test_new_fields_have_bounds(table: str, field: str, value: object) -> None:
    whole = as_table(with_video())
    whole["workload"][table][field] = value
    with pytest.raises(ManifestError, match=field):
        read(whole)
