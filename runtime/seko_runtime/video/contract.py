"""The contract of the video workload: the programs that a video artifact has, and the buffers that the host writes,
reads or splits into rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from seko_runtime.controls import pictures, video_in
from seko_runtime.errors import ManifestError
from seko_runtime.executor.contract import CALL_ROWS, RANK, Contract, ProgramRule
from seko_runtime.executor.programs_check import resolve_programs
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import ROLES, Buffer, InputSpec
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.manifest import (
    DECODE_LATENTS,
    PICTURES,
    ROLLING_BANKS,
    SINK_AVERAGED,
    Stream,
    VideoManifest,
)

TEXT_BUFFER = "text.embeddings"
TEXT_IDS, TEXT_ENCODED = "text.ids", "text.encoded"
IMAGE, PICTURE_LEVELS, LAST_PICTURE_LEVELS = PICTURES  # the last one for models that end with a picture
IMAGE_LATENTS = "image.latents"
RECALL = "recall."  # prefix of the names of cache buffers beside keys and values, with any number of entries a frame
CONDITIONING_LATENTS, CONDITIONING_FRAMES = "conditioning.latents", "conditioning_frames"
# buffers of text and picture, used for one row at a time
OF_ONE_PROMPT = (TEXT_IDS, TEXT_ENCODED, IMAGE, IMAGE_LATENTS)
_OF_ONE_PICTURE = (
    "picture.",
)  # prefix of the names of buffers that the program `condition` uses, for one row at a time
PICTURE_CONDITION = "picture.condition"  # result of the program `condition`
_PICTURE_KINDS = (pictures.CONDITION_KIND,)  # kinds of the input per session that takes the result
REFERENCE_LATENTS = "reference.latents"
FRONT_CACHES = (
    "front.k",
    "front.v",
)  # keys and values of tokens before a stream, which the passes of its first chunk compute
PICTURE_AXIS = 2  # axis of pixel rows in a buffer of video frames, along which ranks may share it
VIDEO_FIRST, VIDEO = "video.first", "video"
PICTURE_CHANNELS = 3
# Encoders: from token ids to text embeddings, from a picture to latents, from a picture to an input per session of
# the kind picture_condition.
ENCODER_PROGRAMS = ("text", "encode", "condition")
DECODE_PROGRAMS = ("decode_first", "decode")
ENCODE_VIDEO_FIRST, ENCODE_VIDEO = "encode_video_first", "encode_video"  # programs, of input video
# frames of a row's next chunk, and the latents that the programs above make of them
VIDEO_IN_FRAMES, VIDEO_IN_LATENTS = "video_in.frames", "video_in.latents"
# buffers that belong to no input
_OWN_MEANING = (TEXT_BUFFER, *OF_ONE_PROMPT, CONDITIONING_LATENTS, REFERENCE_LATENTS, VIDEO_IN_LATENTS)


def saved_input(name: str) -> str:
    """Return the name of a caller's input in the saved state of a stream. For an input that is kept with a chunk, a dot
    and the number of the chunk's slot follow."""
    return f"saved.{name}"


def group_buffer(name: str, group: str) -> str:
    """Return the name of the host buffer of a layer group, the layers that share one ring size. ``""`` names the layer
    group with the largest ring. The layer groups are listed in `Stream.rings`."""
    return f"{name}.{group}" if group else name


def resolve_video(manifest: VideoManifest) -> Programs:
    """Return the programs of a video artifact, with every reference to a buffer or layer resolved and checked; see
    `resolve_programs`."""
    return resolve_programs(manifest, video_contract(manifest))


def video_contract(manifest: VideoManifest) -> Contract:
    """Return the contract of a video artifact.

    A chunk runs the programs ``begin``, ``denoise`` and ``context`` of its bucket. Programs named ``*_full`` are for
    rows whose caches are full, and programs named ``*_first`` for the first chunk of a stream, if first chunks have
    engines of their own. Without a program ``context`` in the artifact, the denoise passes write the cache.
    A denoise program is run once for each pass of the chunk, and a decode program once for each row and each part of a
    chunk (`VideoManifest.decode_parts`). The prompt program is run once for each row, if the program's calls of engines
    name a row.
    """
    passes = manifest.workload.schedule.table_passes
    buckets: tuple[int | None, ...] = (None,) if manifest.pool is None else manifest.pool.buckets
    calls = frozenset(ROLES) - {"lane"}
    rules: dict[str, ProgramRule] = {}
    units: list[tuple[str, ...]] = []
    for bucket in buckets:
        of_chunk = partial(ProgramRule, calls, frozenset({"cache", "state"}), bucket=bucket or 0)
        rules[ProgramKey("begin", bucket).name] = of_chunk()
        for full, first in ((False, False), (True, False), (False, True)):
            unit = [ProgramKey("denoise", bucket, full, first=first).name]
            required = not (full or first)
            rules[unit[0]] = of_chunk("pass", range(passes), required=required)
            if manifest.has_context:
                unit.append(ProgramKey("context", bucket, full, first=first).name)
                rules[unit[1]] = of_chunk("pass", range(passes, passes + 1), required=required)
            units.append(tuple(unit))
    of_prompt = partial(ProgramRule, calls, frozenset({"session"}))
    prompt = manifest.programs.get("prompt", ())
    if any("[row]" in ref for call in prompt for ref in (*call.inputs, *call.outputs)):
        rules["prompt"] = of_prompt("row", range(manifest.rows))
    else:
        rules["prompt"] = of_prompt()
    rules |= {name: of_prompt(required=False) for name in ENCODER_PROGRAMS}
    lane = frozenset({"lane"})
    decoding = ProgramRule(lane, lane, "row", range(manifest.rows), by_row=True, required=False)
    rules |= dict.fromkeys(DECODE_PROGRAMS, decoding)
    held = lane | {"session"}
    encoding = ProgramRule(held, held, "row", range(manifest.rows), by_row=True, required=False)
    rules |= dict.fromkeys((ENCODE_VIDEO_FIRST, ENCODE_VIDEO), encoding)
    return Contract(
        programs=rules,
        together=(
            *(unit for unit in units if len(unit) > 1),
            DECODE_PROGRAMS,
            (ENCODE_VIDEO_FIRST, ENCODE_VIDEO),
        ),
        units=tuple(units),
        fed=frozenset({DECODE_LATENTS}),
        anywhere=frozenset({RANK} if manifest.ranks > 1 else ()),
        check_buffers=partial(_check_buffers, manifest),
    )


def _check_buffers(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    """Check the shape, dtype and role of each buffer that the host reads or writes.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest; of its programs only the names are used.
    buffers : Mapping[str, Buffer]
        The manifest's buffers by name.

    Raises
    ------
    ManifestError
        If a buffer has another shape, dtype or role, or a buffer that a program or table needs is missing.
    """
    batch = manifest.state_rows
    if manifest.pool is not None and manifest.call_rows >= batch:
        raise ManifestError(
            f"pool.buckets end with {manifest.call_rows}, the pool has {batch} rows, one of them spare"
        )
    _check_chunk_inputs(manifest, buffers)
    for buffer in buffers.values():
        shared = buffer.name in OF_ONE_PROMPT or buffer.name.startswith(_OF_ONE_PICTURE)
        own = buffer.role == "session" and manifest.pool is not None and not shared
        if buffer.role == "cache" or own:
            _check_row_axis(buffer, batch)
        if buffer.role == "lane" and (not buffer.shape or buffer.shape[0] != manifest.rows):
            raise ManifestError(
                f"lane buffer {buffer.name} {list(buffer.shape)}: axis 0 is not the {manifest.rows} rows of the batch"
            )
    _check_shares(manifest, buffers)
    caches = [buffer for buffer in buffers.values() if buffer.role == "cache"]
    _check_cache_frames(manifest.workload.stream, batch, caches)
    pool_bytes = sum(buffer.nbytes for buffer in buffers.values() if buffer.role == "cache")
    if manifest.workload.kv.pool_bytes != pool_bytes:
        raise ManifestError(
            f"kv.pool_bytes is {manifest.workload.kv.pool_bytes}, the cache buffers take {pool_bytes}"
        )
    latents = _latent_shape(manifest, manifest.call_rows)
    output = buffers.get(manifest.workload.output)
    wanted = ("state", latents, "float32", 0)
    if output is None or (output.role, output.shape, output.dtype, output.row_axis) != wanted:
        raise ManifestError(
            f"output {manifest.workload.output!r} is no state buffer of float32 {list(latents)} with row_axis 0"
        )
    _check_text(manifest, buffers)
    _check_conditioning(manifest, buffers)
    _check_reference(manifest, buffers)
    _check_condition(manifest, buffers)
    _check_video(manifest, buffers)
    _check_rebuilt(manifest, buffers)
    _check_video_in(manifest, buffers)
    golden = manifest.workload.golden
    if golden is not None and len(golden.seeds) != manifest.call_rows:
        raise ManifestError(
            f"golden.seeds has {len(golden.seeds)} seeds, a call has {manifest.call_rows} rows"
        )
    if golden is not None and golden.video_step and manifest.workload.video is None:
        raise ManifestError(f"golden.video_step is {golden.video_step}, but the artifact makes no video")
    vocabulary, text_table = text_vocabulary(manifest), manifest.workload.text
    if text_table is not None and vocabulary is not None and text_table.pad_id >= vocabulary:
        raise ManifestError(
            f"text.pad_id is {text_table.pad_id}, the text engine looks up ids below {vocabulary}; rebuild the artifact"
        )


def _check_chunk_inputs(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    rows = manifest.call_rows
    frames = (rows, manifest.workload.stream.chunk_frames)
    host = {"seeds": (rows,), "frames": frames}
    for kind in ("", *manifest.workload.stream.rings):
        host[group_buffer("write_slots", kind)], host[group_buffer("valid_tokens", kind)] = frames, (rows,)
    host[CONDITIONING_FRAMES] = (rows,)
    caller_buffers = _check_inputs(manifest, buffers, host)
    if manifest.pool is not None:
        host[CALL_ROWS] = (rows,)
        if CALL_ROWS not in buffers:
            raise ManifestError(f"the pool's programs need the host buffer {CALL_ROWS!r}, which is not there")
    if manifest.ranks > 1:
        host[RANK] = (1,)
        if RANK not in buffers:
            raise ManifestError(
                f"programs of {manifest.ranks} ranks need the host buffer {RANK!r}, which is not there"
            )
    for buffer in buffers.values():
        if buffer.role != "host" or buffer.name in caller_buffers:
            continue
        if buffer.name not in host:
            raise ManifestError(
                f"host buffer {buffer.name!r} is not one that the host fills: {', '.join(host)}, nor of an input"
            )
        if (buffer.shape, buffer.dtype, buffer.row_axis) != (host[buffer.name], "int64", 0):
            raise ManifestError(
                f"host buffer {buffer.name} is {buffer.dtype} {list(buffer.shape)} with row_axis {buffer.row_axis}, "
                f"the host writes int64 {list(host[buffer.name])}, with row_axis 0"
            )


def _check_inputs(
    manifest: VideoManifest, buffers: Mapping[str, Buffer], host: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """Check that the buffer of every input has the shape of a row, for each row; return the buffers of the inputs that
    the caller supplies."""
    caller_buffers: set[str] = set()
    names: set[str] = set()
    for spec in manifest.inputs:
        where = f"input {spec.name!r}"
        if spec.name in names:
            raise ManifestError(f"inputs hold {spec.name!r} twice; rebuild the artifact")
        names.add(spec.name)
        if spec.source == "host":
            if spec.buffer not in host or spec.per != "chunk":
                raise ManifestError(f"{where} is one that the host fills, expected one of {', '.join(host)}")
            continue
        if spec.buffer in caller_buffers or spec.buffer in host or spec.buffer in _OWN_MEANING:
            raise ManifestError(f"{where} lies in the buffer {spec.buffer!r}, which has another meaning")
        caller_buffers.add(spec.buffer)
        if spec.per in ("session", "prompt"):
            if spec.default == "hold":
                raise ManifestError(f"{where} is per {spec.per} and always held, expected zeros or required")
            _expect(buffers, spec.buffer, "session", (manifest.state_rows, *spec.shape), spec.dtype)
        elif spec.per == "chunk" and spec.kind == video_in.FRAMES_KIND:
            if spec.default != "required" or spec.buffer != VIDEO_IN_FRAMES:
                raise ManifestError(
                    f"{where} is {spec.default} in the buffer {spec.buffer!r}, expected required in {VIDEO_IN_FRAMES!r}"
                )
            _expect(buffers, spec.buffer, "session", (manifest.state_rows, *spec.shape), spec.dtype)
        elif spec.per == "chunk":
            _expect(buffers, spec.buffer, "host", (manifest.call_rows, *spec.shape), spec.dtype)
        else:
            passes = manifest.workload.schedule.table_passes + manifest.has_context
            if spec.shape[:1] != (passes,):
                raise ManifestError(
                    f"{where} has shape {list(spec.shape)}, expected [{passes}, ...]: a pass each"
                )
            shape = (passes, manifest.call_rows, *spec.shape[1:])
            _expect(buffers, spec.buffer, "host", shape, spec.dtype, row_axis=1)
    for name in names:
        stem, _, slot = name.rpartition(".")
        if saved_input(name) in buffers or (stem in names and slot.isdecimal()):
            raise ManifestError(f"input {name!r} has the name of something else in a stream's saved state")
    return caller_buffers


def _check_row_axis(buffer: Buffer, batch: int) -> None:
    """Check that the row axis of a buffer is a multiple of the number of rows, so that one row can be cleared or
    moved."""
    axis = buffer.row_axis
    if len(buffer.shape) <= axis or buffer.shape[axis] % batch:
        raise ManifestError(
            f"{buffer.role} buffer {buffer.name} {list(buffer.shape)}: axis {axis} cannot be cut into the {batch} rows "
            "of the batch"
        )


def _check_cache_frames(stream: Stream, batch: int, caches: Sequence[Buffer]) -> None:
    """Check the number of frames in cache buffers: sink and ring in one buffer, or each in a buffer of its own."""
    pinned = stream.reference_frames + stream.sink_frames
    rings = {stream.ring_frames, *stream.rings.values()}
    wanted = {pinned, *rings, *(pinned + ring for ring in rings)}
    expected_frames = f"{pinned} frames before the ring and rings of {', '.join(map(str, sorted(rings)))}"
    frames_held: set[int] = set()
    for buffer in caches:
        if buffer.name in (*FRONT_CACHES, SINK_AVERAGED, ROLLING_BANKS):
            continue
        # entries of one row: tokens in buffers of layers, otherwise frames
        entries = buffer.shape[buffer.row_axis] // batch
        if buffer.name.startswith(RECALL):
            if entries % (pinned + stream.ring_frames):
                raise ManifestError(
                    f"cache buffer {buffer.name} holds {entries} entries a row, expected a multiple of the "
                    f"{pinned + stream.ring_frames} frames of the stream's cache; rebuild the artifact"
                )
            continue
        frames, rest = divmod(entries, stream.frame_tokens)
        matching = wanted & ({frames} if not rest else set()) | wanted & (
            set() if buffer.row_axis else {entries}
        )
        if not matching:
            raise ManifestError(
                f"cache buffer {buffer.name} holds {entries} entries a row, the stream has {expected_frames}, each "
                f"frame of {stream.frame_tokens} tokens; rebuild the artifact"
            )
        frames_held |= matching
    for ring in sorted(rings):
        if pinned + ring not in frames_held and not {pinned, ring} - {0} <= frames_held:
            raise ManifestError(
                f"no cache buffer holds a ring of {ring} frames, the stream has {expected_frames}; rebuild the artifact"
            )


def text_vocabulary(manifest: VideoManifest) -> int | None:
    """Return the number of token ids that the program ``text`` can look up; None if the number is unknown.

    A token id is an index into a table that is one of the engine's inputs, so no id may exceed the longest table.
    """
    specs = {engine.name: engine.inputs for engine in manifest.engines}
    tables = [
        spec.shape[0]
        for call in manifest.programs.get("text", ())
        if f"buffer:{TEXT_IDS}" in call.inputs
        # the number of a call's inputs is checked later, so the two may differ in length
        for ref, spec in zip(call.inputs, specs.get(call.engine, ()), strict=False)
        if ref.startswith("weight:") and len(spec.shape) == 2
    ]
    return max(tables, default=None)


def _check_text(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    batch, text = manifest.state_rows, buffers.get(TEXT_BUFFER)
    if text is not None and (
        text.role != "session" or text.row_axis or len(text.shape) != 3 or text.shape[0] != batch
    ):
        raise ManifestError(
            f"{TEXT_BUFFER} is a {text.role} buffer {list(text.shape)} with row_axis {text.row_axis}, expected session "
            f"[{batch}, n, n] with row_axis 0"
        )
    if ("text" in manifest.programs) != (manifest.workload.text is not None):
        raise ManifestError("the table text and the program text belong together, expected both or none")
    if manifest.workload.text is None:
        return
    if text is None:
        raise ManifestError(f"the program text needs the buffer {TEXT_BUFFER}, which is not there")
    _expect(buffers, TEXT_IDS, "session", (1, manifest.workload.text.tokens), "int64")
    _expect(buffers, TEXT_ENCODED, "session", (1, *text.shape[1:]), text.dtype)


def _check_rebuilt(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    video = manifest.workload.video
    if not manifest.workload.stream.rebuilt:
        return
    if video is None or "encode" not in manifest.programs or not manifest.has_context or manifest.ranks > 1:
        raise ManifestError(
            "stream.rebuilt needs the programs context, decode and encode, in one process; rebuild the artifact"
        )
    if manifest.decode_parts > 1:  # the buffer of video would hold the last part alone
        raise ManifestError("stream.rebuilt needs chunks that are decoded in one call; rebuild the artifact")
    _expect(buffers, IMAGE, "session", (video.height, video.width, PICTURE_CHANNELS), "uint8")


def _check_conditioning(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    if (CONDITIONING_LATENTS in buffers) != (CONDITIONING_FRAMES in buffers):
        raise ManifestError(
            f"{CONDITIONING_LATENTS} and {CONDITIONING_FRAMES} belong together, expected both or none"
        )
    if CONDITIONING_LATENTS in buffers:
        _expect(
            buffers, CONDITIONING_LATENTS, "session", _latent_shape(manifest, manifest.state_rows), "float32"
        )
        _expect(buffers, CONDITIONING_FRAMES, "host", (manifest.call_rows,), "int64")
    if "encode" not in manifest.programs:
        return
    if CONDITIONING_LATENTS not in buffers:
        raise ManifestError(f"the program encode needs the buffer {CONDITIONING_LATENTS}, which is not there")
    channels, rows, columns = manifest.workload.stream.latent_shape
    image = buffers.get(IMAGE)
    height, width = (*image.shape, 0, 0)[:2] if image is not None else (0, 0)
    _expect(buffers, IMAGE, "session", (height, width, PICTURE_CHANNELS), "uint8")
    _expect(buffers, IMAGE_LATENTS, "session", (channels, 1, rows, columns), "float32")


def picture_input(manifest: VideoManifest) -> InputSpec | None:
    """Return the input per session that the program `condition` computes from a picture; None without that
    program."""
    if "condition" not in manifest.programs:
        return None
    pictures = [
        spec for spec in manifest.caller_inputs if spec.kind in _PICTURE_KINDS and spec.per == "session"
    ]
    if len(pictures) != 1:
        raise ManifestError(
            f"the program condition needs one input per session of the kind {_PICTURE_KINDS[0]}, found "
            f"{len(pictures)}; rebuild the artifact"
        )
    return pictures[0]


def begins_with_picture(manifest: VideoManifest) -> bool:
    """Return whether every session of an artifact begins with a picture. Its video needs no words, so that an empty
    prompt is taken."""
    spec, portrait = picture_input(manifest), manifest.workload.stream.reference_frames > 0
    return (portrait and "encode" in manifest.programs) or (spec is not None and spec.default == "required")


def start_pictures(manifest: VideoManifest) -> int:
    """Return the number of pictures of ``image`` with which a session of this artifact begins: 2 for a model that takes
    a first and a last picture, otherwise 1."""
    return 1 + any(buffer.name == LAST_PICTURE_LEVELS for buffer in manifest.buffers)


def without_kinds(
    manifest: VideoManifest, inputs: Mapping[str, Any], kinds: Collection[str]
) -> dict[str, Any]:
    """Return the inputs of a session, by name, that are of other kinds."""
    left_out = {spec.name for spec in manifest.caller_inputs if spec.kind in kinds}
    return {name: array for name, array in inputs.items() if name not in left_out}


def input_of_picture(manifest: VideoManifest, image: object) -> str:
    """Return the name of the input that is computed from the start picture; empty if the model has no such input, or no
    picture was passed."""
    spec = None if image is None else picture_input(manifest)
    return "" if spec is None else spec.name


def _check_condition(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    spec = picture_input(manifest)
    if spec is None:
        return
    image = buffers.get(PICTURE_LEVELS)
    height, width = (*image.shape, 0, 0)[:2] if image is not None else (0, 0)
    for name in (PICTURE_LEVELS, *({LAST_PICTURE_LEVELS} & set(buffers))):
        _expect(buffers, name, "session", (height, width, PICTURE_CHANNELS), "float32")
    _expect(buffers, PICTURE_CONDITION, "session", spec.shape, spec.dtype)


def _check_reference(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    stream = manifest.workload.stream
    if not stream.reference_frames:
        return
    channels, rows, columns = stream.latent_shape
    shape = (manifest.state_rows, channels, stream.reference_frames, rows, columns)
    _expect(buffers, REFERENCE_LATENTS, "session", shape, "float32")
    if not manifest.has_context and CONDITIONING_FRAMES not in buffers:
        raise ManifestError(
            f"reference frames without a context pass need the buffer {CONDITIONING_FRAMES}, which is not there"
        )


def _check_shares(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    """Check that each buffer that is split across ranks names the axis of the split."""
    for buffer in buffers.values():
        axis, shared = buffer.rank_axis, buffer.role in ("cache", "lane") and manifest.ranks > 1
        if axis and not (shared and buffer.row_axis < axis < len(buffer.shape)):
            raise ManifestError(
                f"{buffer.role} buffer {buffer.name} {list(buffer.shape)} has rank_axis {axis}, expected an axis after "
                f"the rows of a cache or lane buffer of several ranks; there are {manifest.ranks}"
            )


def _check_video(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    video, rows = manifest.workload.video, manifest.rows
    if ("decode" in manifest.programs) != (video is not None):
        raise ManifestError("the table video and the program decode belong together, expected both or none")
    if video is None:
        return
    height, share = video.height, PICTURE_AXIS if manifest.shares_decoding else 0
    if share:
        height, rest = divmod(height, manifest.ranks)
        axes = {name: buffers[name].rank_axis for name in (VIDEO_FIRST, VIDEO) if name in buffers}
        if rest or set(axes.values()) != {share}:
            raise ManifestError(
                f"{manifest.ranks} ranks share pictures of {video.height} rows by the axes {axes}, expected an even "
                f"share of axis {share} of both"
            )
    picture = (height, video.width, PICTURE_CHANNELS)
    parts = manifest.decode_parts
    later, rest = divmod(video.chunk_frames, parts)
    if rest:
        raise ManifestError(
            f"a chunk of {video.chunk_frames} video frames is decoded in {parts} parts, expected equal ones"
        )
    batch, channels, frames, *cells = _latent_shape(manifest, rows)
    _expect(buffers, DECODE_LATENTS, "lane", (batch, channels, frames // parts, *cells), "float32")
    _expect(buffers, VIDEO_FIRST, "lane", (rows, video.first_frames - (parts - 1) * later, *picture), "uint8")
    _expect(buffers, VIDEO, "lane", (rows, later, *picture), "uint8")


def _check_video_in(manifest: VideoManifest, buffers: Mapping[str, Buffer]) -> None:
    taken = [spec for spec in manifest.caller_inputs if spec.kind == video_in.FRAMES_KIND]
    if len(taken) != int(manifest.takes_video):
        raise ManifestError(
            f"the program {ENCODE_VIDEO} and one input of the kind {video_in.FRAMES_KIND} belong together, found "
            f"{len(taken)} inputs; rebuild the artifact"
        )
    if not taken:
        return
    stream = manifest.workload.stream
    frames = stream.chunk_frames * stream.video_frames_per_latent
    shape = (frames, stream.height, stream.width, PICTURE_CHANNELS)
    _expect(buffers, VIDEO_IN_FRAMES, "session", (manifest.state_rows, *shape), "uint8")
    _expect(buffers, VIDEO_IN_LATENTS, "session", _latent_shape(manifest, manifest.state_rows), "float32")


def _expect(
    buffers: Mapping[str, Buffer],
    name: str,
    role: str,
    shape: tuple[int, ...],
    dtype: str,
    *,
    row_axis: int = 0,
) -> None:
    buffer = buffers.get(name)
    if buffer is None:
        raise ManifestError(f"buffer {name} is not there, expected {role} {dtype} {list(shape)}")
    if (buffer.role, buffer.shape, buffer.dtype, buffer.row_axis) != (role, shape, dtype, row_axis):
        axes = f" with row_axis {buffer.row_axis}, expected {row_axis}" if buffer.row_axis != row_axis else ""
        raise ManifestError(
            f"buffer {name} is {buffer.role} {buffer.dtype} {list(buffer.shape)}, expected {role} {dtype} "
            f"{list(shape)}{axes}"
        )


def _latent_shape(manifest: VideoManifest, rows: int) -> tuple[int, ...]:
    stream = manifest.workload.stream
    return (rows, stream.latent_shape[0], stream.chunk_frames, *stream.latent_shape[1:])
