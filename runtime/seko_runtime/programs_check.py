"""Static check of programs: references exist, fit the engine's signature, and may be written. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from seko_runtime.errors import EngineSignatureError, ProgramError
from seko_runtime.json_fields import NAME_PATTERN
from seko_runtime.manifest import Buffer, Call, EngineSpec, Manifest, TensorSpec

REQUIRED_PROGRAMS = ("prompt", "begin", "denoise", "context")
FULL_PROGRAMS = ("denoise_full", "context_full")
MAX_RESOLVED_CALLS = 1 << 18  # 40 layers x 5 passes x 3 programs is 600
REF_PATTERN = re.compile(r"(weight|buffer|value):([A-Za-z0-9_.{}\-]{1,255})((?:\[layer\]|\[pass\])*)")
TEXT_BUFFER = "text.embeddings"


@dataclass(frozen=True)
class Ref:
    """A tensor that a call takes or gives: `weight`, `buffer` or `value`, indexed along leading axes."""

    kind: str
    name: str
    index: tuple[int, ...] = ()
    by_pass: bool = False


@dataclass(frozen=True)
class ResolvedCall:
    """A call with its layer and pass put in."""

    engine: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


Programs = Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]
SpecT = TypeVar("SpecT", bound=TensorSpec | EngineSpec)


def resolve_programs(manifest: Manifest) -> Programs:
    """Expand every program for each layer and pass, and check each call against its engine's signature.

    AOTInductor takes wrong shapes in silence, so this is the only place where they are found.

    Parameters
    ----------
    manifest : Manifest
        Read or built; its `files` are not looked at.

    Returns
    -------
    Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]
        For each program one sequence of calls per pass: the denoise programs have `denoise_passes` of them,
        the others one.

    Raises
    ------
    ProgramError
        If a program or table names something that does not exist, twice, or writes where it must not.
    EngineSignatureError
        If a shape or dtype is not the engine's.
    """
    tables = _Tables(manifest)
    _check_host_buffers(manifest, tables)
    _check_program_names(manifest)
    passes = manifest.schedule.denoise_passes
    budget = MAX_RESOLVED_CALLS
    resolved: dict[str, tuple[tuple[ResolvedCall, ...], ...]] = {}
    for program, calls in manifest.programs.items():
        numbers: tuple[int | None, ...] = (None,)
        if program.startswith("denoise"):
            numbers = tuple(range(passes))
        elif program.startswith("context"):
            numbers = (passes,)
        budget -= len(numbers) * sum(max(call.layers, 1) for call in calls)
        if budget < 0:
            raise ProgramError(
                f"programs expand to more than {MAX_RESOLVED_CALLS} calls; rebuild the artifact"
            )
        resolved[program] = tuple(tables.resolve(program, calls, number) for number in numbers)
    return resolved


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
        self, program: str, calls: tuple[Call, ...], pass_number: int | None
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
            for layer in range(call.layers) if call.layers else (None,):
                out.append(self._resolve_call(program, call, engine, layer, pass_number, values))
        return tuple(out)

    def _resolve_call(
        self,
        program: str,
        call: Call,
        engine: EngineSpec,
        layer: int | None,
        pass_number: int | None,
        values: dict[str, TensorSpec],
    ) -> ResolvedCall:
        where = f"program {program}, engine {engine.name}" + ("" if layer is None else f", layer {layer}")
        inputs = tuple(_parse_ref(text, layer, pass_number, where) for text in call.inputs)
        for ref, wanted in zip(inputs, engine.inputs, strict=True):
            _check_fit(self._spec(ref, values, where), ref, wanted, where)
            if wanted.name in engine.mutates:
                self._check_writable(program, ref, where)
        outputs = tuple(_parse_ref(text, layer, pass_number, where) for text in call.outputs)
        for ref, given in zip(outputs, engine.outputs, strict=True):
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
        return spec

    def _check_writable(self, program: str, ref: Ref, where: str) -> None:
        if ref.kind != "buffer":
            raise ProgramError(f"{where}: writes {ref.kind} {ref.name} in place, only buffers may be written")
        role = self.buffers[ref.name].role
        allowed = ("prompt",) if program == "prompt" else ("cache", "state")
        if role not in allowed:  # else a failed chunk could leave a prompt or a position half written
            raise ProgramError(
                f"{where}: writes buffer {ref.name} of role {role}, may write {' or '.join(allowed)}"
            )


def _parse_ref(text: str, layer: int | None, pass_number: int | None, where: str) -> Ref:
    match = REF_PATTERN.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{where}: {text[:80]!r} is no reference like 'weight:NAME' or 'buffer:NAME[layer]'"
        )
    kind, name, marks = match.groups()
    if layer is None and ("{layer}" in name or "[layer]" in marks):
        raise ProgramError(f"{where}: {text[:80]!r} names a layer, but the call has no layers")
    if pass_number is None and "[pass]" in marks:
        raise ProgramError(f"{where}: {text[:80]!r} names a pass outside the denoise and context programs")
    name = name.replace("{layer}", str(layer))
    if not NAME_PATTERN.fullmatch(name):
        raise ProgramError(f"{where}: {name[:80]!r} is no name")
    index: list[int] = []
    for mark in re.findall(r"layer|pass", marks):
        number = layer if mark == "layer" else pass_number
        index.append(number if number is not None else 0)
    return Ref(kind, name, tuple(index), "[pass]" in marks)


def _check_fit(found: TensorSpec, ref: Ref, wanted: TensorSpec, where: str) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise EngineSignatureError(
            f"{where}: {ref.kind} {ref.name} is {found.dtype} {list(found.shape)}, "
            f"the engine's {wanted.name} is {wanted.dtype} {list(wanted.shape)}; rebuild the artifact"
        )


def _check_program_names(manifest: Manifest) -> None:
    names = set(manifest.programs)
    missing = [name for name in REQUIRED_PROGRAMS if name not in names]
    unknown = sorted(names - set(REQUIRED_PROGRAMS) - set(FULL_PROGRAMS))
    if missing or unknown:
        raise ProgramError(
            f"programs lack {missing} and hold the unknown {unknown[:8]}; rebuild the artifact"
        )
    if len(names & set(FULL_PROGRAMS)) == 1:
        raise ProgramError(f"programs hold one of {' and '.join(FULL_PROGRAMS)}, expected both or none")


def _check_host_buffers(manifest: Manifest, tables: _Tables) -> None:
    """What the host writes and reads has the shape that it will write and read."""
    stream, batch = manifest.stream, manifest.stream.batch
    frames = (batch, stream.chunk_frames)
    host = {"seeds": (batch,), "frames": frames, "write_slots": frames, "valid_tokens": (batch,)}
    for buffer in manifest.buffers:
        if buffer.role == "chunk":
            _check_host_buffer(buffer, host)
        elif buffer.role == "cache":
            _check_row_axis(buffer, batch)
    pool_bytes = sum(buffer.nbytes for buffer in manifest.buffers if buffer.role == "cache")
    if manifest.kv.pool_bytes != pool_bytes:
        raise ProgramError(f"kv.pool_bytes is {manifest.kv.pool_bytes}, the cache buffers take {pool_bytes}")
    output = tables.buffers.get(manifest.output)
    latents = (batch, stream.latent_shape[0], stream.chunk_frames, *stream.latent_shape[1:])
    if output is None or output.role != "state" or output.shape != latents or output.dtype != "float32":
        raise ProgramError(f"output {manifest.output!r} is no state buffer of float32 {list(latents)}")
    text = tables.buffers.get(TEXT_BUFFER)
    if text is not None and (text.role != "prompt" or len(text.shape) != 3 or text.shape[0] != batch):
        raise ProgramError(
            f"{TEXT_BUFFER} is a {text.role} buffer {list(text.shape)}, expected prompt [{batch}, n, n]"
        )
    if manifest.golden is not None and len(manifest.golden.seeds) != batch:
        raise ProgramError(f"golden.seeds has {len(manifest.golden.seeds)} seeds, the batch has {batch} rows")


def _check_host_buffer(buffer: Buffer, host: Mapping[str, tuple[int, ...]]) -> None:
    if buffer.name not in host:
        raise ProgramError(f"chunk buffer {buffer.name!r} is not one that the host fills: {', '.join(host)}")
    if buffer.shape != host[buffer.name] or buffer.dtype != "int64":
        raise ProgramError(
            f"chunk buffer {buffer.name} is {buffer.dtype} {list(buffer.shape)}, "
            f"the host writes int64 {list(host[buffer.name])}"
        )


def _check_row_axis(buffer: Buffer, batch: int) -> None:
    """The axis behind the layers holds the rows one after another, so that one of them can be cleared."""
    axis = int(buffer.layered)
    if len(buffer.shape) <= axis or buffer.shape[axis] % batch:
        raise ProgramError(
            f"cache buffer {buffer.name} {list(buffer.shape)}: axis {axis} cannot be cut into the {batch} rows "
            "of the batch"
        )


def _by_name(specs: tuple[SpecT, ...], table: str) -> dict[str, SpecT]:
    named: dict[str, SpecT] = {}
    for spec in specs:
        if not NAME_PATTERN.fullmatch(spec.name):
            raise ProgramError(f"{table} holds {spec.name[:80]!r}, which is no name")
        if spec.name in named:
            raise ProgramError(f"{table} holds {spec.name!r} twice; rebuild the artifact")
        named[spec.name] = spec
    return named
