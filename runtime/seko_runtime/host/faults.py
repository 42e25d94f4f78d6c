"""Conversion of exceptions of engines, libraries and the system into errors of the runtime."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from seko_runtime.errors import (
    DeviceFaultError,
    DeviceMemoryError,
    EngineRunError,
    EnvironmentLacksError,
    SekoRuntimeError,
)
from seko_runtime.host.part_times import part

TOLD_LETTERS = 200  # most letters that are quoted of a library's message
# Names of torch's exception classes, since this module imports no torch. Torch has no class for too little host
# memory.
_DEVICE_MEMORY, _DEVICE_FAULT, _HOST_ALLOCATOR = "OutOfMemoryError", "AcceleratorError", "DefaultCPUAllocator"
_NO_THREAD = "can't start new thread"  # Python's message in a RuntimeError
_LACKING = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN)
)

_DISK = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))


class Recorder(Protocol):
    """An object that can capture device work and launch it again: a `Memory` or a `Lane`."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture ``work`` as a graph and return a function that launches the graph."""


@contextmanager
def machine_faults() -> Iterator[None]:
    """Context manager or decorator that turns failures of the machine or the device into the runtime's errors.

    A BrokenPipeError is not changed: the command line then ends without a message.
    """
    try:
        yield
    except (SekoRuntimeError, BrokenPipeError):
        raise
    except Exception as fault:
        ours = of_machine(fault)
        if ours is None:
            raise
        raise ours from fault


def captured(recorder: Recorder, work: Callable[[], None], what: str) -> Callable[[], None]:
    """Capture the work of engines as a graph and return a function that launches the graph. Exceptions of capture and
    launch are converted as in `engine_fault`.
    """
    failed: list[SekoRuntimeError] = []

    def noted() -> None:
        try:
            work()
        except SekoRuntimeError as error:
            failed.append(error)
            raise

    try:
        with part("capture"):
            replay = recorder.capture(noted)
    except SekoRuntimeError:
        raise
    except (
        Exception
        # if an engine fails in a capture, leaving the capture raises a second error: the engine's is reported
    ) as fault:
        raise (failed[0] if failed else engine_fault(f"{what}, in its capture,", fault)) from fault

    def launch() -> None:
        try:
            replay()
        except SekoRuntimeError:
            raise
        except Exception as fault:
            raise engine_fault(what, fault) from fault

    return launch


def engine_fault(what: str, fault: Exception) -> SekoRuntimeError:
    """Return the runtime's error for an exception of an engine; ``what`` is the engine's name in the message."""
    return of_machine(fault) or EngineRunError(
        f"{what} failed while it ran: {fault_text(fault)}; verify the artifact, rebuild it if that fails too"
    )


def of_machine(fault: Exception) -> SekoRuntimeError | None:
    """Return the runtime's error for a failure of the machine or its device; None for any other exception."""
    no_memory = isinstance(fault, OSError) and fault.errno == errno.ENOMEM
    if no_memory or isinstance(fault, MemoryError) or _HOST_ALLOCATOR in str(fault):
        return EnvironmentLacksError(
            f"this machine gives no more memory: {fault_text(fault)}; close other programs, or raise the "
            "process's limit"
        )
    if isinstance(fault, OSError) or _NO_THREAD in str(fault):
        return EnvironmentLacksError(
            f"this machine refused a call: {fault_text(fault)}; see to what it lacks (open files, threads, space), "
            "then try again"
        )
    kinds = {kind.__name__ for kind in type(fault).__mro__}
    if _DEVICE_MEMORY in kinds:
        return DeviceMemoryError(
            f"the device has too little free memory: {fault_text(fault)}; close other sessions and programs on it"
        )
    if _DEVICE_FAULT in kinds:
        return DeviceFaultError(
            f"the device failed: {fault_text(fault)}; the process lost it, start it again"
        )
    return None


@contextmanager
def told_by_the_system() -> Iterator[None]:
    """Context manager for library calls that write files. If the disk is full, a library may raise an exception of its
    own after the system's OSError; the context manager raises the OSError instead.

    ``torch.save`` and ``torch.export.save`` close their archive after any error. On a full disk closing fails, too,
    with a message that does not mention the disk.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as fault:
        begun = _disk_fault_behind(fault)
        if begun is None:
            raise
        raise OSError(begun.errno, begun.strerror, begun.filename) from fault


def _disk_fault_behind(fault: BaseException | None) -> OSError | None:
    """Return the disk error during whose handling an exception was raised; None if there was no disk error."""
    while fault is not None:
        if isinstance(fault, OSError) and fault.errno in _DISK:
            return fault
        fault = fault.__cause__ or fault.__context__
    return None


def lacks(fault: OSError) -> bool:
    """Return whether an OSError means that the machine lacks something or a disk has failed, rather than that a file
    name is wrong.
    """
    return fault.errno in _LACKING


def fault_text(fault: Exception) -> str:
    """Return the class of an exception and the first line of its message, shortened."""
    line = next((line.strip() for line in str(fault).splitlines() if line.strip()), "")
    name = type(fault).__name__
    return f"{name}: {line[:TOLD_LETTERS]}" if line else name
