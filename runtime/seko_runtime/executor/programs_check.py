"""Checks programs: references exist, match the engine's signature, and may be written. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

from seko_runtime.errors import ArtifactError, ManifestError
from seko_runtime.executor.contract import Contract, ProgramRule
from seko_runtime.executor.layer_visits import layer_visits
from seko_runtime.executor.resolved import Programs, Ref, ResolvedCall
from seko_runtime.format.budgets import MAX_DISTINCT_REFERENCES, MAX_RESOLVED_CALLS, MAX_RESOLVED_REFERENCES
from seko_runtime.format.json_fields import NAME_PATTERN
from seko_runtime.format.manifest import Call, EngineSpec, Manifest, TensorSpec

REF_PATTERN = re.compile(
    r"(weight|buffer|value):([A-Za-z0-9_.{}\-]{1,255})((?:\[layer\]|\[place\]|\[pass\]|\[row\])*)(\[bucket\])?"
)
_INDEX = re.compile(r"layer|place|pass|row")
_MARK = re.compile(r"[{\[](layer|place|pass|row|bucket)[}\]]")


SpecT = TypeVar("SpecT", bound=TensorSpec | EngineSpec)
_Form = tuple[tuple[int, ...], str]  # shape and dtype
_Meaning = tuple["Ref", _Form | None]  # the form of a weight or buffer; a value's may change
_NO_NUMBERS: Mapping[str, int | None] = dict.fromkeys(("layer", "place", "pass", "row", "bucket"))


def resolve_programs(manifest: Manifest, contract: Contract) -> Programs:
    """Expand every program for each layer and run, and check each call against its engine's signature.

    AOTInductor accepts wrong shapes silently, so they must be found here.

    Parameters
    ----------
    manifest : Manifest
        Its `files` are not used.
    contract : Contract
        The workload's, for this manifest.

    Returns
    -------
    Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]
        For each program its sequences of calls, one for each of its runs.

    Raises
    ------
    ManifestError
        If a program or table names something that does not exist or is doubled, or writes where it must not.
    ArtifactError
        If a shape or dtype differs from the engine's.
    """
    tables = _Tables(manifest)
    _check_program_names(manifest, contract)
    contract.check_buffers(tables.buffers)
    _check_size(manifest, contract)
    resolved: dict[str, tuple[tuple[ResolvedCall, ...], ...]] = {}
    for program, calls in manifest.programs.items():
        rule = contract.programs[program]
        base = {"bucket": rule.bucket} if rule.bucket else {}
        resolved[program] = tuple(
            tables.resolve(
                _Rules(program, rule, contract), calls, base | ({rule.counts: number} if rule.counts else {})
            )
            for number in rule.numbers
        )
    layer_visits(manifest, resolved, contract.units)  # for what it refuses
    return resolved


def _check_size(manifest: Manifest, contract: Contract) -> None:
    """Limit the number of calls and references that the programs expand to, before they are expanded."""
    calls = references = 0
    for program, written in manifest.programs.items():
        runs = len(contract.programs[program].numbers)
        calls += runs * max(1, sum(max(call.layers, 1) for call in written))
        references += runs * sum(
            max(call.layers, 1) * (len(call.inputs) + len(call.outputs)) for call in written
        )
    for count, most, what in (
        (calls, MAX_RESOLVED_CALLS, "calls"),
        (references, MAX_RESOLVED_REFERENCES, "references"),
    ):
        if count > most:
            raise ManifestError(f"programs expand to {count} {what}, more than {most}; rebuild the artifact")


class _Rules(NamedTuple):
    """A program's name, its rule, and the contract of which it is a part."""

    program: str
    rule: ProgramRule
    contract: Contract


class _Written:
    """A reference as written in the manifest, and its resolved meanings by the numbers that it uses."""

    __slots__ = ("key", "meant", "parts", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts = REF_PATTERN.fullmatch(text)
        self.key = itemgetter(*(dict.fromkeys(_MARK.findall(text)) or ["bucket"]))
        self.meant: dict[object, _Meaning] = {}


class _Tables:
    """The manifest's tables by name, and every reference that was resolved."""

    def __init__(self, manifest: Manifest) -> None:
        self.buffers = _by_name(manifest.buffers, "buffers")
        self.weights = _by_name(manifest.weights, "weights")
        self.engines = _by_name(manifest.engines, "engines")
        self._mutates = {engine.name: frozenset(engine.mutates) for engine in manifest.engines}
        self._written: dict[str, _Written] = {}
        self._distinct = 0
        for engine in manifest.engines:
            inputs = _by_name(engine.inputs, f"engine {engine.name} inputs")
            _by_name(engine.outputs, f"engine {engine.name} outputs")
            for name in engine.mutates:
                if name not in inputs:
                    raise ManifestError(f"engine {engine.name} mutates {name!r}, which is none of its inputs")

    def resolve(
        self, rules: _Rules, calls: tuple[Call, ...], numbers: Mapping[str, int]
    ) -> tuple[ResolvedCall, ...]:
        program = rules.program
        values: dict[str, TensorSpec] = {}
        out: list[ResolvedCall] = []
        for call in calls:
            if call.engine not in self.engines:
                raise ManifestError(
                    f"program {program} calls engine {call.engine!r}, which is not in the table"
                )
            engine = self.engines[call.engine]
            for side, refs, specs in (
                ("inputs", call.inputs, engine.inputs),
                ("outputs", call.outputs, engine.outputs),
            ):
                if len(refs) != len(specs):
                    raise ArtifactError(
                        f"program {program} hands engine {engine.name} {len(refs)} {side}, "
                        f"its signature has {len(specs)}; rebuild the artifact"
                    )
            takes = [(self._read(text), spec) for text, spec in zip(call.inputs, engine.inputs, strict=True)]
            gives = [
                (self._read(text), spec) for text, spec in zip(call.outputs, engine.outputs, strict=True)
            ]
            for turn in range(max(call.layers, 1)):
                given = {**_NO_NUMBERS, **numbers}
                if call.layers:
                    given |= {"layer": call.first_layer + turn, "place": call.first_place + turn}
                out.append(self._resolve_call(rules, engine, takes, gives, given, values))
        return tuple(out)

    def _resolve_call(
        self,
        rules: _Rules,
        engine: EngineSpec,
        takes: Sequence[tuple[_Written, TensorSpec]],
        gives: Sequence[tuple[_Written, TensorSpec]],
        numbers: Mapping[str, int | None],
        values: dict[str, TensorSpec],
    ) -> ResolvedCall:
        where = f"program {rules.program}, engine {engine.name}"
        where += f", layer {numbers['layer']}" if numbers["layer"] is not None else ""
        mutates = self._mutates[engine.name]
        inputs, outputs = [], []
        for written, wanted in takes:
            ref, form = written.meant.get(written.key(numbers)) or self._meaning(written, numbers, where)
            inputs.append(ref)
            if ref.kind == "buffer":
                self._check_role(rules, ref, where)
            _check_fit(form or _form(values.get(ref.name), ref, where), ref, wanted, where)
            if wanted.name in mutates:
                self._check_writable(rules, ref, where)
        for written, given in gives:
            ref, form = written.meant.get(written.key(numbers)) or self._meaning(written, numbers, where)
            outputs.append(ref)
            if ref.kind == "value":
                if ref.index:
                    raise ManifestError(f"{where}: value {ref.name} is indexed where it is made")
                values[ref.name] = given
                continue
            if ref.kind == "buffer":
                self._check_role(rules, ref, where)
            _check_fit(form or _form(None, ref, where), ref, given, where)
            self._check_writable(rules, ref, where)
        return ResolvedCall(engine.name, tuple(inputs), tuple(outputs))

    def _read(self, text: str) -> _Written:
        if text not in self._written:
            self._written[text] = _Written(text)
        return self._written[text]

    def _meaning(self, written: _Written, numbers: Mapping[str, int | None], where: str) -> _Meaning:
        """Resolve a reference for these numbers, and remember the result."""
        self._distinct += 1
        if self._distinct > MAX_DISTINCT_REFERENCES:
            raise ManifestError(
                f"{where}: programs expand to more than {MAX_DISTINCT_REFERENCES} different references; "
                "rebuild the artifact"
            )
        ref = _parse_ref(written, numbers, where)
        form = None
        if ref.kind != "value":
            table: Mapping[str, TensorSpec] = self.weights if ref.kind == "weight" else self.buffers
            form = _form(table.get(ref.name), ref, where)
        meaning = written.meant[written.key(numbers)] = (ref, form)
        return meaning

    def _check_writable(self, rules: _Rules, ref: Ref, where: str) -> None:
        if ref.kind != "buffer":
            raise ManifestError(
                f"{where}: writes {ref.kind} {ref.name} in place, only buffers may be written"
            )
        role, allowed = self.buffers[ref.name].role, rules.rule.writes
        if role not in allowed:  # else a failed call could leave a row or what the host fills half written
            raise ManifestError(
                f"{where}: writes buffer {ref.name} of role {role}, may write {' or '.join(sorted(allowed))}"
            )
        if ref.name in rules.contract.fed:
            raise ManifestError(f"{where}: writes buffer {ref.name}, which the host fills")

    def _check_role(self, rules: _Rules, ref: Ref, where: str) -> None:
        """Check that programs that run at the same time, or one program's runs that do, share no buffer."""
        if ref.name in rules.contract.anywhere:
            return
        role, rule = self.buffers[ref.name].role, rules.rule
        if role not in rule.reads:
            raise ManifestError(
                f"{where}: buffer {ref.name} of role {role} runs beside it; the program takes buffers of role "
                f"{' or '.join(sorted(rule.reads))}"
            )
        if rule.by_row and not (ref.by_row and len(ref.index) == 1):
            raise ManifestError(
                f"{where}: buffer {ref.name} is taken whole, expected 'buffer:{ref.name}[row]'"
            )


def _parse_ref(written: _Written, numbers: Mapping[str, int | None], where: str) -> Ref:
    text = written.text
    if written.parts is None:
        raise ManifestError(
            f"{where}: {text[:80]!r} is no reference like 'weight:NAME' or 'buffer:NAME[layer]'"
        )
    kind, name, marks, bucket = written.parts.groups()
    if numbers["layer"] is None and ("{layer}" in name or "[layer]" in marks or "[place]" in marks):
        raise ManifestError(f"{where}: {text[:80]!r} names a layer, but the call has no layers")
    if numbers["pass"] is None and ("{pass}" in name or "[pass]" in marks):
        raise ManifestError(f"{where}: {text[:80]!r} names a pass outside the programs that run by pass")
    leading = numbers["bucket"] or 0
    if bucket and not leading:
        raise ManifestError(f"{where}: {text[:80]!r} names a bucket outside the programs of one")
    if "{" in name:
        name = name.replace("{layer}", str(numbers["layer"])).replace("{pass}", str(numbers["pass"]))
    if not NAME_PATTERN.fullmatch(name):
        raise ManifestError(f"{where}: {name[:80]!r} is no name")
    if not marks:
        return Ref(kind, name, leading=leading if bucket else 0)
    by_row = marks in ("[row]", "[layer][row]")
    if "[row]" in marks and (numbers["row"] is None or kind != "buffer" or not by_row):
        raise ManifestError(
            f"{where}: {text[:80]!r} names a row; only buffers of programs that run by row have one, as their first "
            "index or behind the layer's"
        )
    index = tuple(number for mark in _INDEX.findall(marks) if (number := numbers[mark]) is not None)
    return Ref(kind, name, index, "[pass]" in marks, by_row, leading if bucket else 0)


def _form(spec: TensorSpec | None, ref: Ref, where: str) -> _Form:
    """Return shape and dtype of the part of a tensor that a reference selects."""
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


def _check_fit(found: _Form, ref: Ref, wanted: TensorSpec, where: str) -> None:
    shape, dtype = found
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
