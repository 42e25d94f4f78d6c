"""Progress display of a run: a line that is overwritten on a terminal, otherwise a line every eight seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from seko_runtime.cli.output import note

EVERY_S = 8.0  # a process starts in up to two seconds, so whoever waits sees a line at least every ten


class Progress:
    """Shows the progress of a run on stderr, for the duration of its ``with`` block.

    Parameters
    ----------
    doing : str
        Text that is shown until `opened` is called.
    fps : int
        Video frames per second of playback.
    chunks : int
        Total number of chunks.
    every_s : float
        Seconds between lines if stderr is no terminal.
    """

    def __init__(self, doing: str, fps: int, chunks: int, every_s: float = EVERY_S) -> None:
        self._doing, self._fps, self._chunks, self._every_s = doing, fps, chunks, every_s
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._began = time.monotonic()
        self._first: float | None = None
        self._line = ""
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def opened(self) -> None:
        """Start the clock from which frames per second are computed; the first chunk is being made."""
        self._first = time.monotonic()
        self._doing = f"making chunk 1 of {self._chunks}"

    def show(self, frames: int, chunks: int) -> None:
        """Show the number of video frames and chunks so far."""
        passed = time.monotonic() - (self._began if self._first is None else self._first)
        fps = frames / max(passed, 1e-9)
        pace = f"{fps:.1f} fps  {fps / self._fps:.2f} x real time"
        self._line = f"{frames} frames  {pace}  chunk {chunks} of {self._chunks}"
        if self._terminal:
            note(f"\r{self._line} ", end="")

    def __enter__(self) -> Progress:
        if self._terminal:
            note(self._doing)
        else:
            self._ticker.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _fault: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._done.set()
        if not self._terminal:
            self._ticker.join()
        elif self._line:
            note("")

    def _tick(self) -> None:
        while not self._done.wait(self._every_s):
            note(self._line or f"{self._doing}: {time.monotonic() - self._began:.0f} s")
