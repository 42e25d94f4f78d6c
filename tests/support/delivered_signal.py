"""A signal that is known to have come. No tests."""

from __future__ import annotations

import signal
import socket
import threading


def deliver(thread: threading.Thread, number: signal.Signals) -> None:
    """Send a signal to a thread; return once the system has delivered it. Call this from the main thread.

    Python runs the signal's handler in the main thread, between two of its next instructions. A pause instead of
    this would be a bet on how soon the system lets the other thread run.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        reader.settimeout(60)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            signal.pthread_kill(thread.ident or 0, number)
            reader.recv(1)
        finally:
            signal.set_wakeup_fd(before)
