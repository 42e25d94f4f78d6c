"""A client of SGLang's realtime video, written from what its server and its page say to each other. No tests."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import numpy as np
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

WAIT_S = 60.0
PATH = "/v1/realtime_video/generate"


class Client:
    """One open socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def send(self, **fields: object) -> None:
        self.socket.send(msgpack.packb(fields))

    def init(self, **fields: object) -> None:
        self.send(type="init", **fields)

    def event(self, kind: str, payload: object, event_id: int | None = None) -> None:
        self.send(type="event", kind=kind, payload=payload, event_id=event_id)

    def hold(self, *steps: str, event_id: int | None = None) -> None:
        """Hold the buttons of each text in turn, such as ``wd``; an empty text lets go."""
        transitions = [{"actions": list(step), "client_ts_ms": 70_000.0} for step in steps]
        self.event("camera_actions", {"mode": "state", "transitions": transitions}, event_id)

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = msgpack.unpackb(self.socket.recv(WAIT_S))
        return message

    def chunk(self) -> tuple[list[np.ndarray], list[dict[str, Any]], dict[str, Any]]:
        """The frames of the next chunk, its messages without them, and its figures."""
        frames, batches = [], []
        while (message := self.message())["type"] == "frame_batch":
            frames += pictures(message)
            batches.append(message)
        assert message["type"] == "chunk_stats", message
        return frames, batches, message

    def error(self) -> str:
        """The next error, whatever comes before it."""
        while (message := self.message())["type"] != "error":
            pass
        return str(message["content"])

    def end(self) -> tuple[int, str]:
        """The code and the reason of the close that ends the socket, whatever comes before it."""
        with suppress(ConnectionClosed):
            while True:
                self.socket.recv(WAIT_S)
        assert self.socket.close_code is not None
        return self.socket.close_code, self.socket.close_reason or ""


def pictures(message: dict[str, Any]) -> list[np.ndarray]:
    """The frames of a message, uint8 [height, width, 3]."""
    payload = message["payload"]
    assert message["total_size"] == len(payload)
    if message["content_type"] == "application/x-raw-rgb":
        shape = message["num_frames"], message["height"], message["width"], message["channels"]
        assert message["bytes_per_frame"] * message["num_frames"] == len(payload)
        return [*np.frombuffer(payload, np.uint8).reshape(shape)]
    frames, stream = [], io.BytesIO(payload)
    for length in message["payload_lengths"]:
        with Image.open(io.BytesIO(stream.read(length))) as picture:
            assert f"image/{(picture.format or '').lower()}" == message["content_type"]
            frames.append(np.asarray(picture.convert("RGB")))
    assert not stream.read()
    assert len(frames) == message["num_frames"]
    return frames


@contextmanager
def opened(
    url: str, key: str = "", origin: str | None = None, query: str = "", **options: Any
) -> Iterator[Client]:
    """Open a socket of a server; further options are those of `websockets`."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = url.replace("http", "ws", 1) + PATH + query
    with connect(
        address, additional_headers=headers, origin=origin, max_size=None, compression=None, **options
    ) as socket:
        yield Client(socket)
