"""Messages between a caller and the processes that it started, sent as JSON and plain arrays over a socket pair.

No object is pickled for a message. A message is one JSON object, followed by the bytes of each array in the message. In
the JSON of a message, ``{"": 2}`` stands for array 2, and ``{"": [NAME, FIELDS]}`` for a tuple or an object of a
registered class (`records`). Any other sequence arrives as a list, and any other mapping as a dict.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from select import POLLOUT, poll
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.parallel.records import put_together, taken_apart

_NUMBERS = "biuf"  # numpy's kinds of dtypes that are allowed: bool, integers, floats
MAX_DEPTH = 32  # deepest nesting of mappings and sequences
MAX_PARTS = 1 << 20  # most parts of a message: numbers, strings, mappings and sequences
# most bytes of an array that must be copied before it is sent; a broadcast array may claim any size
MAX_VIEW_BYTES = 1 << 28
_MAX_BITS = 1024  # most bits of an integer, because Python refuses to print numbers of many thousand digits


class Channel:
    """One end of a connection between two processes. Any thread may send messages on a channel, but only one thread
    receives."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any] | Packed) -> None:
        """Send a message to the other process. The message is a `Packed` message or a value that `pack` takes.

        Raises
        ------
        UsageError
            If the message cannot be packed; nothing is sent.
        OSError
            If the other process has closed its end.
        """
        packed = message if isinstance(message, Packed) else pack(message)
        with self._sending:
            self.connection.send_bytes(_head(packed))
            for array in packed.arrays:
                remaining = _bytes_of(array)
                while remaining:
                    remaining = remaining[os.write(self.connection.fileno(), remaining) :]

    def send_at_once(self, message: Mapping[str, Any]) -> bool:
        """Send a short message without arrays to the other process if that is possible without waiting; return whether
        the message was sent."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            room = poll()
            room.register(self.connection.fileno(), POLLOUT)
            if not room.poll(0):
                return False
            self.connection.send_bytes(_head(pack(message)))
            return True
        finally:
            self._sending.release()

    def receive(self) -> dict[str, Any]:
        """Wait for the next message from the other process and return it.

        Raises
        ------
        EOFError, OSError
            If the other process has closed its end.
        ValueError
            If the message holds an object of a class that this process has not registered.
        """
        read = json.loads(self.connection.recv_bytes())
        arrays = []
        for dtype, shape in read["arrays"]:
            arrays.append(np.empty(shape, np.dtype(dtype)))
            remaining = _bytes_of(arrays[-1])
            while remaining:
                count = os.readv(self.connection.fileno(), [remaining])
                if not count:
                    raise EOFError
                remaining = remaining[count:]
        message: dict[str, Any] = _unpacked(read["message"], arrays)
        return message

    def peer(self) -> int:
        """Return the id of the process that made the connection's other end."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as own:
            return peer_of(own)[0]

    def close(self) -> None:
        """Close this end of the connection."""
        self.connection.close()


@dataclass(frozen=True)
class Packed:
    """A packed message: a JSON value, and the arrays to which the JSON value refers."""

    parts: Mapping[str, Any]
    arrays: Sequence[NDArray[Any]]

    def with_more(self, message: Mapping[str, Any], *, within: str) -> Packed:
        """Return a new message with the single entry ``within``, whose value is this message with further entries.

        Entries of the message that are packed already are not packed again.
        """
        packer = _Packer(list(self.arrays))
        more = packer.part(message, within, 0)
        return Packed({within: {**self.parts, **more}}, packer.arrays)  # type: ignore[dict-item]


def pack(message: Mapping[str, Any]) -> Packed:
    """Pack a message: mappings and sequences of numbers, strings, None, arrays and objects of registered classes
    (`records.record`).

    Other objects that numpy can convert, such as a torch tensor on the host, become arrays in a packed message.

    Raises
    ------
    UsageError
        If the message holds an object of another kind, is nested deeper than `MAX_DEPTH`, has more than `MAX_PARTS`
        parts, an integer with too many bits, or a view whose contiguous copy would exceed `MAX_VIEW_BYTES`.
    """
    packer = _Packer([])
    return Packed(packer.part(message, "message", 0), packer.arrays)  # type: ignore[arg-type]  # a mapping gives one


class _Packer:
    """Packer of one message: collects its arrays in ``arrays`` and counts its parts."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self.arrays = arrays
        self._left = MAX_PARTS

    def part(self, part: object, name: str, depth: int) -> object:
        """Return a part of the message as a JSON value; ``name`` is its name in errors."""
        self._left -= 1
        if self._left < 0:
            raise UsageError(f"{name} has more than {MAX_PARTS} parts; give numbers as an array")
        if isinstance(part, int) and part.bit_length() > _MAX_BITS:
            raise UsageError(
                f"{name} is an integer of {part.bit_length()} bits, expected at most {_MAX_BITS}"
            )
        if part is None or isinstance(part, str | int | float):
            return part
        if depth > MAX_DEPTH:
            raise UsageError(f"{name} is nested more than {MAX_DEPTH} deep, or contains itself")
        if apart := taken_apart(part):
            kind, parts = apart
            return {"": [kind, self.part(parts, name, depth)]}
        if isinstance(part, Mapping):
            if odd := [key for key in part if not isinstance(key, str) or not key]:
                raise UsageError(f"{name} has the name {odd[0]!r}, expected words")
            return {key: self.part(value, key, depth + 1) for key, value in part.items()}
        if isinstance(part, Sequence):
            return [self.part(value, name, depth + 1) for value in part]
        return self._array(part, name)

    def _array(self, part: object, name: str) -> object:
        try:
            array = np.asarray(part)
            if not array.flags.c_contiguous and array.nbytes <= MAX_VIEW_BYTES:
                array = np.ascontiguousarray(array)
        except Exception as fault:  # the method `__array__` of a foreign class may raise any exception
            raise UsageError(f"{name} is no array of numbers: {fault}") from None
        if not array.flags.c_contiguous:
            raise UsageError(
                f"{name} is a view of {array.nbytes} bytes whose numbers do not lie one behind the other, expected at "
                f"most {MAX_VIEW_BYTES}: give an array of its own"
            )
        if array.dtype.kind not in _NUMBERS:
            raise UsageError(f"{name} is a {type(part).__name__}, expected an array of numbers")
        if isinstance(part, np.generic):
            return array.item()
        self.arrays.append(array)
        return {"": len(self.arrays) - 1}


def _head(packed: Packed) -> bytes:
    """Return the JSON text of a message, which is sent before the message's arrays."""
    table = [[array.dtype.str, list(array.shape)] for array in packed.arrays]
    return json.dumps({"message": packed.parts, "arrays": table}).encode()


def _unpacked(part: Any, arrays: Sequence[NDArray[Any]]) -> Any:
    """Return a part of a received message, with its arrays in their places."""
    if isinstance(part, dict):
        match part.get(""):
            case None:
                return {key: _unpacked(value, arrays) for key, value in part.items()}
            case [name, parts]:
                return put_together(name, _unpacked(parts, arrays))
            case number:
                return arrays[number]
    return [_unpacked(value, arrays) for value in part] if isinstance(part, list) else part


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Return the ids of the process and the user that made the other end of a Unix socket."""
    process, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return the caller's end of a new connection, and the socket that the other process inherits."""
    own, other = socket.socketpair()
    return Channel(Connection(own.detach())), other


def inherited_channel(descriptor: int) -> Channel:
    """Return the channel whose socket descriptor this process inherited."""
    return Channel(Connection(descriptor))
