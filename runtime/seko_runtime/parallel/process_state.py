"""The state of a process by /proc: whether it runs, how much, and since when."""

from __future__ import annotations

from pathlib import Path

_GONE = "XxZ"  # dead, or dead and not yet waited for
_STOPPED = "Tt"  # by a signal, or by a debugger


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped: by SIGSTOP, from a terminal, or by a debugger."""
    return _stat(process)[0] in _STOPPED


def used_ticks(process: int) -> int:
    """Return the clock ticks for which a process has used the processor; 0 if it is gone."""
    fields = _stat(process)
    return int(fields[11]) + int(fields[12]) if fields[1:] else 0


def started_at(process: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if it has ended.

    Together with its id it tells a process from a later one that got the same id.
    """
    fields = _stat(process)
    return None if fields[0] in _GONE else int(fields[19])


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, proc(5)'s third; of a process that is gone only "X"."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ["X"]
    return text.rpartition(")")[2].split()
