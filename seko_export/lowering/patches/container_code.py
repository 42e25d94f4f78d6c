"""A patch that compiles the container of AOTInductor engines once, instead of once for each engine.

The compiler puts torch's container (the C functions that a loader calls, and the class behind them) into the source of
each engine. The container is the same text in each engine, and takes the C++ compiler 5 of the 9 s of an engine's host
code. The patch compiles the container's text to a separate object file in the compiler's private cache. The source of
an engine then only declares the container, and is compiled at the same time. The object files of the engine and of the
container are linked into the object file that torch asked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from seko_export.lowering.patches.patch import Patch, replaced

_WRAPPER_ENDING = ".wrapper.cpp"
_TEMPLATE = "namespace torch::aot_inductor {{ {} template class AOTInductorModelBase<AOTInductorModel>; }}\n"
_DECLARED, _INSTANTIATED = _TEMPLATE.format("extern"), _TEMPLATE.format("")


@contextmanager
def container_compiled_once() -> Iterator[None]:
    """Context manager in which AOTInductor links the container's object file from its private cache."""
    from torch._inductor import cpp_builder

    known = cpp_builder.run_compile_cmd

    def run_compile_cmd(cmd_line: str, cwd: str) -> None:
        if not _compiled_in_two(cmd_line, cwd, known):
            known(cmd_line, cwd)

    with replaced(cpp_builder, run_compile_cmd=run_compile_cmd):
        yield


def split_source(source: str, interface: str) -> tuple[str, str] | None:
    """Split an engine's host code.

    Parameters
    ----------
    source : str
        The C++ source that the compiler generated.
    interface : str
        Torch's ``interface.cpp``, which the compiler copies into each source.

    Returns
    -------
    tuple of (str, str) or None
        The container's source, which is equal for all engines of a device, and the engine's own source. None if the
        source does not contain the interface; the whole source is then compiled as torch does.
    """
    before, marker, after = source.partition(interface.strip())
    if not marker:
        return None
    includes = "".join(f"{line}\n" for line in interface.splitlines() if line.startswith("#include"))
    return before + interface + _INSTANTIATED, before + includes + _DECLARED + after


def _compiled_in_two(cmd_line: str, cwd: str, run: Callable[[str, str], None]) -> bool:
    """Replace a command that compiles an engine's host code by several commands; return False for any other
    command."""
    from torch._inductor import codegen
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    command = shlex.split(cmd_line)
    sources = [index for index, word in enumerate(command) if word.endswith(_WRAPPER_ENDING)]
    if len(sources) != 1 or "-c" not in command or "-o" not in command:
        return False
    source_at, target_at = sources[0], command.index("-o") + 1
    interface = Path(codegen.__path__[0], "aoti_runtime", "interface.cpp")
    parts = interface.is_file() and split_source(Path(command[source_at]).read_text(), interface.read_text())
    if not parts:
        return False
    container, own = parts
    flags = [word for index, word in enumerate(command) if index not in (source_at, target_at)]
    digest = hashlib.sha256("\0".join([container, *flags]).encode()).hexdigest()
    folder = Path(cache_dir(), "containers")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def compile_to(text: str, target: Path) -> None:
        source = target.with_suffix(".cpp")
        source.write_text(text)
        adapted = command.copy()
        adapted[source_at], adapted[target_at] = str(source), str(target)
        # Checks in the code contain the source file's name: without the folder, whose name is random, equal code
        # gives equal bytes.
        run(shlex.join([*adapted, f"-ffile-prefix-map={target.parent}=seko"]), cwd)

    cached_object = folder / f"{digest}.o"

    def compile_container(fresh: Path) -> None:
        with cached_object.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of a build's processes compiles it
            if not cached_object.exists():
                compile_to(container, fresh)
                os.replace(fresh, cached_object)

    with tempfile.TemporaryDirectory(dir=folder) as work, ThreadPoolExecutor(1) as beside:
        own_object = Path(work, "own.o")
        compiled = beside.submit(compile_container, Path(work, "container.o"))
        compile_to(own, own_object)
        compiled.result()
        link = [command[0], "-r", "-nostdlib", "-o", command[target_at], str(own_object), str(cached_object)]
        run(shlex.join(link), cwd)
    return True


PATCH = Patch(container_compiled_once)
