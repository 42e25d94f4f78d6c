"""Cache offload keeps the layers of a KV cache in host memory, and copies each layer to the device while the layer
before it runs.

If the manifest has no offloaded buffers, all methods of `CacheOffload` do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.executor.layer_visits import Layer, device_seat, first_visits, layer_number, layer_visits
from seko_runtime.executor.resolved import Programs, Ref
from seko_runtime.format.manifest import Manifest

Copies = Sequence[tuple[Tensor, Tensor]]  # target, source


@dataclass(frozen=True)
class BoundVisit:
    """The copies of offloaded layers between host and device that are queued before and after one engine call."""

    fetches: Copies  # copies to the device that run during this call, for the next one
    stores: Copies  # copies to the host that run after this call


class CacheOffload:
    """The offloaded buffers of one pool: layers in host memory (each in its "home"), and a few places for layers on the
    device ("seats").

    A resident layer has a seat of its own on the device and no home. The valid content of each other layer is in its
    home, and a seat holds the layer for one call. Between two runs of a `unit` (programs that run one after another),
    the seats of the unit's first call hold its layers. Copies have a queue of their own: a copy runs after all calls
    that were queued before it, and a call runs after the copies that were queued before the previous call. Because of
    this order no seat is overwritten while a call reads it, or before its layer is copied to the host. No call waits
    for a layer that is fetched while the call runs.

    Parameters
    ----------
    manifest, programs, units
        The artifact's manifest, its resolved programs and the contract's groups of programs that run one after another;
        see `layer_visits`.
    buffers : mapping of str to tensor
        The pool's tensors by the names of their buffers. The tensor of an offloaded buffer has only the seats, filled
        with zeros.
    memory : Memory
        The memory of the pool's tensors.
    """

    def __init__(
        self,
        manifest: Manifest,
        programs: Programs,
        units: Sequence[Sequence[str]],
        buffers: Mapping[str, Tensor],
        memory: Memory,
    ) -> None:
        self._memory, self._batch = memory, manifest.state_rows
        self._specs = {buffer.name: buffer for buffer in manifest.buffers if buffer.device_layers}
        self._visits = layer_visits(manifest, programs, units)
        self._seats = {name: buffers[name] for name in self._specs}
        self.homes: dict[str, Tensor] = {}
        if not self._specs:
            return
        self._copies = memory.copy_queue()
        self.homes = {name: self._copies.allocate(spec.on_host) for name, spec in self._specs.items()}
        self._first = self._fetched(first_visits(self._visits)[units[0][0]].takes)
        self._armed = True  # whether the seats hold the layers of the first call; at the start both are zeros
        self._unstored: Copies = ()

    def index(self, ref: Ref) -> tuple[int, ...]:
        """Return the index of a reference into its tensor on the device: for an offloaded layer the index of its
        seat."""
        spec = self._specs.get(ref.name) if ref.kind == "buffer" else None
        if spec is None:
            return ref.index
        return (device_seat(layer_number(ref.index, spec), spec), *ref.index[spec.row_axis :])

    def visits(self, program: str, number: int) -> dict[int, BoundVisit]:
        """Return the calls of one run of a program that use offloaded layers, by call number."""
        return {
            at: BoundVisit(self._fetched(visit.fetches), [(b, a) for a, b in self._fetched(visit.stores)])
            for at, visit in self._visits.get((program, number), {}).items()
        }

    def before(self, visit: BoundVisit) -> None:
        """Queue the copies around an engine call: wait for the call's layers, and start to copy the layers of the next
        call."""
        self._copies.join()
        with self._copies.forked():
            self._copy(self._unstored)
            self._copy(visit.fetches)
        self._unstored = visit.stores

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Context manager in which the programs of a unit, or some of them, run. The unit can be captured as a CUDA
        graph after `arm` was called."""
        if not self._specs:
            yield
            return
        self._armed, self._unstored = False, ()
        try:
            yield
            with self._copies.forked():
                self._copy(self._unstored)
            self._armed = True
        finally:
            self._copies.join()

    def arm(self) -> None:
        """Queue copies of the layers of a unit's first call to their seats, if a failed run left other layers there."""
        if self._specs and not self._armed:
            self._copy(self._first)
            self._armed = True

    def clear(self, buffer: str, row: int | None = None) -> None:
        """Queue zeros into an offloaded buffer, or into the part of it that belongs to one row of the pool."""

        def part(layer: Tensor) -> Tensor:
            return layer if row is None else self._memory.row(layer, 0, row, self._batch)

        # The device writes the zeros in stream order. Afterwards the seats hold the layers of the first call.
        spec = self._specs[buffer]
        for seat in range(spec.device_layers):
            self._memory.zero(part(self._memory.index(self._seats[buffer], (seat,))))
        zeros = part(self._memory.index(self._seats[buffer], (spec.resident_layers,)))
        for number in range(spec.resident_layers, spec.layers):
            self._memory.copy(part(self._home(buffer, number)), zeros)

    def sample(self, buffer: str, step: int) -> NDArray[np.float32]:
        """Wait for the device, and return every ``step``-th entry of an offloaded buffer along its row axis."""
        spec = self._specs[buffer]
        seats = self._memory.read(self._memory.every(self._seats[buffer], 1, step))[: spec.resident_layers]
        homes = self._memory.read(self._memory.every(self.homes[buffer], 1, step))
        layers = np.concatenate((seats, homes))
        return layers.reshape(*spec.shape[: spec.row_axis], *layers.shape[1:])

    def drop(self) -> None:
        """Release all tensors of the offloaded cache."""
        self.homes.clear()
        self._seats.clear()
        self._first = self._unstored = ()

    def _home(self, buffer: str, layer: int) -> Tensor:
        return self._memory.index(self.homes[buffer], (layer - self._specs[buffer].resident_layers,))

    def _fetched(self, layers: Sequence[Layer]) -> Copies:
        """Return the queued copies of layers from their homes in host memory to their seats on the device."""
        return [
            (
                self._memory.index(self._seats[name], (device_seat(layer, self._specs[name]),)),
                self._home(name, layer),
            )
            for name, layer in layers
        ]

    def _copy(self, copies: Copies) -> None:
        for target, source in copies:
            self._memory.copy(target, source)
