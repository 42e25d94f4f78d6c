"""The toy as a workload of the server: what a distribution from outside brings to be served. No tests."""

# ruff: noqa: ARG002  # methods of an interface that need not all of what they are told

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from seko_runtime.sessions.session import PendingResult
from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.openings import check_opening
from seko_serve.http.schemas import json_of, operation
from seko_serve.http.workload import ApiParts, Page, ServedWorkload, WorkloadRoutes
from seko_serve.live.content import Content, Piece
from seko_serve.live.manager import SessionManager
from seko_serve.live.track import SoundTrack
from seko_serve.media import sound
from seko_serve.protocol import Codec, Control, Media
from seko_serve.settings import Settings
from tests.toy_workload.model import KIND, POSITIONS, SAMPLES, ToyManifest
from tests.toy_workload.workload import Made, ToyPool, ToySession, Words

RATE = 16_000


class ToyPiece(Piece):
    """The samples of a step."""

    def __init__(self, content: ToyContent, made: Made) -> None:
        self._content, self._made = content, made
        self._samples = np.zeros(0, np.float32)

    def read(self) -> int:
        if not self._made.surplus:
            self._samples = self._made.samples()
        return len(self._samples)

    def encode(self, number: int, first: int) -> list[Media]:
        return self._content.track.encode(self._samples, number, first)


class ToyContent(Content):
    """What one session says."""

    rate, period_s = float(RATE), SAMPLES / RATE

    def __init__(self, words: Words) -> None:
        self._words, self.track, self._over = words, SoundTrack(Codec.PCM, RATE), False
        self._left = POSITIONS - len(words)

    def check(self, control: Control) -> None:
        raise ServeError("unsupported", "the toy takes no controls")

    def codecs(self, hello: Control) -> tuple[Codec, ...]:
        return (sound.chosen_codec(hello.fields.get("audio", ())),)

    def attach(self, codecs: Sequence[Codec]) -> None:
        """Go on: the toy has one codec."""

    def ready(self, codecs: Sequence[Codec]) -> dict[str, object]:
        return {"audio": {"codec": "pcm", "rate": RATE}}

    def preparation(self) -> None:
        """Nothing is to be prepared."""

    def recording(self) -> str:
        raise ServeError("unsupported", "the toy is not recorded")

    def open(self, pool: ToyPool, name: str, tenant: str) -> ToySession:
        return pool.open_session(self._words, name=name)

    def check_with(self, row: ToySession, control: Control) -> None:
        """Nothing is checked."""

    def apply(self, row: ToySession, control: Control) -> None:
        """Nothing is steered."""

    def starved(self) -> bool:
        return self._over

    def ask(self, row: ToySession, due: float) -> PendingResult:
        return row.request_samples(due)

    def accept_chunk(self, result: Made) -> ToyPiece:
        self._left -= 1
        self._over = result.surplus or not self._left
        return ToyPiece(self, result)

    def state(self) -> dict[str, Any]:
        return {"over": self._over, "left": self._left}

    def load(self, row: ToySession, state: Mapping[str, Any]) -> None:
        self._over, self._left = state["over"], state["left"]


class ToyRoutes(WorkloadRoutes):
    """A route that counts the words of the longest opening."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager

    def routes(self) -> list[BaseRoute]:
        return [Route("/v1/toy", self._most)]

    async def _most(self, _: Request) -> JSONResponse:
        return JSONResponse({"words": self._manager.device.manifest.workload.lengths[-1]})


class ServedToy(ServedWorkload[ToyManifest]):
    """The toy, as the server knows it."""

    kind = KIND
    page = Page("The toy", Path(__file__).parent / "page")

    def check(self, manifest: ToyManifest) -> None:
        """Everything that it needs is here."""

    def content_of(self, manifest: ToyManifest, opening: Words) -> ToyContent:
        return ToyContent(opening)

    def content_of_state(self, manifest: ToyManifest, state: Mapping[str, Any]) -> ToyContent:
        return ToyContent(())

    def usual_period_s(self, manifest: ToyManifest) -> float:
        return ToyContent.period_s

    def measure(self, pool: ToyPool, sessions: list[Any]) -> None:
        for count in pool.manifest.pool.buckets:
            for _ in range(count - len(sessions)):
                sessions.append(pool.open_session((1,)))
            for session in sessions:
                session.request_samples(0.0)
            pool.serve_next(in_one=True)

    def opening_of(self, table: dict[str, Any], manifest: ToyManifest) -> Words:
        check_opening(table, ("model", "words"), manifest.name)
        return table["words"]

    def facts_of(self, manifest: ToyManifest) -> dict[str, object]:
        return {"kind": KIND, "takes": {"words": True}}

    def limits_of(self, manifest: ToyManifest) -> Mapping[str, int]:
        return {"words": manifest.workload.lengths[-1]}

    def api(self) -> ApiParts:
        words = {"type": "array", "items": {"type": "integer"}}
        most = {"get": operation("The most words.", json_of("ToyWords"), ())}
        return ApiParts({"/v1/toy": most}, {"ToyWords": {"type": "object"}}, {"words": words})

    def routes(self, settings: Settings, manager: SessionManager, access: Access) -> Sequence[WorkloadRoutes]:
        return (ToyRoutes(manager),)


WORKLOAD = ServedToy()
