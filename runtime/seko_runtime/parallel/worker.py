"""The side of one rank's process: answers the caller's commands in order, and sends a beat twice a second.

The process ends when its caller does. A closed channel tells that at once; where a child of the caller inherited the
channel and lives on, the caller's entry in /proc tells it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.host.faults import of_machine, told
from seko_runtime.parallel.channel import Channel
from seko_runtime.parallel.process_state import started_at

BEAT_S = 0.5
Handler = Callable[[str, Mapping[str, Any]], object]  # takes a command and its facts; returns the answer


def serve(channel: Channel, begin: Callable[[int, Mapping[str, Any]], tuple[Handler, object]]) -> None:
    """Answer commands until the caller says ``end``, then close the channel. If the caller is gone, the process ends.

    Parameters
    ----------
    channel : Channel
        This process's end.
    begin : callable
        Takes the rank and the facts of the first command; returns what handles all others, and its answer.
    """
    caller = channel.peer()
    born = started_at(caller)
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(channel, ended, caller, born), daemon=True)
    beats.start()
    threading.Thread(target=_read, args=(channel, waiting), daemon=True).start()
    handler: Handler | None = None
    while True:
        message = waiting.get()

        def answer() -> object:
            nonlocal handler
            if handler is not None:
                return handler(message["command"], message["facts"])  # noqa: B023 - called at once
            if message["command"] != "end":  # noqa: B023
                handler, said = begin(message["rank"], message["facts"])  # noqa: B023
                return said
            return None

        _answered(channel, answer, message["number"])
        if message["command"] == "end":
            ended.set()
            beats.join()
            channel.close()
            return


def _answered(channel: Channel, answer: Callable[[], object], number: int) -> None:
    """Send what a command gives, or its error."""
    try:
        channel.send({"number": number, "result": answer()})
    except Exception as fault:
        found = fault if isinstance(fault, SekoRuntimeError) else of_machine(fault) or fault
        ours = isinstance(found, SekoRuntimeError)
        said = [type(found).__name__, str(found)] if ours else ["", told(found)]
        channel.send({"number": number, "fault": said})


def _read(channel: Channel, waiting: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue messages up to the last; end this process when the caller is gone, whatever it does just now."""
    command = None
    while command != "end":
        try:
            message = channel.receive()
        except (EOFError, OSError):
            os._exit(0)
        command = message["command"]
        waiting.put(message)


def _beat(channel: Channel, ended: threading.Event, caller: int, born: int | None) -> None:
    while not ended.wait(BEAT_S):
        if started_at(caller) != born:
            os._exit(0)
        try:
            channel.send({})
        except OSError:
            os._exit(0)
