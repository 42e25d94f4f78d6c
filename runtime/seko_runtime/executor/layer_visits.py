"""The plan of copies for an offloaded KV cache: which engine call needs which layers. The plan of copies is computed
without running an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from seko_runtime.errors import ManifestError
from seko_runtime.executor.resolved import Programs, Ref, ResolvedCall
from seko_runtime.format.manifest import Buffer, EngineSpec, Manifest

Layer = tuple[str, int]  # name of the buffer, and the layer's number in it; see `layer_number`
Run = tuple[str, int]  # name of a program, and the number of its run


@dataclass(frozen=True)
class Visit:
    """An engine call that uses layers of offloaded KV cache buffers.

    Parameters
    ----------
    takes : tuple of Layer
        The layers that the call uses. These layers are on the device while the call runs.
    fetches : tuple of Layer
        The offloaded layers that the next call of the unit uses. The next call after the unit's last call is the unit's
        first call.
    stores : tuple of Layer
        The layers that this call writes and no later call of the unit writes. Earlier writes need no copy to the host,
        because a later call writes the same entries before it reads them.
    """

    takes: tuple[Layer, ...]
    fetches: tuple[Layer, ...]
    stores: tuple[Layer, ...]


def layer_number(index: tuple[int, ...], buffer: Buffer) -> int:
    """Return the number of a cached layer, counted over all axes in front of the row axis; further entries of ``index``
    are ignored."""
    number = 0
    for size, position in zip(buffer.shape[: buffer.row_axis], index, strict=False):
        number = number * size + position
    return number


def device_seat(layer: int, buffer: Buffer) -> int:
    """Return the seat (place on the device) of a layer. A resident layer has a seat of its own. Offloaded layers take
    the remaining seats in turn, but the first and the last offloaded layer never share a seat.
    """
    first = buffer.resident_layers
    if layer < first:
        return layer
    seat = (layer - first) % (buffer.device_layers - first)
    return first + (1 if layer > first and layer == buffer.layers - 1 and seat == 0 else seat)


def layer_visits(
    manifest: Manifest, programs: Programs, units: Sequence[Sequence[str]]
) -> dict[Run, dict[int, Visit]]:
    """Return the calls of each run of the units' programs that use offloaded layers, by call number.

    Parameters
    ----------
    manifest : Manifest
        The artifact's manifest, whose buffers name their offloaded layers.
    programs : Programs
        The resolved programs that `resolve_programs` returned.
    units : sequence of sequence of str
        Programs that run one after another in one kind of call: `Contract.units`.

    Raises
    ------
    ManifestError
        If a buffer cannot be offloaded, or the calls do not use the buffer's layers one after another.
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
    begins = first_visits(visits)
    if not units or units[0][0] not in begins:
        raise ManifestError(
            f"the first program of a unit takes nothing of the offloaded {', '.join(offloaded)}"
        )
    # After a run the seats hold the layers of the first call again, for the next unit or for a single program of one.
    firsts = [set(visit.takes) for visit in begins.values()]
    if any(first != firsts[0] for first in firsts):
        raise ManifestError(f"programs begin with different layers of an offloaded cache: {firsts}")
    _check_others(programs, offloaded, {name for name, _ in visits})
    return visits


def first_visits(visits: Mapping[Run, Mapping[int, Visit]]) -> dict[str, Visit]:
    """Return the first call of each program that uses offloaded layers, over all runs of the program."""
    begins: dict[str, Visit] = {}
    for (program, _), of_run in sorted(visits.items()):
        begins.setdefault(program, of_run[min(of_run)])
    return begins


def _layers_of(
    call: ResolvedCall, offloaded: Mapping[str, Buffer], positions: Sequence[int]
) -> Iterator[Layer]:
    """Return the offloaded layers among a call's inputs at ``positions`` and the call's outputs, each layer once."""
    refs = [
        ref for ref in (*(call.inputs[n] for n in positions), *call.outputs) if _is_offloaded(ref, offloaded)
    ]
    for ref in refs:
        if len(ref.index) < offloaded[ref.name].row_axis:
            raise ManifestError(
                f"engine {call.engine} takes the offloaded buffer {ref.name} whole, expected a layer of it"
            )
    layers = dict.fromkeys((ref.name, layer_number(ref.index, offloaded[ref.name])) for ref in refs)
    return (layer for layer in layers if layer[1] >= offloaded[layer[0]].resident_layers)


def _is_offloaded(ref: Ref, offloaded: Mapping[str, Buffer]) -> bool:
    return ref.kind == "buffer" and ref.name in offloaded


def _mutated(engine: EngineSpec) -> tuple[int, ...]:
    mutates = frozenset(engine.mutates)
    return tuple(at for at, spec in enumerate(engine.inputs) if spec.name in mutates)


def _check_buffer(manifest: Manifest, buffer: Buffer) -> None:
    if buffer.role != "cache" or not buffer.row_axis:
        raise ManifestError(
            f"buffer {buffer.name} of role {buffer.role} is offloaded, only caches with layers may be"
        )
    if not 2 <= buffer.device_layers < buffer.layers:
        raise ManifestError(
            f"buffer {buffer.name} has device_layers {buffer.device_layers}, expected 2 to {buffer.layers - 1}, "
            "fewer than its layers"
        )
    if manifest.pool is not None:
        raise ManifestError(
            f"buffer {buffer.name} is offloaded, but its rows are a pool's; rebuild the artifact"
        )


def _check_seats(
    offloaded: Mapping[str, Buffer], takes: Sequence[Layer], fetches: Sequence[Layer], run: Run
) -> None:
    """Check that the layers of an engine call and of the next call have different seats on the device, because the next
    call's layers are copied during the call.
    """
    taken_seats = {(name, device_seat(layer, offloaded[name])) for name, layer in takes}
    fetched_seats = {(name, device_seat(layer, offloaded[name])) for name, layer in fetches}
    if taken_seats & fetched_seats or len(taken_seats) < len(takes):
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
