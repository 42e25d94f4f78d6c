"""The side of one rank's process: answers the caller's commands in order, and sends a beat twice a second."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.host.faults import of_machine, told
from seko_runtime.parallel.channel import Channel, inherited_channel

BEAT_S = 0.5
Handler = Callable[[str, Mapping[str, Any]], object]  # takes a command and its facts; returns the answer


def serve(descriptor: int, begin: Callable[[int, Mapping[str, Any]], tuple[Handler, object]]) -> None:
    """Answer commands until the caller says ``end``, or is gone. Does not return.

    Parameters
    ----------
    descriptor : int
        The inherited end of the channel.
    begin : callable
        Takes the rank and the facts of the first command; returns what handles all others, and its answer.
    """
    channel = inherited_channel(descriptor)
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for work in (lambda: _read(channel, waiting), lambda: _beat(channel)):
        threading.Thread(target=work, daemon=True).start()
    handler: Handler | None = None
    while True:
        message = waiting.get()
        command, number = message["command"], message["number"]
        if command == "end":
            _answered(channel, lambda: None if handler is None else handler("end", {}), number)
            os._exit(0)  # libraries of collectives may wait for each other in their own ends

        def answer() -> object:
            nonlocal handler
            if handler is None:
                handler, said = begin(message["rank"], message["facts"])  # noqa: B023 - called at once
                return said
            return handler(command, message["facts"])  # noqa: B023

        _answered(channel, answer, number)


def _answered(channel: Channel, answer: Callable[[], object], number: int) -> None:
    """Send what a command gives, or its error."""
    try:
        channel.send({"number": number, "result": answer()})
    except OSError as fault:
        _fault(channel, number, of_machine(fault) or fault)
    except Exception as fault:
        _fault(channel, number, fault if isinstance(fault, SekoRuntimeError) else of_machine(fault) or fault)


def _fault(channel: Channel, number: int, fault: Exception) -> None:
    ours = isinstance(fault, SekoRuntimeError)
    said = str(fault) if ours else told(fault)
    channel.send({"number": number, "fault": [type(fault).__name__ if ours else "", said]})


def _read(channel: Channel, waiting: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue messages; end this process when the caller is gone, whatever it does just now."""
    while True:
        try:
            waiting.put(channel.receive())
        except (EOFError, OSError):
            os._exit(0)


def _beat(channel: Channel) -> None:
    waiter = threading.Event()
    while not waiter.wait(BEAT_S):
        try:
            channel.send({})
        except OSError:
            os._exit(0)
