"""A live session on the device's thread: what it asks the pool for."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from seko_serve.live.content import Opening
from seko_serve.live.session import LiveSession
from seko_serve.live.video import VideoContent
from seko_serve.metrics import Metrics
from tests.runtime import toy_pool


class Camera:
    """Counts how often it was moved."""

    def __init__(self) -> None:
        self.moves = 0

    def next_chunk(self) -> dict[str, object]:
        self.moves += 1
        return {"move": self.moves}


class Row:
    """Notes what the pool is asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def request_chunk(self, due: float, inputs: object) -> None:
        del due
        self.asked.append(inputs)


def test_a_session_that_is_served_later_moves_its_camera_once_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where more sessions are ready than a call carries, some ask again before their chunk is made."""
    loop, opening = asyncio.new_event_loop(), Opening("a b", 0, 16.0)
    try:
        with ThreadPoolExecutor(1) as workers:
            content = VideoContent(toy_pool.pool_manifest(), opening)
            session = LiveSession("x", "y", content, loop, workers, lambda: None, Metrics())
            row, camera = Row(), Camera()
            monkeypatch.setattr(session, "_row", row)
            monkeypatch.setattr(content, "_camera", camera)
            monkeypatch.setattr(session._encoder, "_encode_all", lambda: None)
            for asked in (1, 3, 2):  # times until the pool makes the chunk
                for _ in range(asked):
                    session.request(0.0)
                session.made(object(), 1.0)  # type: ignore[arg-type]
            assert camera.moves == 3
            assert row.asked == [{"move": 1}, *[{"move": 2}] * 3, *[{"move": 3}] * 2]
    finally:
        loop.close()
