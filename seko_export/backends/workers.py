"""The worker processes that compile engines. Worker processes run in parallel, and are ended when the build ends for
any reason."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TypeVar

from seko_export.backends.base import EngineMaker, ExportBackend
from seko_export.config.build import BuildConfig
from seko_export.engines.key import engine_file
from seko_export.errors import ExportError, MachineError
from seko_export.families.registry import graph_of
from seko_export.host.compiler_cache import CACHE_VARIABLE
from seko_export.host.gpu_memory import lacks_gpu_memory, release_gpu_memory
from seko_export.host.progress import Progress
from seko_export.host.workshop import workshop
from seko_runtime.format.manifest import ENGINES_FOLDER
from seko_runtime.host.end_signals import held_signals
from seko_runtime.host.faults import fault_text, told_by_the_system

T = TypeVar("T")

COMPILING = "compiling the engines"
# Beginnings of environment variables that modules, libraries or Python read once.
_READ_AT_IMPORT = (
    *("TORCH", "AOT", "INDUCTOR", "TRITON", "CUDA", "CUTLASS", "CUTEDSL", "ENABLE_"),
    *("CXX", "PYTHON", "OMP_", "KMP_", "MKL_", "LD_", "TMPDIR"),
)
# Most bytes of a Unix socket's path, and bytes that multiprocessing appends to the folder for temporary files.
_SOCKET_PATH, _SOCKET_NAME = 107, len("/pymp-12345678/listener-12345678")
_settings_of_server: dict[str, dict[str, str]] = {}
_SLOW_COST = (
    5.0  # compile time of a `Piece.large` engine relative to others; assumed, to estimate the time left
)


@contextmanager
def compiled_in_background(
    config: BuildConfig, backend: ExportBackend, artifact: Path, progress: Progress
) -> Iterator[Callable[[], dict[str, float]]]:
    """Context manager that compiles every engine in child processes while its block runs.

    Parameters
    ----------
    config : BuildConfig
        The configuration of the build.
    backend : ExportBackend
        The backend, whose `compile_piece` makes one engine file in a worker process.
    artifact : Path
        The artifact's folder, in which the folder of the engines (or of their forms) is made.
    progress : callable
        Function that is called with the number of finished engines while the caller waits. Before the caller waits,
        ``progress`` is called once with a function that returns a sentence on the engines that are being compiled
        beside the caller's own steps.

    Yields
    ------
    callable
        Function that waits for all engines. It returns the seconds that each engine took, or raises the error of the
        first engine that failed. Engines for which the GPU had too little free memory are compiled again, one at a
        time, when all others are compiled.

    Raises
    ------
    ExportError
        If an engine cannot be compiled. If the caller's block ends early, the worker processes and their compilers are
        ended, too.
    """
    folder, suffix = backend.form or (ENGINES_FOLDER, backend.suffix)
    (artifact / folder).mkdir()
    pieces = graph_of(config).pieces
    workers = min(len(pieces), len(os.sched_getaffinity(0)))
    costs = {name: _SLOW_COST if piece.large else 1.0 for name, piece in pieces.items()}
    by_cost = dict(sorted(costs.items(), key=lambda pair: -pair[1]))

    def submitted(pool: ProcessPoolExecutor, name: str, workplace: Path) -> Future[float]:
        output = artifact / engine_file(name, suffix, folder)
        make = backend.compile_piece
        return pool.submit(_in_worker, _engine(name), _make_and_move, make, config, name, workplace, output)

    with workshop("seko-") as workdir, _worker_pool(backend, workers) as pool, _starter() as starter:
        futures: dict[Future[float], str] = {}

        def start() -> None:  # waits for the server's imports
            with _workers_starting():
                for name in by_cost:
                    futures[submitted(pool, name, workdir / name)] = name

        started = starter(start)
        progress(COMPILING, 0, len(pieces), in_background=_Watch(futures, by_cost, workdir, workers))

        def wait_for_engines() -> dict[str, float]:
            started.result()
            seconds, lacking = _wait_for_all(futures, progress)
            pool.shutdown()  # idle workers hold GPU memory, too
            if lacking:
                with _worker_pool(backend, 1) as lone_pool:
                    for number, name in enumerate(lacking):
                        progress(f"compiling {name} again, alone: GPU memory was short", number, len(lacking))
                        with _workers_starting():
                            future = submitted(lone_pool, name, workdir / f"{name}-alone")
                        seconds[name] = _result_of(future, _engine(name))
            return seconds

        yield wait_for_engines


@contextmanager
def kernels_compiled_in_background(
    backend: ExportBackend, compile_kernels: Callable[[], None] | None
) -> Iterator[Callable[[], None]]:
    """Context manager that calls a function, which can be pickled, in a process of its own while its block runs. With
    None there is nothing to call.

    Yields
    ------
    callable
        Function that waits until the kernels are compiled. If the GPU had too little free memory, some are not.

    Raises
    ------
    ExportError
        If the kernels cannot be compiled.
    """
    if compile_kernels is None:
        yield lambda: None
        return
    what = "kernels of the recording"
    with _worker_pool(backend, 1) as pool, _starter() as starter:

        def start() -> Future[None]:
            with _workers_starting():
                return pool.submit(_in_worker, what, compile_kernels)

        started = starter(start)

        def wait_for_kernels() -> None:
            with suppress(_GpuMemoryError):
                _result_of(started.result(), what)
            pool.shutdown(wait=False)  # an idle worker holds GPU memory

        yield wait_for_kernels


@contextmanager
def _worker_pool(backend: ExportBackend, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of worker processes. If the block ends early, the workers and their compilers are ended, too."""
    pool = ProcessPoolExecutor(
        workers, _started_by(backend), initializer=_quiet_worker, initargs=(dict(os.environ),)
    )
    finished = False
    try:
        yield pool
        finished = True
    finally:
        if not finished:
            # no public way to end running workers before 3.14
            for process in list((pool._processes or {}).values()):
                _end_with_children(process.pid)
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _starter() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    """Yield a function that runs another one in a thread. The thread has ended when the block is left, also if signals
    come: a worker that it starts later would not be ended."""
    threads = ThreadPoolExecutor(1, "seko-workers")
    try:
        yield threads.submit
    finally:
        with held_signals():
            threads.shutdown()


def start_worker_server(backend: ExportBackend) -> None:
    """Start the server that the workers of a backend are forked from. It imports their modules while this process goes
    on. A server that runs is left as it is."""
    if backend.compile_piece is not None and _started_by(backend).get_start_method() == "forkserver":
        # to start it unblocks SIGINT; the server would start it first
        multiprocessing.resource_tracker.ensure_running()
        with _workers_starting():
            multiprocessing.forkserver.ensure_running()


def _started_by(backend: ExportBackend) -> BaseContext:
    """Return the multiprocessing context for worker processes. Workers are not forked from this process, because a
    forked child must not use the GPU, and could inherit locks that other threads hold.

    Workers are forked from a fork server, which this process starts once and which has imported torch, the backend
    and its compiler, which takes 4 to 12 s of processor time. Modules read their settings when they are imported. If
    a setting has changed since the server was started, or the path of the folder for temporary files is too long for
    the server's socket, each worker imports the modules itself.
    """
    if len(os.fsencode(tempfile.gettempdir())) + _SOCKET_NAME > _SOCKET_PATH:
        return multiprocessing.get_context("spawn")
    settings = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
    settings.pop(CACHE_VARIABLE, None)  # set by torch, too; read whenever an engine is compiled
    if _settings_of_server.setdefault("settings", settings) != settings:
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    preloaded = (
        type(backend).__module__,
        getattr(backend.compile_piece, "__module__", ""),
        backend.compiler,
    )
    server.set_forkserver_preload([module for module in preloaded if module])
    return server


def make_engine(make: EngineMaker, config: BuildConfig, name: str, path: Path) -> float:
    """Make the file of one engine of a build; return the seconds that this took, without the start of the process."""
    started = time.monotonic()
    make(config, graph_of(config).pieces[name], path)
    return time.monotonic() - started


def _make_and_move(
    make: EngineMaker | None, config: BuildConfig, name: str, workplace: Path, output_path: Path
) -> float:
    """Make the file of one engine in a worker process."""
    if make is None:
        raise ExportError("this backend runs pieces as they are and makes no engine files")
    workplace.mkdir()
    package = workplace / output_path.name
    with told_by_the_system():
        seconds = make_engine(make, config, name, package)
    shutil.move(package, output_path)
    return seconds


def _in_worker(what: str, call: Callable[..., T], *arguments: object) -> T:
    """Call a function in a worker process. A compiler's exception is returned as text, since it may not be
    picklable."""
    try:
        return call(*arguments)
    except (ExportError, OSError):  # exceptions of these classes can be pickled
        raise
    except Exception as fault:
        if lacks_gpu_memory(fault):
            error: ExportError = _GpuMemoryError(
                f"{what} did not compile, because GPU memory was short: {fault_text(fault)}; end other programs on "
                "the GPU, or build something smaller"
            )
        else:
            error = ExportError(f"{what} did not compile: {type(fault).__name__}: {fault}")
    # Behind the handler, because within it the error would hold the fault, whose traceback holds tensors.
    release_gpu_memory()
    raise error


def _engine(name: str) -> str:
    return f"engine {name!r}"


class _GpuMemoryError(MachineError):
    """The GPU had too little free memory to compile an engine."""


def _wait_for_all(
    futures: dict[Future[float], str], progress: Progress
) -> tuple[dict[str, float], list[str]]:
    """Wait for all engines; raise the error of the first that failed.

    Returns
    -------
    dict of str to float
        The seconds that each compiled engine took.
    list of str
        The engines that were not compiled because the GPU had too little free memory. Other engines, and the goldens
        that this process records, took memory at the same time, so another attempt can succeed.
    """
    pending, seconds, lacking = set(futures), dict[str, float](), list[str]()
    while pending:
        progress(COMPILING, len(futures) - len(pending), len(futures))
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            name = futures[future]
            try:
                seconds[name] = _result_of(future, _engine(name))
            except _GpuMemoryError:
                lacking.append(name)
    return seconds, lacking


def _result_of(future: Future[T], what: str) -> T:
    """Return the result of a worker's call; raise the error of a call that failed."""
    fault = future.exception()
    if isinstance(fault, ExportError | OSError):  # `whole_folder` understands a full disk's
        raise fault
    if fault is not None:  # a worker that was killed
        raise ExportError(f"{what} did not compile: {fault}") from fault
    return future.result()


@dataclass
class _Watch:
    """Reporter of a build's progress: which engines are being compiled, how many are left, and about how long they
    take.

    Parameters
    ----------
    futures : mapping of Future to str
        The pending results of the workers, each with the name of its engine.
    costs : mapping of str to float
        Relative compile time of each engine.
    workdir : Path
        Folder in which a worker makes a folder for an engine when the worker begins.
    workers : int
        Number of engines that are compiled at a time.
    """

    futures: Mapping[Future[float], str]
    costs: Mapping[str, float]
    workdir: Path
    workers: int
    begun: dict[str, float] = field(default_factory=dict)

    def __call__(self) -> str:
        """Return a sentence about the engines that are being compiled; empty once all are compiled, or one has failed
        for another reason than GPU memory."""
        futures = dict(self.futures)  # of which another thread starts some
        done = {name: future for future, name in futures.items() if future.done()}
        faults = {name: future.cancelled() or future.exception() for name, future in done.items()}
        compiled = {name: future.result() for name, future in done.items() if not faults[name]}
        if len(compiled) == len(self.costs) or any(
            fault and not isinstance(fault, _GpuMemoryError) for fault in faults.values()
        ):
            return ""
        now = time.monotonic()
        left = [name for name in self.costs if name not in compiled]
        for name in left:
            if name not in self.begun and (self.workdir / name).exists():
                self.begun[name] = now
        running = [name for name in left if name in self.begun and name not in done]
        status = f"engines: {len(left)} of {len(self.costs)} left"
        if running:
            status += f", compiling {', '.join(running)}"
        if compiled:
            unit = sum(compiled.values()) / sum(self.costs[name] for name in compiled)
            status += f", about {self._remaining(left, unit, now):.0f} s"
        return status

    def _remaining(self, left: Sequence[str], unit: float, now: float) -> float:
        """Return the seconds that the remaining engines need, if a unit of cost takes ``unit`` seconds."""
        each = [max(1.0, self.costs[name] * unit - (now - self.begun.get(name, now))) for name in left]
        return max(max(each), sum(each) / self.workers)


@contextmanager
def _workers_starting() -> Iterator[None]:
    """Context manager in which workers are started: signals are delayed until its end, and SIGINT is blocked in the
    workers.

    A worker can be ended only when the call that starts its process has returned, which for the first worker takes as
    long as the server needs to import torch. If a signal ended the build before, the worker would go on running, nobody
    would end it, and the semaphores of its pool would be gone. In another thread than the main one nothing is delayed:
    a build that ends waits for the thread that starts its workers.

    SIGINT is blocked in this thread, because processes that it starts inherit the block: a terminal sends Ctrl-C to
    the whole process group, and only this process should react.

    Raises
    ------
    MachineError
        If the processes cannot be started, or are killed meanwhile.
    """
    with held_signals():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        except (EOFError, OSError, BrokenExecutor) as fault:
            raise MachineError(
                f"the processes that compile engines did not start: {fault_text(fault)}; end other programs if memory "
                "is short"
            ) from fault
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_children(worker: int | None) -> None:
    """End a worker and the compilers that it started."""
    with suppress(ProcessLookupError):
        if worker is not None:
            # the worker has its own process group once `_quiet_worker` has run, and no children before that
            (os.killpg if os.getpgid(worker) == worker else os.kill)(worker, signal.SIGTERM)


def _quiet_worker(environ: Mapping[str, str]) -> None:
    """Make this worker the leader of a process group that ends with its parent; hide torch's warnings about itself.

    ``environ`` is the environment of the parent process; a worker has the environment of the fork server.
    """
    os.environ.clear()
    os.environ.update(environ)
    os.setpgid(0, 0)
    threading.Thread(target=_follow_parent, daemon=True).start()
    with suppress(ImportError):  # torch draws progress bars if this package is installed
        from tqdm import tqdm  # type: ignore[import-untyped]

        # tqdm's default lock is a named semaphore, which a killed worker would leave behind
        tqdm.set_lock(threading.RLock())
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
    warnings.filterwarnings(
        "ignore", message="TensorFloat32 tensor cores", category=UserWarning
    )  # matmuls in float32 are intended


def _follow_parent() -> None:
    """End this process group when the parent process was killed; otherwise the worker would wait for the pool's queue
    for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGTERM)
