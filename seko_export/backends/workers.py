"""The processes that compile engines. They run at the same time, and end when the build ends for any reason."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from seko_export.backends.base import EngineMaker, ExportBackend
from seko_export.config.build import BuildConfig
from seko_export.engines.key import ENGINES_FOLDER, engine_file
from seko_export.errors import ExportError
from seko_export.families.registry import graph_of
from seko_export.host.progress import Progress
from seko_export.host.workshop import workshop

# Roles of the engines with kernels enough to compile for long: these begin first.
SLOW_ROLES = ("block", "vae_encode", "vae_decode_first", "vae_decode")


@contextmanager
def compiled_beside(
    config: BuildConfig, backend: ExportBackend, artifact: Path, progress: Progress
) -> Iterator[Callable[[], dict[str, float]]]:
    """Compile every engine in child processes while the caller's block runs.

    Parameters
    ----------
    config : BuildConfig
        The build.
    backend : ExportBackend
        Its `compile_piece` makes one engine file in a worker.
    artifact : Path
        The artifact's folder, in which the folder of the engines (or of their forms) is made.
    progress : callable
        Called with the number of finished engines while the caller waits.

    Yields
    ------
    callable
        Waits for all engines; returns the seconds of each, or raises the first failure.

    Raises
    ------
    ExportError
        If an engine cannot be compiled. If the caller's block ends early, the workers and their compilers are ended
        too.
    """
    folder, suffix = backend.form or (ENGINES_FOLDER, backend.suffix)
    (artifact / folder).mkdir()
    keys = [piece.key for piece in graph_of(config).pieces.values()]
    workers = min(len(keys), len(os.sched_getaffinity(0)))
    # spawn: a forked child must not use the GPU, and must not hold the parent's threads' locks
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_quiet_worker)
    by_cost = [key.name for key in sorted(keys, key=lambda key: key.role not in SLOW_ROLES)]
    finished = False
    with workshop("seko-") as bench:
        try:
            with _masked(signal.SIGINT):  # workers inherit that: the parent alone answers Ctrl-C, afterwards
                futures: dict[Future[float], str] = {
                    pool.submit(
                        _told,
                        backend.compile_piece,
                        config,
                        name,
                        bench / name,
                        artifact / engine_file(name, suffix, folder),
                    ): name
                    for name in by_cost
                }
            yield lambda: _wait_for_all(futures, progress)
            finished = True
        finally:
            if not finished:
                # no public way to end running workers before 3.14
                for process in list((pool._processes or {}).values()):
                    _end_with_children(process.pid)
            pool.shutdown(wait=True, cancel_futures=True)


def _told(make: EngineMaker | None, config: BuildConfig, name: str, workplace: Path, goal: Path) -> float:
    """Make one engine in a worker. A compiler's exception is returned as text, since it may not be picklable."""
    try:
        if make is None:
            raise ExportError("this backend runs pieces as they are and makes no engine files")
        workplace.mkdir()
        made = workplace / goal.name
        seconds = make(config, name, str(made))
        shutil.move(made, goal)
        return seconds
    except (ExportError, OSError):  # these travel
        raise
    except Exception as fault:
        raise ExportError(f"engine {name!r} did not compile: {type(fault).__name__}: {fault}") from None


def _wait_for_all(futures: dict[Future[float], str], progress: Progress) -> dict[str, float]:
    """Return the seconds of each engine when all are compiled; raise the first failure."""
    pending = set(futures)
    while pending:
        progress("compiling the engines", len(futures) - len(pending), len(futures))
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            fault = future.exception()
            if isinstance(fault, ExportError | OSError):  # `whole_folder` understands a full disk's
                raise fault
            if fault is not None:  # a worker that was killed
                raise ExportError(f"engine {futures[future]!r} did not compile: {fault}") from fault
    return {name: future.result() for future, name in futures.items()}


@contextmanager
def _masked(number: signal.Signals) -> Iterator[None]:
    """Block a signal in this thread, and in processes started from it, for the duration of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_children(worker: int | None) -> None:
    """End a worker and the compilers that it started."""
    with suppress(ProcessLookupError):
        if worker is not None:
            # its own group once `_quiet_worker` ran; before that it has no children
            (os.killpg if os.getpgid(worker) == worker else os.kill)(worker, signal.SIGTERM)


def _quiet_worker() -> None:
    """Make this worker the leader of a process group that ends with its parent; hide torch's warnings about itself."""
    os.setpgid(0, 0)
    threading.Thread(target=_follow_parent, daemon=True).start()
    with suppress(ImportError):  # torch draws bars where it is installed
        from tqdm import tqdm  # type: ignore[import-untyped]

        # its own is a named semaphore, which a worker that is ended would leave behind
        tqdm.set_lock(threading.RLock())
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
    warnings.filterwarnings(
        "ignore", message="TensorFloat32 tensor cores", category=UserWarning
    )  # float32 is meant


def _follow_parent() -> None:
    """End this process group when the parent was killed; the pool's queue would otherwise wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGTERM)
