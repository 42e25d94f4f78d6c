"""The rank's side of a rank group. The process of a rank answers the caller's commands in order, and sends a heartbeat
twice a second.

The process of a rank ends when its caller ends. If the process waits for a command, the closed channel shows at once
that the caller has ended. In the middle of a command, or if a child of the caller inherited the channel and lives on,
the caller's entry in /proc shows it to the thread that sends heartbeats. The thread that answers commands also reads
them, since on a busy machine each change of threads may take milliseconds.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.host.faults import fault_text, of_machine
from seko_runtime.parallel.channel import Channel
from seko_runtime.parallel.process_state import started_at

BEAT_S = 0.5
# takes a command's name and arguments; returns the answer
Handler = Callable[[str, Mapping[str, Any]], object]


def serve(channel: Channel, begin: Callable[[int, Mapping[str, Any]], tuple[Handler, object]]) -> None:
    """Answer the caller's commands until the command ``end``, then close the channel. If the caller has ended, the
    process of the rank ends.

    Parameters
    ----------
    channel : Channel
        This process's end of the connection to the caller.
    begin : callable
        Function that takes the rank and the arguments of the first command; the function returns the handler of all
        later commands, and the answer to the first command.
    """
    caller = _Caller(channel)
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(channel, ended, caller), daemon=True)
    beats.start()
    handler: Handler | None = None
    while True:
        message = _read(channel, caller)

        def answer() -> object:
            nonlocal handler
            if handler is not None:
                return handler(message["command"], message["facts"])  # noqa: B023 - called at once
            if message["command"] != "end":  # noqa: B023
                caller.folder = Path(message["facts"]["meeting"]).parent  # noqa: B023
                handler, begun = begin(message["rank"], message["facts"])  # noqa: B023
                return begun
            return None

        _answered(channel, answer, message["number"])
        if message["command"] == "end":
            ended.set()
            beats.join()
            channel.close()
            return


def _answered(channel: Channel, answer: Callable[[], object], number: int) -> None:
    """Run a command and send its answer or its error."""
    try:
        channel.send({"number": number, "result": answer()})
    except Exception as fault:
        error = fault if isinstance(fault, SekoRuntimeError) else of_machine(fault) or fault
        ours = isinstance(error, SekoRuntimeError)
        description = [type(error).__name__, str(error)] if ours else ["", fault_text(error)]
        channel.send({"number": number, "fault": description})


class _Caller:
    """The process that started this rank's process and sends it commands.

    Attributes
    ----------
    folder : Path or None
        Folder of the group of processes, once it is known. The caller removes the folder; if the caller has ended, the
        ranks' processes do.
    """

    def __init__(self, channel: Channel) -> None:
        self._process = channel.peer()
        self._born = started_at(self._process)
        self.folder: Path | None = None

    def lives(self) -> bool:
        """Return whether the calling process still runs; a later process with the same id does not count."""
        return started_at(self._process) == self._born

    def is_gone(self) -> NoReturn:
        """End this process at once, whatever it is doing, because the calling process has ended."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


def _read(channel: Channel, caller: _Caller) -> dict[str, Any]:
    """Return the next message; end this process when the calling process has ended."""
    try:
        return channel.receive()
    except (EOFError, OSError):
        caller.is_gone()
    except Exception as fault:  # the caller shows what a process has said last, and ends the others
        print(f"a message cannot be read: {fault}", file=sys.stderr, flush=True)
        os._exit(1)


def _beat(channel: Channel, ended: threading.Event, caller: _Caller) -> None:
    while not ended.wait(BEAT_S):
        if not caller.lives():
            caller.is_gone()
        try:
            channel.send({})
        except OSError:
            caller.is_gone()
