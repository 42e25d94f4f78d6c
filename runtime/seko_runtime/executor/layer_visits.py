"""Determines which call of a unit needs which layers of an offloaded cache, and the copies around it. Runs
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from seko_runtime.errors import ManifestError
from seko_runtime.executor.resolved import Programs, Ref, ResolvedCall
from seko_runtime.format.manifest import Buffer, EngineSpec, Manifest

Layer = tuple[str, int]  # of which buffer, and its index there
Run = tuple[str, int]  # a program, and which of its runs


@dataclass(frozen=True)
class Visit:
    """A call that uses layers of offloaded buffers.

    Parameters
    ----------
    takes : tuple of Layer
        Layers in the device's seats while it runs.
    fetches : tuple of Layer
        Layers of the next such call; after the unit's last call comes the first one again.
    stores : tuple of Layer
        Layers that it writes and no later call of the unit writes. Earlier writes need no copy: a later call writes
        the same entries before it reads them.
    """

    takes: tuple[Layer, ...]
    fetches: tuple[Layer, ...]
    stores: tuple[Layer, ...]


def device_seat(layer: int, buffer: Buffer) -> int:
    """Return the seat of a layer. Seats are used in turn, except that first and last layer never share one."""
    seat = layer % buffer.device_layers
    return 1 if layer and layer == buffer.shape[0] - 1 and seat == 0 else seat


def layer_visits(
    manifest: Manifest, programs: Programs, units: Sequence[Sequence[str]]
) -> dict[Run, dict[int, Visit]]:
    """Return the visits of each run of the units' programs, by call number.

    Parameters
    ----------
    manifest : Manifest
        Its buffers say what is offloaded.
    programs : Programs
        From `resolve_programs`.
    units : sequence of sequence of str
        `Contract.units`.

    Raises
    ------
    ManifestError
        If a buffer cannot be offloaded, or the calls do not use its layers one after another.
    """
    offloaded = {buffer.name: buffer for buffer in manifest.buffers if buffer.device_layers}
    for buffer in offloaded.values():
        _check_buffer(manifest, buffer)
    if not offloaded:
        return {}
    mutates = {engine.name: _mutated(engine) for engine in manifest.engines}
    visits: dict[Run, dict[int, Visit]] = {}
    for unit in units:
        runs = [(name, number, calls) for name in unit for number, calls in enumerate(programs.get(name, ()))]
        taken = [
            ((name, number), at, list(_layers_of(call, offloaded, range(len(call.inputs)))),
             list(_layers_of(call, offloaded, mutates[call.engine])))
            for name, number, calls in runs
            for at, call in enumerate(calls)
        ]  # fmt: skip
        taken = [turn for turn in taken if turn[2]]
        later: set[Layer] = set()
        for turn in reversed(range(len(taken))):
            run, at, takes, writes = taken[turn]
            fetches = taken[(turn + 1) % len(taken)][2]
            _check_seats(offloaded, takes, fetches, run)
            stores = tuple(layer for layer in writes if layer not in later)
            later.update(writes)
            visits.setdefault(run, {})[at] = Visit(tuple(takes), tuple(fetches), stores)
    first_run = (units[0][0] if units else "", 0)
    if first_run not in visits:
        raise ManifestError(
            f"the program {first_run[0]} takes nothing of the offloaded {', '.join(offloaded)}"
        )
    # Whatever runs next finds the layers of the first call there: a unit, or one of its programs alone.
    starts = [of_run for (name, number), of_run in sorted(visits.items()) if not number]
    firsts = [set(of_run[min(of_run)].takes) for of_run in starts]
    if any(first != firsts[0] for first in firsts):
        raise ManifestError(f"programs begin with different layers of an offloaded cache: {firsts}")
    _check_others(programs, offloaded, {name for name, _ in visits})
    return visits


def _layers_of(
    call: ResolvedCall, offloaded: Mapping[str, Buffer], positions: Sequence[int]
) -> Iterator[Layer]:
    """Yield the offloaded layers among these inputs and the outputs, each once."""
    refs = [
        ref for ref in (*(call.inputs[n] for n in positions), *call.outputs) if _is_offloaded(ref, offloaded)
    ]
    for ref in refs:
        if not ref.index:
            raise ManifestError(
                f"engine {call.engine} takes the offloaded buffer {ref.name} whole, expected a layer of it"
            )
    return iter(dict.fromkeys((ref.name, ref.index[0]) for ref in refs))


def _is_offloaded(ref: Ref, offloaded: Mapping[str, Buffer]) -> bool:
    return ref.kind == "buffer" and ref.name in offloaded


def _mutated(engine: EngineSpec) -> tuple[int, ...]:
    mutates = frozenset(engine.mutates)
    return tuple(at for at, one in enumerate(engine.inputs) if one.name in mutates)


def _check_buffer(manifest: Manifest, buffer: Buffer) -> None:
    if buffer.role != "cache" or not buffer.layered:
        raise ManifestError(
            f"buffer {buffer.name} of role {buffer.role} is offloaded, only layered caches may be"
        )
    if not 2 <= buffer.device_layers < buffer.shape[0]:
        raise ManifestError(
            f"buffer {buffer.name} has device_layers {buffer.device_layers}, expected 2 to {buffer.shape[0] - 1}, "
            "fewer than its layers"
        )
    if manifest.pool is not None:
        raise ManifestError(
            f"buffer {buffer.name} is offloaded, but its rows are a pool's; rebuild the artifact"
        )


def _check_seats(
    offloaded: Mapping[str, Buffer], takes: Sequence[Layer], fetches: Sequence[Layer], run: Run
) -> None:
    """Check that a call's layers and those of the next call have different seats: the latter are copied during the
    call.
    """
    held = {(name, device_seat(layer, offloaded[name])) for name, layer in takes}
    wanted = {(name, device_seat(layer, offloaded[name])) for name, layer in fetches}
    if held & wanted or len(held) < len(takes):
        raise ManifestError(
            f"program {run[0]}: the call that takes {takes[0]} and the one after it, {fetches[0]}, would share a "
            "seat on the device; rebuild the artifact"
        )


def _check_others(programs: Programs, offloaded: Mapping[str, Buffer], of_units: set[str]) -> None:
    for name, runs in programs.items():
        for call in chain.from_iterable(runs):
            if name not in of_units and any(
                _is_offloaded(ref, offloaded) for ref in (*call.inputs, *call.outputs)
            ):
                raise ManifestError(
                    f"program {name} takes an offloaded cache, only the programs of a unit may"
                )
