"""Messages between a caller and the processes that it started: JSON and plain arrays over a socket pair.

Nothing is pickled. A message is one JSON object, then the bytes of each array in it. In the JSON, ``{"": 2}`` stands
for array 2.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError

_NUMBERS = "biuf"  # of numpy's dtypes: bool, integers, floats


class Channel:
    """One end of a connection, which it closes. Any thread may send; one thread receives."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message: mappings and sequences of numbers, strings, None and arrays.

        A dataclass is sent as a mapping, what else numpy can convert as an array, such as a host tensor of torch.

        Raises
        ------
        UsageError
            If it holds anything else.
        OSError
            If the other end is gone.
        """
        arrays: list[NDArray[Any]] = []
        packed = _packed(message, "message", arrays)
        table = [[array.dtype.str, list(array.shape)] for array in arrays]
        with self._sending:
            self.connection.send_bytes(json.dumps({"message": packed, "arrays": table}).encode())
            for array in arrays:
                left = _bytes_of(array)
                while left:
                    left = left[os.write(self.connection.fileno(), left) :]

    def receive(self) -> dict[str, Any]:
        """Return the next message; waits for it.

        Raises
        ------
        EOFError, OSError
            If the other end is gone.
        """
        read = json.loads(self.connection.recv_bytes())
        arrays = []
        for dtype, shape in read["arrays"]:
            arrays.append(np.empty(shape, np.dtype(dtype)))
            left = _bytes_of(arrays[-1])
            while left:
                count = os.readv(self.connection.fileno(), [left])
                if not count:
                    raise EOFError
                left = left[count:]
        message: dict[str, Any] = _unpacked(read["message"], arrays)
        return message

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


def _packed(one: object, name: str, arrays: list[NDArray[Any]]) -> object:
    """Return a part of a message as JSON can hold it, and append its arrays; ``name`` is for errors."""
    if one is None or isinstance(one, str | int | float):
        return one
    if is_dataclass(one) and not isinstance(one, type):
        one = asdict(one)
    if isinstance(one, Mapping):
        if odd := [key for key in one if not isinstance(key, str) or not key]:
            raise UsageError(f"{name} has the name {odd[0]!r}, expected words")
        return {key: _packed(value, key, arrays) for key, value in one.items()}
    if isinstance(one, Sequence):
        return [_packed(value, name, arrays) for value in one]
    try:
        array = np.asarray(one, order="C")
    except (TypeError, ValueError, RuntimeError) as fault:
        raise UsageError(f"{name} is no array of numbers: {fault}") from None
    if array.dtype.kind not in _NUMBERS:
        raise UsageError(f"{name} is a {type(one).__name__}, expected an array of numbers")
    if isinstance(one, np.generic):
        return array.item()
    arrays.append(array)
    return {"": len(arrays) - 1}


def _unpacked(one: Any, arrays: Sequence[NDArray[Any]]) -> Any:
    """Return a part of a message with its arrays."""
    if isinstance(one, dict):
        return arrays[one[""]] if "" in one else {key: _unpacked(value, arrays) for key, value in one.items()}
    return [_unpacked(value, arrays) for value in one] if isinstance(one, list) else one


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """Return an array's own memory."""
    return array.reshape(-1).view(np.uint8).data


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return the caller's end of a new connection, and the socket that the other process inherits."""
    own, other = socket.socketpair()
    return Channel(Connection(own.detach())), other


def inherited_channel(descriptor: int) -> Channel:
    """Return the end whose descriptor this process inherited."""
    return Channel(Connection(descriptor))
