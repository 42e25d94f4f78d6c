"""Progress display of a build on stderr: bars on a terminal, lines in a log (at least one every eight seconds)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from seko_export.host import progress
from seko_runtime.cli.output import note
from seko_runtime.host.end_signals import ENDING

SILENCE_S = 8.0  # that a log is silent at most


@contextmanager
def shown_progress() -> Iterator[progress.Progress]:
    """Yield a function that shows the steps of a build on stderr."""
    console = Console(stderr=True)
    with _bars(console) if console.is_terminal else _lines() as tell:
        yield tell


@contextmanager
def _lines() -> Iterator[progress.Progress]:
    """Print a line for every step, and a line whenever nothing was printed for some seconds."""
    lock, ended = threading.Lock(), threading.Event()
    now = "starting"
    aside: Callable[[], str] | None = None
    begun = printed = time.monotonic()
    shown_steps: set[str] = set()

    def say(line: str) -> None:
        nonlocal printed
        note(line)
        printed = time.monotonic()

    def tell(step: str, done: int, total: int, in_background: Callable[[], str] | None = None) -> None:
        nonlocal now, aside
        with lock:
            now = f"{step} ({done} of {total})" if total > 1 else step
            aside = in_background or aside
            if step not in shown_steps:
                shown_steps.add(step)
                say(step)

    def watch() -> None:
        while not ended.wait(max(0.0, printed + SILENCE_S - time.monotonic())):
            with lock:
                if time.monotonic() - printed >= SILENCE_S:
                    also = aside() if aside is not None else ""
                    say(f"{now}, {time.monotonic() - begun:.0f} s{f'; {also}' if also else ''}")

    watcher = threading.Thread(target=watch, daemon=True)
    with _without_signals():
        watcher.start()
    try:
        yield tell
    finally:
        ended.set()
        watcher.join()


class _Background(ProgressColumn):
    """The work that runs beside a step, whose text is asked for anew whenever the bars are drawn."""

    def render(self, task: Task) -> Text:
        """Return the text at the end of one progress bar."""
        ask: Callable[[], str] | None = task.fields.get("in_background")
        return Text(ask() if ask is not None and not task.finished else "")


@contextmanager
def _bars(console: Console) -> Iterator[progress.Progress]:
    """Draw a bar for every step; bars of work beside the other steps stay until that work is done."""
    columns = (
        TextColumn("{task.description:34}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _Background(),
    )
    bars = Progress(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(step: str, done: int, total: int, in_background: Callable[[], str] | None = None) -> None:
        if step not in tasks:
            for task in bars.tasks:
                if task.fields.get("in_background") is None:
                    bars.update(task.id, completed=task.total)
            tasks[step] = bars.add_task(step, total=total, in_background=in_background)
        bars.update(tasks[step], completed=done)

    try:
        with _without_signals():
            bars.start()
        yield show
    finally:
        bars.stop()


@contextmanager
def _without_signals() -> Iterator[None]:
    """Keep the signals that end a command away from threads that are started in this block, for as long as they run.

    The main thread blocks one of these signals while it starts its workers; another thread would receive the signal
    instead, and Python would then raise in the main thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
