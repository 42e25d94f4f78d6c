"""Messages between a caller and the processes that it started: JSON and plain arrays over a socket pair.

Nothing is pickled. A message is one JSON object, then the bytes of each array that it names.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError

Arrays = Mapping[str, NDArray[Any]]
NUMBERS = "biuf"  # of numpy's dtypes: bool, integers, floats
_MOST_JSON_BYTES = 1 << 24


class Channel:
    """One end of a connection. Any thread may send; one thread receives.

    Parameters
    ----------
    connection : Connection
        Owned and closed by the channel.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send a message.

        Raises
        ------
        UsageError
            If an array holds anything but numbers.
        OSError
            If the other end is gone.
        """
        whole = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        for name, array in whole.items():
            if array.dtype.kind not in NUMBERS:
                raise UsageError(f"{name} is an array of {array.dtype}, expected numbers")
        table = [[name, array.dtype.str, list(array.shape)] for name, array in whole.items()]
        with self._sending:
            self.connection.send_bytes(json.dumps({"message": message, "arrays": table}).encode())
            for array in whole.values():
                left = _bytes_of(array)
                while left:
                    left = left[os.write(self.connection.fileno(), left) :]

    def receive(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the next message and its arrays; waits for it.

        Raises
        ------
        EOFError, OSError
            If the other end is gone.
        """
        read = json.loads(self.connection.recv_bytes(_MOST_JSON_BYTES))
        arrays = {}
        for name, dtype, shape in read["arrays"]:
            arrays[name] = np.empty(shape, np.dtype(dtype))
            left = _bytes_of(arrays[name])
            while left:
                count = os.readv(self.connection.fileno(), [left])
                if not count:
                    raise EOFError
                left = left[count:]
        return read["message"], arrays

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


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
