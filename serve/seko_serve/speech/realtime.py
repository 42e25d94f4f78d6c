"""The socket of OpenAI's realtime events, for text in and sound out: `/v1/realtime`."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from seko_runtime.speech.manifest import SpeechManifest
from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import internal_error
from seko_serve.http.protocol_sockets import ProtocolSocketRoutes
from seko_serve.http.schemas import Table
from seko_serve.http.stream import NORMAL, STALL_S, close_socket
from seko_serve.live.manager import SessionManager
from seko_serve.media.sound_files import plain_samples
from seko_serve.speech.fields import DEFAULT_VOICE, FIELDS, MAX_INPUT_LETTERS, is_stock_model
from seko_serve.speech.realtime_events import (
    PCM,
    RATE,
    RESPONSE,
    SESSION,
    error_event,
    event,
    message_item,
    new_id,
    object_in,
    text_of,
)
from seko_serve.speech.speaking import Speaker, Speech

PATH = "/v1/realtime"
MOST_SAID = 256  # items of a conversation that were spoken and may be named
IDLE_S = 600.0  # without a message, behind which a socket is closed that speaks nothing


class RealtimeRoutes(ProtocolSocketRoutes):
    """The socket of OpenAI's realtime events."""

    path = PATH

    def __init__(self, manager: SessionManager, access: Access, speaker: Speaker) -> None:
        super().__init__(manager, access)
        self._speaker = speaker

    def _check(self) -> SpeechManifest:
        return self._speaker.manifest()

    async def _serve(self, socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        await socket.accept(subprotocol="realtime" if "realtime" in offered else None)
        try:
            self._access.count_socket(socket)
            self._access.check_page(socket)
            tenant, manifest = self._access.tenant(socket, PATH), self._check()
            _check_model(socket.query_params.get("model"), manifest)
        except ServeError as error:
            self._manager.device.metrics.refused.labels(error.kind.code).inc()
            await close_socket(socket, json.dumps(error_event(error)), error.kind.close, error.message)
            return
        await _Conversation(socket, tenant, manifest, self._manager, self._access, self._speaker).serve()


def _check_model(name: object, manifest: SpeechManifest) -> None:
    """Raise a ServeError for a model that is neither the artifact nor one of OpenAI's."""
    if name not in (None, manifest.name) and not is_stock_model(name):
        raise ServeError("not_found", f"this server has the model {manifest.name}", field="model")


@dataclass
class _Settings:
    """What a session or a response speaks with."""

    voice: object
    rate: int
    most: int | None = None

    def changed(self, values: dict[str, Any]) -> _Settings:
        """Return the settings with what an event says."""
        audio = values.get("audio", {})
        return _Settings(
            audio.get("voice", self.voice),
            audio.get("rate", self.rate),
            values.get("max_output_tokens", self.most),
        )

    def output(self) -> Table:
        """Return the settings as clients read them."""
        return {"output": {"format": {"type": PCM, "rate": self.rate}, "voice": self.voice}}


@dataclass
class _Response:
    """One response: a text that is spoken."""

    text: str
    settings: _Settings
    metadata: object
    id: str = field(default_factory=lambda: new_id("resp"))
    item: str = field(default_factory=lambda: new_id("item"))
    status: str = "in_progress"
    details: Table | None = None
    usage: object = None
    begun: bool = False  # whether its item was sent

    def end(self, status: str, **details: object) -> None:
        """Set the status with which the response ends."""
        self.status, self.details = status, {"type": status, **details}

    def fail(self, error: ServeError) -> None:
        """Set the error with which the response ends."""
        self.end("failed", error={"type": "error", "code": error.kind.code, "message": error.message})

    def message(self) -> Table:
        """Return the item of the conversation that the response is."""
        part = {"type": "output_audio", "transcript": self.text}
        return message_item(
            self.item, "assistant", part, "completed" if self.status == "completed" else "incomplete"
        )

    def table(self) -> Table:
        """Return the response as clients read it."""
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": self.status,
            "status_details": self.details,
            "output": [] if self.status == "in_progress" else [self.message()],
            "output_modalities": ["audio"],
            "audio": self.settings.output(),
            "max_output_tokens": self.settings.most or "inf",
            "metadata": self.metadata,
            "usage": self.usage,
        }


class _Conversation:
    """What one socket says: texts that wait, and at most one response at a time."""

    def __init__(
        self,
        socket: WebSocket,
        tenant: str,
        manifest: SpeechManifest,
        manager: SessionManager,
        access: Access,
        speaker: Speaker,
    ) -> None:
        self._socket, self._tenant, self._manifest = socket, tenant, manifest
        self._manager, self._access, self._speaker = manager, access, speaker
        self._id, self._settings = new_id("sess"), _Settings(DEFAULT_VOICE, RATE)
        self._texts: list[tuple[str, str]] = []  # for the next response, each with the id of its item
        self._said: deque[str] = deque(maxlen=MOST_SAID)  # ids of the items before them
        self._speaking: asyncio.Task[None] | None = None
        self._response: _Response | None = None
        self._sending = asyncio.Lock()
        self._events = {
            "session.update": self._update,
            "conversation.item.create": self._add,
            "response.create": self._respond,
            "response.cancel": self._cancel,
        }

    async def serve(self) -> None:
        """Take events until the client leaves, or says nothing for `IDLE_S` seconds."""
        try:
            await self._send("session.created", session=self._session())
            while True:
                try:
                    async with asyncio.timeout(IDLE_S):
                        received = await self._socket.receive()
                except TimeoutError:
                    if self._speaking is None:
                        await close_socket(self._socket, None, NORMAL)
                        return
                    continue
                if received["type"] == "websocket.disconnect":
                    return
                await self._take(received.get("text") or "")
        except WebSocketDisconnect:
            return
        finally:
            await self._stop()

    async def _take(self, text: str) -> None:
        table: Any = None
        try:
            self._access.controls.take(f"realtime {self._id}")
            with suppress(ValueError, RecursionError):
                table = json.loads(text)
            if not isinstance(table, dict):
                raise ServeError("bad_request", "an event is a JSON object")
            kind = table.get("type")
            if not isinstance(kind, str) or kind not in self._events:
                known = ", ".join(self._events)
                raise ServeError("unsupported", f"this server speaks texts, and takes {known}", field="type")
            await self._events[kind](table)
        except ServeError as error:
            self._manager.device.metrics.refused.labels(error.kind.code).inc()
            await self._send_table(
                error_event(error, table.get("event_id") if isinstance(table, dict) else None)
            )
            if table is None and error.retry_after is not None:  # too many: what follows waits
                await asyncio.sleep(error.retry_after)
        except WebSocketDisconnect:
            raise
        except Exception as fault:
            await self._send_table(error_event(internal_error(fault)))

    # -- what clients send -------------------------------------------------------------------------------------

    async def _update(self, table: dict[str, Any]) -> None:
        values = SESSION.read(object_in(table.get("session"), "session"), self._manifest)
        _check_model(values.get("model"), self._manifest)
        self._settings = await self._checked(self._settings.changed(values))
        await self._send("session.updated", session=self._session())

    async def _add(self, table: dict[str, Any]) -> None:
        text, name = text_of(table.get("item")), str(table["item"].get("id") or new_id("item"))[:64]
        place = self._behind(table.get("previous_item_id"))
        if len(_joined([*(waiting for _, waiting in self._texts), text])) > MAX_INPUT_LETTERS:
            raise ServeError("too_large", f"more than {MAX_INPUT_LETTERS} letters wait for a response")
        self._texts.insert(place, (name, text))
        item = message_item(name, "user", {"type": "input_text", "text": text})
        before = [*self._said, *(earlier for earlier, _ in self._texts[:place])]
        for kind in ("added", "done"):
            await self._send(
                f"conversation.item.{kind}", item=item, previous_item_id=before[-1] if before else None
            )

    def _behind(self, before: object) -> int:
        """Return the place among the texts that wait of one that is to follow an item, by the item's id; None: behind
        all of them. Those that were spoken stand before them."""
        if before is None:
            return len(self._texts)
        place = next((place for place, (name, _) in enumerate(self._texts, 1) if name == before), None)
        if place is None and before != "root" and before not in self._said:
            raise ServeError("not_found", "the conversation has no such item", field="previous_item_id")
        return place or 0

    async def _respond(self, table: dict[str, Any]) -> None:
        if self._speaking is not None:
            raise ServeError(
                "conflict", "a response is spoken; wait for response.done, or send response.cancel"
            )
        values = RESPONSE.read(object_in(table.get("response") or {}, "response"), self._manifest)
        settings = await self._checked(self._settings.changed(values))
        text = _joined(values.get("input", [waiting for _, waiting in self._texts]))
        sent = FIELDS.read(
            {"input": text, "voice": settings.voice, "max_new_tokens": settings.most}, self._manifest
        )
        self._access.count_opening(self._socket, self._tenant)
        if "input" not in values:
            self._said.extend(name for name, _ in self._texts)
            self._texts.clear()
        self._response = response = _Response(text, settings, values.get("metadata"))
        if values.get("conversation") != "none":
            self._said.append(response.item)
        await self._send("response.created", response=response.table())
        self._speaking = asyncio.create_task(self._speak(response, sent))

    async def _cancel(self, table: dict[str, Any]) -> None:
        response = self._response
        if (
            response is None
            or response.status != "in_progress"
            or table.get("response_id") not in (None, response.id)
        ):
            raise ServeError("not_found", "no such response is spoken", field="response_id")
        await self._stop()
        response.end("cancelled", reason="client_cancelled")
        await self._finish(response)

    # -- responses ---------------------------------------------------------------------------------------------

    async def _checked(self, settings: _Settings) -> _Settings:
        """Return settings; ServeError if the server cannot speak with them."""
        own = self._manifest.workload.patch.sample_rate
        if settings.rate not in (RATE, own):
            raise ServeError("unsupported", f"the rate is {RATE} or {own}", field="audio.output.format.rate")
        if settings.most is not None and settings.most < 1:
            raise ServeError("bad_request", "max_output_tokens is less than 1", field="max_output_tokens")
        await self._speaker.named(
            FIELDS.read({"voice": settings.voice}, self._manifest), self._tenant, self._manifest
        )
        return settings

    async def _speak(self, response: _Response, values: dict[str, Any]) -> None:
        """Speak a text, and send its sound."""
        try:
            try:
                await self._say(response, values)
            except ServeError as error:
                self._manager.device.metrics.refused.labels(error.kind.code).inc()
                response.fail(error)
            except WebSocketDisconnect:
                raise
            except Exception as fault:
                response.fail(internal_error(fault))
            await self._finish(response)
        except WebSocketDisconnect:  # or the client takes nothing
            await close_socket(self._socket, None, NORMAL)
        finally:
            if self._speaking is asyncio.current_task():
                self._speaking = None

    async def _say(self, response: _Response, values: dict[str, Any]) -> None:
        manifest, place = self._manifest, self._place(response)
        kept, _ = await self._speaker.named(values, self._tenant, manifest)
        opening = await self._speaker.opening(values, manifest, kept)
        file = plain_samples(manifest.workload.patch.sample_rate, response.settings.rate)
        speech = Speech(response.text, file, manifest, response.settings.most)
        speech.text_tokens = await self._manager.device.in_background(speech.tokens_in)
        session = await self._speaker.opened(self._tenant, opening, _stays)
        # The session ends also if its client leaves before the first part is asked for.
        async with (
            self._speaker.closing(session),
            aclosing(self._speaker.parts(session, speech)) as parts,
        ):
            item = {**message_item(response.item, "assistant", {}, "in_progress"), "content": []}
            response.begun = True
            await self._send("response.output_item.added", response_id=response.id, output_index=0, item=item)
            await self._send("response.content_part.added", **place, part={"type": "audio", "transcript": ""})
            await self._send("response.output_audio_transcript.delta", **place, delta=response.text)
            async for part in parts:
                await self._send(
                    "response.output_audio.delta", **place, delta=base64.b64encode(part).decode()
                )
        told = speech.told()
        response.usage = told["usage"]
        if told["cut"]:
            response.end("incomplete", reason="max_output_tokens")
        else:
            response.end("completed")

    async def _finish(self, response: _Response) -> None:
        """Send the last events of a response."""
        place = self._place(response)
        if response.begun:
            part = {"type": "audio", "transcript": response.text}
            await self._send("response.output_audio.done", **place)
            await self._send("response.output_audio_transcript.done", **place, transcript=response.text)
            await self._send("response.content_part.done", **place, part=part)
            item = response.message()
            await self._send("response.output_item.done", response_id=response.id, output_index=0, item=item)
        self._speaking = None  # the next one may begin
        await self._send("response.done", response=response.table())

    async def _stop(self) -> None:
        """End the response that is spoken, and wait until its row is free."""
        task, self._speaking = self._speaking, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- what the server sends ---------------------------------------------------------------------------------

    @staticmethod
    def _place(response: _Response) -> Table:
        return {"response_id": response.id, "item_id": response.item, "output_index": 0, "content_index": 0}

    def _session(self) -> Table:
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self._id,
            "model": self._manifest.name,
            "output_modalities": ["audio"],
            "max_output_tokens": self._settings.most or "inf",
            "audio": self._settings.output(),
        }

    async def _send(self, kind: str, **fields: object) -> None:
        await self._send_table(event(kind, **fields))

    async def _send_table(self, table: Table) -> None:
        """Send an event; WebSocketDisconnect also if the client takes nothing."""
        content = json.dumps(table)
        try:
            async with self._sending, asyncio.timeout(STALL_S):
                await self._socket.send_text(content)
        except (RuntimeError, TimeoutError):
            raise WebSocketDisconnect(1006) from None
        self._manager.device.metrics.sent_bytes.inc(len(content))


def _joined(texts: Sequence[str]) -> str:
    """Return the texts of several items as the text of one response."""
    return "\n\n".join(filter(str.strip, texts))


async def _stays() -> bool:
    """Return that the client has not left: the task is cancelled when it has."""
    return False
