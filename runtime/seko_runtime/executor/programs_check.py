"""Checks of programs, which run no engine: each reference names an existing tensor that matches the engine's signature,
and only permitted buffers are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from seko_runtime.errors import ArtifactError, ManifestError
from seko_runtime.executor.contract import Contract, ProgramRule
from seko_runtime.executor.layer_visits import layer_visits
from seko_runtime.executor.resolved import Programs, Ref, ResolvedCall
from seko_runtime.format.budgets import MAX_DISTINCT_REFERENCES, MAX_RESOLVED_REFERENCES
from seko_runtime.format.json_fields import NAME_PATTERN
from seko_runtime.format.manifest import Call, EngineSpec, Manifest, TensorSpec

REF_PATTERN = re.compile(
    rf"(weight|buffer|value):({NAME_PATTERN.pattern})((?:\[(?:0|[1-9]\d{{0,8}}|pass|row)\])*)(\[bucket\])?"
)
_MARKS = ("[pass]", "[row]", "[bucket]")

SpecT = TypeVar("SpecT", bound=TensorSpec | EngineSpec)
_Form = tuple[tuple[int, ...], str]  # shape and dtype
# a resolved reference, with shape and dtype for a weight or buffer, whose form never changes, and None for a value
_Meaning = tuple[Ref, _Form | None]


def resolve_programs(manifest: Manifest, contract: Contract) -> Programs:
    """Resolve all programs: insert the pass, row and bucket of every run, and check each call against the signature of
    its engine.

    AOTInductor engines accept tensors of wrong shapes without an error, so `resolve_programs` must find wrong shapes.

    Parameters
    ----------
    manifest : Manifest
        The artifact's manifest, whose `files` are not used.
    contract : Contract
        The workload's contract for this manifest: the programs and buffers that are allowed.

    Returns
    -------
    Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]
        For each program, a sequence of engine calls for each of its runs.

    Raises
    ------
    ManifestError
        If a program has no calls, a program or table names something that does not exist or exists twice, a program
        writes a buffer that it must not write, or a buffer's rows lie on another axis than behind those that calls
        index.
    ArtifactError
        If the shape or dtype of a tensor differs from the engine's signature.
    """
    tables = _Tables(manifest)
    _check_program_names(manifest, contract)
    contract.check_buffers(tables.buffers)
    _check_size(manifest, contract)
    resolved: dict[str, tuple[tuple[ResolvedCall, ...], ...]] = {}
    for program, calls in manifest.programs.items():
        rule = contract.programs[program]
        resolved[program] = tuple(
            tables.resolve(_Run(program, rule, contract, number), calls) for number in rule.numbers
        )
    tables.check_row_axes()
    layer_visits(manifest, resolved, contract.units)  # called only for the errors that it raises
    return resolved


def _check_size(manifest: Manifest, contract: Contract) -> None:
    """Limit the number of references in all runs, and of different ones, before any reference is resolved. A call
    without references counts as one reference."""
    count = sum(
        len(contract.programs[program].numbers)
        * sum(max(1, len(call.inputs) + len(call.outputs)) for call in calls)
        for program, calls in manifest.programs.items()
    )
    if count > MAX_RESOLVED_REFERENCES:
        raise ManifestError(
            f"the runs of all programs have {count} references, more than {MAX_RESOLVED_REFERENCES}; rebuild the "
            "artifact"
        )
    different: dict[object, set[int]] = {}  # the runs in which a reference has a meaning of its own
    count = 0
    for program, calls in manifest.programs.items():
        rule = contract.programs[program]
        for text in {text for call in calls for text in (*call.inputs, *call.outputs)}:
            key, numbers = (_in_runs(text, rule), rule.numbers) if _is_marked(text) else (text, (0,))
            known = different.setdefault(key, set())
            count -= len(known)
            known.update(numbers)
            count += len(known)
            if count > MAX_DISTINCT_REFERENCES:
                raise ManifestError(
                    f"the runs of all programs have more than {MAX_DISTINCT_REFERENCES} different references; rebuild "
                    "the artifact"
                )


def _is_marked(text: str) -> bool:
    """Return whether a reference has another meaning in each run."""
    return any(mark in text for mark in _MARKS)


def _in_runs(text: str, rule: ProgramRule) -> tuple[object, ...]:
    """Return what a marked reference depends on, beside the run's number."""
    return text, rule.counts, rule.bucket


class _Run(NamedTuple):
    """One run of a program: the program's name and rule, the workload's contract, and the run's number."""

    program: str
    rule: ProgramRule
    contract: Contract
    number: int


class _Tables:
    """The manifest's tables by name, and the references that were resolved so far."""

    def __init__(self, manifest: Manifest) -> None:
        self.buffers = _by_name(manifest.buffers, "buffers")
        self.weights = _by_name(manifest.weights, "weights")
        self.engines = _by_name(manifest.engines, "engines")
        self._mutates = {engine.name: frozenset(engine.mutates) for engine in manifest.engines}
        self._meanings: dict[object, _Meaning] = {}
        for engine in manifest.engines:
            inputs = _by_name(engine.inputs, f"engine {engine.name} inputs")
            _by_name(engine.outputs, f"engine {engine.name} outputs")
            for name in engine.mutates:
                if name not in inputs:
                    raise ManifestError(f"engine {engine.name} mutates {name!r}, which is none of its inputs")

    def check_row_axes(self) -> None:
        """Check that a buffer's rows lie behind the axes that the resolved references index, such as passes and layers;
        the runtime clears, saves and moves rows along that axis."""
        indexed: dict[str, set[int]] = {}
        for ref, _ in self._meanings.values():
            if ref.kind == "buffer":
                indexed.setdefault(ref.name, set()).add(len(ref.index) - ref.by_row)
        for buffer in self.buffers.values():
            axis, most = buffer.row_axis, max(indexed.get(buffer.name, {0}))
            of_rows = buffer.role in ("cache", "session")
            if axis and axis >= len(buffer.shape):
                raise ManifestError(f"buffer {buffer.name} {list(buffer.shape)} has no row_axis {axis}")
            if most and (axis > most or (of_rows and axis < most)):
                raise ManifestError(
                    f"buffer {buffer.name} {list(buffer.shape)} has row_axis {axis}, and calls index its first {most} "
                    f"axes: expected row_axis {most}; rebuild the artifact"
                )

    def resolve(self, run: _Run, calls: tuple[Call, ...]) -> tuple[ResolvedCall, ...]:
        values: dict[str, TensorSpec] = {}
        return tuple(
            self._resolve_call(
                run, call, values, f"program {run.program}, call {number} of engine {call.engine}"
            )
            for number, call in enumerate(calls)
        )

    def _resolve_call(self, run: _Run, call: Call, values: dict[str, TensorSpec], where: str) -> ResolvedCall:
        engine = self.engines.get(call.engine)
        if engine is None:
            raise ManifestError(f"{where}: the engine is not in the table")
        for side, refs, specs in (
            ("inputs", call.inputs, engine.inputs),
            ("outputs", call.outputs, engine.outputs),
        ):
            if len(refs) != len(specs):
                raise ArtifactError(
                    f"{where}: it has {len(refs)} {side}, the engine's signature has {len(specs)}; rebuild the artifact"
                )
        mutates = self._mutates[engine.name]
        inputs, outputs = [], []
        for text, input_spec in zip(call.inputs, engine.inputs, strict=True):
            ref, form = self._meaning(run, text, where)
            inputs.append(ref)
            if ref.kind == "buffer":
                self._check_role(run, ref, where)
            elif ref.kind == "weight" and self.weights[ref.name].on_host:
                _check_streamed(run, ref, where)
            _check_fit(form or _form(values.get(ref.name), ref, where), ref, input_spec, where)
            if input_spec.name in mutates:
                self._check_writable(run, ref, where)
        for text, output in zip(call.outputs, engine.outputs, strict=True):
            ref, form = self._meaning(run, text, where)
            outputs.append(ref)
            if ref.kind == "value":
                if ref.index:
                    raise ManifestError(f"{where}: value {ref.name} is indexed where it is made")
                values[ref.name] = output
                continue
            if ref.kind == "buffer":
                self._check_role(run, ref, where)
            _check_fit(form or _form(None, ref, where), ref, output, where)
            self._check_writable(run, ref, where)
        return ResolvedCall(engine.name, tuple(inputs), tuple(outputs))

    def _meaning(self, run: _Run, text: str, where: str) -> _Meaning:
        """Resolve a reference in a run. A reference that has the same meaning in all runs is resolved once."""
        key = (*_in_runs(text, run.rule), run.number) if _is_marked(text) else text
        if key not in self._meanings:
            self._meanings[key] = self._resolve(run, text, where)
        return self._meanings[key]

    def _resolve(self, run: _Run, text: str, where: str) -> _Meaning:
        parts = REF_PATTERN.fullmatch(text)
        if parts is None:
            raise ManifestError(
                f"{where}: {text[:80]!r} is no reference like 'weight:NAME' or 'buffer:NAME[3]'"
            )
        kind, name, marks, bucket = parts.groups()
        indices = marks[1:-1].split("][") if marks else []
        if "pass" in indices and run.rule.counts != "pass":
            raise ManifestError(f"{where}: {text[:80]!r} names a pass outside the programs that run by pass")
        if bucket and not run.rule.bucket:
            raise ManifestError(f"{where}: {text[:80]!r} names a bucket outside the programs of one")
        table: Mapping[str, TensorSpec] = self.weights if kind == "weight" else self.buffers
        if "row" in indices:
            buffer = self.buffers.get(name) if kind == "buffer" else None
            at_row = buffer is not None and indices.index("row") == buffer.row_axis == len(indices) - 1
            if run.rule.counts != "row" or not at_row:
                raise ManifestError(
                    f"{where}: {text[:80]!r} names a row; only buffers of programs that run by row have one, as their "
                    "last index, on the axis of the rows"
                )
        ref = Ref(
            kind,
            name,
            tuple(run.number if index in ("pass", "row") else int(index) for index in indices),
            by_pass="pass" in indices and (kind != "buffer" or self.buffers[name].role != "cache"),
            by_row="row" in indices,
            leading=run.rule.bucket if bucket else 0,
        )
        return ref, None if kind == "value" else _form(table.get(name), ref, where)

    def _check_writable(self, run: _Run, ref: Ref, where: str) -> None:
        if ref.kind != "buffer":
            raise ManifestError(
                f"{where}: writes {ref.kind} {ref.name} in place, only buffers may be written"
            )
        role, allowed = self.buffers[ref.name].role, run.rule.writes
        # otherwise a failed call could leave a row, or a buffer that the host fills, partly written
        if role not in allowed:
            raise ManifestError(
                f"{where}: writes buffer {ref.name} of role {role}, may write {' or '.join(sorted(allowed))}"
            )
        if ref.name in run.contract.fed:
            raise ManifestError(f"{where}: writes buffer {ref.name}, which the host fills")

    def _check_role(self, run: _Run, ref: Ref, where: str) -> None:
        """Check that no buffer is shared by programs, or by runs of one program, that run at the same time."""
        if ref.name in run.contract.anywhere:
            return
        role, rule = self.buffers[ref.name].role, run.rule
        if role not in rule.reads:
            raise ManifestError(
                f"{where}: buffer {ref.name} of role {role} runs beside it; the program takes buffers of role "
                f"{' or '.join(sorted(rule.reads))}"
            )
        if rule.by_row and not (ref.by_row and len(ref.index) == 1):
            raise ManifestError(
                f"{where}: buffer {ref.name} is taken whole, expected 'buffer:{ref.name}[row]'"
            )


def _check_streamed(run: _Run, ref: Ref, where: str) -> None:
    """Check that a weight on the host is copied whole, and in the order of the calls."""
    if ref.index or ref.leading:
        raise ManifestError(
            f"{where}: weight {ref.name} stays on the host, so it is taken whole, not by index"
        )
    if run.rule.by_row:
        raise ManifestError(
            f"{where}: weight {ref.name} stays on the host, and this program runs beside others; rebuild the artifact"
        )


def _form(spec: TensorSpec | None, ref: Ref, where: str) -> _Form:
    """Return the shape and dtype of the part of a tensor that a reference selects."""
    if spec is None:
        raise ManifestError(f"{where}: {ref.kind} {ref.name!r} does not exist there")
    shape = spec.shape
    for number in ref.index:
        if not shape or number >= shape[0]:
            raise ManifestError(f"{where}: {ref.kind} {ref.name} of shape {shape} has no index {number}")
        shape = shape[1:]
    if ref.leading:
        if not shape or ref.leading > shape[0]:
            raise ManifestError(
                f"{where}: {ref.kind} {ref.name} of shape {shape} has no {ref.leading} leading entries"
            )
        shape = (ref.leading, *shape[1:])
    return shape, spec.dtype


def _check_fit(form: _Form, ref: Ref, wanted: TensorSpec, where: str) -> None:
    shape, dtype = form
    if shape != wanted.shape or dtype != wanted.dtype:
        raise ArtifactError(
            f"{where}: {ref.kind} {ref.name} is {dtype} {list(shape)}, "
            f"the engine's {wanted.name} is {wanted.dtype} {list(wanted.shape)}; rebuild the artifact"
        )


def _check_program_names(manifest: Manifest, contract: Contract) -> None:
    names = set(manifest.programs)
    missing = [name for name, rule in contract.programs.items() if rule.required and name not in names]
    unknown = sorted(names - contract.programs.keys())
    if missing or unknown:
        raise ManifestError(
            f"programs lack {missing} and hold the unknown {unknown[:8]}; rebuild the artifact"
        )
    for name, calls in manifest.programs.items():
        if not calls:
            raise ManifestError(f"program {name} has no calls; rebuild the artifact")
    for together in contract.together:
        if 0 < len(names & set(together)) < len(together):
            raise ManifestError(f"programs hold one of {' and '.join(together)}, expected both or none")


def _by_name(specs: tuple[SpecT, ...], table: str) -> dict[str, SpecT]:
    named: dict[str, SpecT] = {}
    for spec in specs:
        if not NAME_PATTERN.fullmatch(spec.name):
            raise ManifestError(f"{table} holds {spec.name[:80]!r}, which is no name")
        if spec.name in named:
            raise ManifestError(f"{table} holds {spec.name!r} twice; rebuild the artifact")
        named[spec.name] = spec
    return named
