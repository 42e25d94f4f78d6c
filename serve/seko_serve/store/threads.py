"""Threads that read and write a store. The end of a process never waits for a store that does not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

ResultT = TypeVar("ResultT")


class StoreThreads:
    """Daemon threads that run functions, first come, first served.

    A ``ThreadPoolExecutor`` would not do: Python joins the threads of executors when the process ends, and a read or
    write that waits for the network cannot be interrupted.

    Parameters
    ----------
    count : int
        Number of threads.
    """

    def __init__(self, count: int) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"seko-store-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run a function in one of the threads, and return the function's result. An exception of the function is
        raised by `run`."""
        done: Future[ResultT] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._work.put(run)
        return await asyncio.wrap_future(done)

    async def stop(self, within_s: float) -> bool:
        """Run the functions that already wait, then end the threads. Return whether all threads ended within some
        seconds."""
        for _ in self._threads:
            self._work.put(None)
        until = time.monotonic() + within_s
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it may hold a whole snapshot, which an idle thread must not keep
