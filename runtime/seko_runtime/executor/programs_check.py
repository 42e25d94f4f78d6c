"""Static check of programs: references exist, fit the engine's signature, and may be written. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from seko_runtime.errors import EngineSignatureError, ProgramError
from seko_runtime.executor.buffers_check import DECODE_LATENTS, check_buffers, text_vocabulary
from seko_runtime.executor.layer_visits import layer_visits
from seko_runtime.executor.resolved import Programs, Ref, ResolvedCall
from seko_runtime.format.json_fields import NAME_PATTERN
from seko_runtime.format.manifest import PASS_CACHE_VERSION, Call, EngineSpec, Manifest, TensorSpec
from seko_runtime.format.program_key import ProgramKey

CHUNK_PROGRAMS = (
    "begin",
    "denoise",
    "context",
)  # of each bucket, where there is a pool; see `Manifest.has_context`
REQUIRED_PROGRAMS = ("prompt", *CHUNK_PROGRAMS)
GIVEN_PROGRAMS = ("text", "encode")  # a sentence to text embeddings, a picture to latents
DECODE_PROGRAMS = ("decode_first", "decode")
PROMPT_WRITERS = ("prompt", *GIVEN_PROGRAMS)
MAX_RESOLVED_CALLS = 1 << 18  # 40 layers x 5 passes x 3 programs is 600
REF_PATTERN = re.compile(
    r"(weight|buffer|value):([A-Za-z0-9_.{}\-]{1,255})((?:\[layer\]|\[place\]|\[pass\]|\[row\])*)(\[bucket\])?"
)


SpecT = TypeVar("SpecT", bound=TensorSpec | EngineSpec)


def resolve_programs(manifest: Manifest) -> Programs:
    """Expand every program for each layer, pass and row, and check each call against its engine's signature.

    AOTInductor takes wrong shapes in silence, so this is the only place where they are found.

    Parameters
    ----------
    manifest : Manifest
        Read or built; its `files` are not looked at.

    Returns
    -------
    Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]
        For each program its sequences of calls: the denoise programs have one a pass, the decode programs one a
        row, as has the prompt program if its calls name a row; the others one.

    Raises
    ------
    ProgramError
        If a program or table names something that does not exist, twice, or writes where it must not.
    EngineSignatureError
        If a shape or dtype is not the engine's.
    """
    tables = _Tables(manifest)
    _check_program_names(manifest)
    check_buffers(manifest, tables.buffers)
    budget = MAX_RESOLVED_CALLS
    resolved: dict[str, tuple[tuple[ResolvedCall, ...], ...]] = {}
    for program, calls in manifest.programs.items():
        mark, numbers = _runs(manifest, program, calls)
        base = {"bucket": ProgramKey.parse(program).bucket or 0} if manifest.pool is not None else {}
        budget -= len(numbers) * max(1, sum(max(call.layers, 1) for call in calls))
        if budget < 0:
            raise ProgramError(
                f"programs expand to more than {MAX_RESOLVED_CALLS} calls; rebuild the artifact"
            )
        resolved[program] = tuple(
            tables.resolve(program, calls, base | ({mark: number} if mark else {})) for number in numbers
        )
    layer_visits(manifest, resolved)  # for what it refuses
    _check_pad_id(manifest)
    return resolved


def _check_pad_id(manifest: Manifest) -> None:
    vocabulary = text_vocabulary(manifest)
    if manifest.text is not None and vocabulary is not None and manifest.text.pad_id >= vocabulary:
        raise ProgramError(
            f"text.pad_id is {manifest.text.pad_id}, the text engine looks up ids below {vocabulary}; rebuild the "
            "artifact"
        )


def _runs(manifest: Manifest, program: str, calls: tuple[Call, ...]) -> tuple[str, range]:
    """What the runs of a program are counted by, and their numbers."""
    passes = manifest.schedule.denoise_passes
    role = ProgramKey.parse(program).role
    if role == "denoise":
        return "pass", range(passes)
    if role == "context":
        return "pass", range(passes, passes + 1)
    by_row = program == "prompt" and any(
        "[row]" in ref for call in calls for ref in (*call.inputs, *call.outputs)
    )
    if program in DECODE_PROGRAMS or by_row:
        return "row", range(manifest.rows)
    return "", range(1)


class _Tables:
    """The manifest's tables by name."""

    def __init__(self, manifest: Manifest) -> None:
        self.buffers = _by_name(manifest.buffers, "buffers")
        self.weights = _by_name(manifest.weights, "weights")
        self.engines = _by_name(manifest.engines, "engines")
        for engine in manifest.engines:
            inputs = _by_name(engine.inputs, f"engine {engine.name} inputs")
            _by_name(engine.outputs, f"engine {engine.name} outputs")
            for name in engine.mutates:
                if name not in inputs:
                    raise ProgramError(f"engine {engine.name} mutates {name!r}, which is none of its inputs")

    def resolve(
        self, program: str, calls: tuple[Call, ...], numbers: Mapping[str, int]
    ) -> tuple[ResolvedCall, ...]:
        values: dict[str, TensorSpec] = {}
        out: list[ResolvedCall] = []
        for call in calls:
            if call.engine not in self.engines:
                raise ProgramError(
                    f"program {program} calls engine {call.engine!r}, which is not in the table"
                )
            engine = self.engines[call.engine]
            for side, refs, specs in (
                ("inputs", call.inputs, engine.inputs),
                ("outputs", call.outputs, engine.outputs),
            ):
                if len(refs) != len(specs):
                    raise EngineSignatureError(
                        f"program {program} hands engine {engine.name} {len(refs)} {side}, "
                        f"its signature has {len(specs)}; rebuild the artifact"
                    )
            if not call.layers:
                out.append(self._resolve_call(program, call, engine, numbers, values))
            for turn in range(call.layers):
                of_layer = {"layer": call.first_layer + turn, "place": call.first_place + turn}
                out.append(self._resolve_call(program, call, engine, {**numbers, **of_layer}, values))
        return tuple(out)

    def _resolve_call(
        self,
        program: str,
        call: Call,
        engine: EngineSpec,
        numbers: Mapping[str, int],
        values: dict[str, TensorSpec],
    ) -> ResolvedCall:
        where = f"program {program}, engine {engine.name}"
        where += f", layer {numbers['layer']}" if "layer" in numbers else ""
        inputs = tuple(_parse_ref(text, numbers, where) for text in call.inputs)
        for ref, wanted in zip(inputs, engine.inputs, strict=True):
            self._check_lane(program, ref, where)
            _check_fit(self._spec(ref, values, where), ref, wanted, where)
            if wanted.name in engine.mutates:
                self._check_writable(program, ref, where)
        outputs = tuple(_parse_ref(text, numbers, where) for text in call.outputs)
        for ref, given in zip(outputs, engine.outputs, strict=True):
            self._check_lane(program, ref, where)
            if ref.kind == "value":
                if ref.index:
                    raise ProgramError(f"{where}: value {ref.name} is indexed where it is made")
                values[ref.name] = given
                continue
            _check_fit(self._spec(ref, values, where), ref, given, where)
            self._check_writable(program, ref, where)
        return ResolvedCall(engine.name, inputs, outputs)

    def _spec(self, ref: Ref, values: Mapping[str, TensorSpec], where: str) -> TensorSpec:
        tables: dict[str, Mapping[str, TensorSpec]]
        tables = {"weight": self.weights, "buffer": self.buffers, "value": values}
        spec = tables[ref.kind].get(ref.name)
        if spec is None:
            raise ProgramError(f"{where}: {ref.kind} {ref.name!r} does not exist there")
        for number in ref.index:
            if not spec.shape or number >= spec.shape[0]:
                raise ProgramError(
                    f"{where}: {ref.kind} {ref.name} of shape {spec.shape} has no index {number}"
                )
            spec = replace(spec, shape=spec.shape[1:])
        if ref.leading:
            if not spec.shape or ref.leading > spec.shape[0]:
                raise ProgramError(
                    f"{where}: {ref.kind} {ref.name} of shape {spec.shape} has no {ref.leading} leading entries"
                )
            spec = replace(spec, shape=(ref.leading, *spec.shape[1:]))
        return spec

    def _check_writable(self, program: str, ref: Ref, where: str) -> None:
        if ref.kind != "buffer":
            raise ProgramError(f"{where}: writes {ref.kind} {ref.name} in place, only buffers may be written")
        role = self.buffers[ref.name].role
        allowed: tuple[str, ...] = ("cache", "state")
        if program in PROMPT_WRITERS:
            allowed = ("prompt",)
        elif program in DECODE_PROGRAMS:
            allowed = ("decode",)
        if role not in allowed:  # else a failed chunk could leave a prompt or a position half written
            raise ProgramError(
                f"{where}: writes buffer {ref.name} of role {role}, may write {' or '.join(allowed)}"
            )
        if ref.name == DECODE_LATENTS:
            raise ProgramError(f"{where}: writes buffer {ref.name}, which the host fills")

    def _check_lane(self, program: str, ref: Ref, where: str) -> None:
        """Decoding runs beside the chunks: no buffer may belong to both, nor to another row's decoding."""
        if ref.kind != "buffer" or ref.name not in self.buffers:
            return
        decodes = program in DECODE_PROGRAMS
        if (self.buffers[ref.name].role == "decode") != decodes:
            role = self.buffers[ref.name].role
            raise ProgramError(
                f"{where}: buffer {ref.name} of role {role} runs beside it; the decode programs take buffers of "
                "role decode, the others any other"
            )
        if decodes and not (ref.by_row and len(ref.index) == 1):
            raise ProgramError(
                f"{where}: buffer {ref.name} is taken whole, expected 'buffer:{ref.name}[row]'"
            )


def _parse_ref(text: str, numbers: Mapping[str, int], where: str) -> Ref:
    match = REF_PATTERN.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{where}: {text[:80]!r} is no reference like 'weight:NAME' or 'buffer:NAME[layer]'"
        )
    kind, name, marks, bucket = match.groups()
    if "layer" not in numbers and ("{layer}" in name or "[layer]" in marks or "[place]" in marks):
        raise ProgramError(f"{where}: {text[:80]!r} names a layer, but the call has no layers")
    if "pass" not in numbers and ("{pass}" in name or "[pass]" in marks):
        raise ProgramError(f"{where}: {text[:80]!r} names a pass outside the denoise and context programs")
    by_row = marks in ("[row]", "[layer][row]")
    if "[row]" in marks and ("row" not in numbers or kind != "buffer" or not by_row):
        raise ProgramError(
            f"{where}: {text[:80]!r} names a row; only buffers of the decode and prompt programs have one, as their "
            "first index or behind the layer's"
        )
    if bucket and not numbers.get("bucket"):
        raise ProgramError(f"{where}: {text[:80]!r} names a bucket outside the programs of one")
    name = name.replace("{layer}", str(numbers.get("layer"))).replace("{pass}", str(numbers.get("pass")))
    if not NAME_PATTERN.fullmatch(name):
        raise ProgramError(f"{where}: {name[:80]!r} is no name")
    index = tuple(numbers[mark] for mark in re.findall(r"layer|place|pass|row", marks))
    return Ref(kind, name, index, "[pass]" in marks, by_row, numbers["bucket"] if bucket else 0)


def _check_fit(found: TensorSpec, ref: Ref, wanted: TensorSpec, where: str) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise EngineSignatureError(
            f"{where}: {ref.kind} {ref.name} is {found.dtype} {list(found.shape)}, "
            f"the engine's {wanted.name} is {wanted.dtype} {list(wanted.shape)}; rebuild the artifact"
        )


def _check_program_names(manifest: Manifest) -> None:
    names = set(manifest.programs)
    buckets: tuple[int | None, ...] = (None,) if manifest.pool is None else manifest.pool.buckets
    context = manifest.has_context or manifest.format_version < PASS_CACHE_VERSION
    chunk = CHUNK_PROGRAMS if context else CHUNK_PROGRAMS[:2]
    pair = chunk[1:]
    required = ["prompt", *(ProgramKey(role, bucket).name for bucket in buckets for role in chunk)]
    full = [tuple(ProgramKey(role, bucket, full=True).name for role in pair) for bucket in buckets]
    missing = [name for name in required if name not in names]
    unknown = sorted(names - {*required, *chain(*full), *GIVEN_PROGRAMS, *DECODE_PROGRAMS})
    if missing or unknown:
        raise ProgramError(
            f"programs lack {missing} and hold the unknown {unknown[:8]}; rebuild the artifact"
        )
    for together in (*full, DECODE_PROGRAMS):
        if 0 < len(names & set(together)) < len(together):
            raise ProgramError(f"programs hold one of {' and '.join(together)}, expected both or none")


def _by_name(specs: tuple[SpecT, ...], table: str) -> dict[str, SpecT]:
    named: dict[str, SpecT] = {}
    for spec in specs:
        if not NAME_PATTERN.fullmatch(spec.name):
            raise ProgramError(f"{table} holds {spec.name[:80]!r}, which is no name")
        if spec.name in named:
            raise ProgramError(f"{table} holds {spec.name!r} twice; rebuild the artifact")
        named[spec.name] = spec
    return named
