"""The state of a process from /proc: whether it runs, its processor time, and its start time."""

from __future__ import annotations

from pathlib import Path

_GONE = "XxZ"  # state letters of dead processes, waited for or not
_STOPPED = "Tt"  # state letters of processes stopped by a signal or a debugger


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped: by SIGSTOP, from a terminal, or by a debugger."""
    return _stat(process)[0] in _STOPPED


def used_ticks(process: int) -> int:
    """Return the processor time of a process in clock ticks; 0 if the process is gone."""
    fields = _stat(process)
    return int(fields[11]) + int(fields[12]) if fields[1:] else 0


def started_at(process: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if the process has ended.

    The start time distinguishes a process from a later process with the same id.
    """
    fields = _stat(process)
    return None if fields[0] in _GONE else int(fields[19])


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat beginning with the state, the third field in proc(5); only "X" if the process
    has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ["X"]
    return text.rpartition(")")[2].split()
