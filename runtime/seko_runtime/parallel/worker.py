"""The side of one rank's process: answers the caller's commands in order, and sends a beat twice a second."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.host.faults import of_machine, told
from seko_runtime.parallel.channel import Channel, inherited_channel

BEAT_S = 0.5
_Message = tuple[dict[str, Any], dict[str, NDArray[Any]]]
# Takes a command, its facts and its arrays; returns the answer and its arrays.
Handler = Callable[
    [str, Mapping[str, Any], Mapping[str, NDArray[Any]]], tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]]
]


def serve(
    descriptor: int, begin: Callable[[int, Mapping[str, Any]], tuple[Handler, Mapping[str, Any]]]
) -> None:
    """Answer commands until the caller says ``end``, or is gone. Does not return.

    Parameters
    ----------
    descriptor : int
        The inherited end of the channel.
    begin : callable
        Takes the rank and the facts of the first command; returns what handles all others, and its answer.
    """
    channel = inherited_channel(descriptor)
    waiting: queue.SimpleQueue[_Message] = queue.SimpleQueue()
    for work in (lambda: _read(channel, waiting), lambda: _beat(channel)):
        threading.Thread(target=work, daemon=True).start()
    handler: Handler | None = None
    while True:
        message, arrays = waiting.get()
        command, number = message["command"], message["number"]
        if command == "end":
            _answered(channel, lambda: ({}, {}) if handler is None else handler("end", {}, {}), number)
            os._exit(0)  # libraries of collectives may wait for each other in their own ends

        def answer() -> tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]]:
            nonlocal handler
            if handler is None:
                handler, said = begin(message["rank"], message["facts"])  # noqa: B023 - called at once
                return said, {}
            return handler(command, message["facts"], arrays)  # noqa: B023

        _answered(channel, answer, number)


def _answered(
    channel: Channel,
    answer: Callable[[], tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]]],
    number: int,
) -> None:
    """Send what a command gives, or its error."""
    try:
        result, arrays = answer()
        channel.send({"number": number, "result": result}, arrays)
    except OSError as fault:
        _fault(channel, number, of_machine(fault) or fault)
    except Exception as fault:
        _fault(channel, number, fault if isinstance(fault, SekoRuntimeError) else of_machine(fault) or fault)


def _fault(channel: Channel, number: int, fault: Exception) -> None:
    ours = isinstance(fault, SekoRuntimeError)
    said = str(fault) if ours else told(fault)
    channel.send({"number": number, "fault": [type(fault).__name__ if ours else "", said]})


def _read(channel: Channel, waiting: queue.SimpleQueue[_Message]) -> None:
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
