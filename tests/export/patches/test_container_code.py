"""The container of an engine is compiled once: what the sources are split into, and that torch's own text is found."""

from __future__ import annotations

import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch._inductor import codegen, cpp_builder

from seko_export.lowering.patches.container_code import PATCH, split_source
from seko_export.lowering.patches.patch import replaced

INTERFACE = '#include <a.h>\n#include <vector>\nextern "C" int made();\n'


class Sine(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_the_container_is_equal_for_engines_that_differ():
    first = split_source(f"#include <cpu.h>\n{INTERFACE}\nint run() {{ return 1; }}\n", INTERFACE)
    second = split_source(f"#include <cpu.h>\n{INTERFACE}\nint run() {{ return 2; }}\n", INTERFACE)
    assert first is not None
    assert second is not None
    assert first[0] == second[0]
    assert "run()" not in first[0]
    assert "made()" in first[0]
    assert first[1].startswith("#include <cpu.h>\n#include <a.h>\n#include <vector>\n")
    assert "made()" not in first[1]
    assert "return 1" in first[1]
    assert "return 2" in second[1]


def test_another_device_has_another_container():
    sources = [f"#include <{device}.h>\n{INTERFACE}" for device in ("cpu", "cuda")]
    cpu, cuda = (split_source(source, INTERFACE) for source in sources)
    assert cpu is not None
    assert cuda is not None
    assert cpu[0] != cuda[0]


def test_a_source_without_the_interface_stays_whole():
    assert split_source("int run();", INTERFACE) is None


def test_of_engines_that_are_compiled_at_the_same_time_one_compiles_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    interface = Path(codegen.__path__[0], "aoti_runtime", "interface.cpp").read_text()
    both_begun = threading.Barrier(2, timeout=60)
    ran: list[str] = []

    def compiled(command: str, _: str) -> None:
        target = Path(command.partition(" -o ")[2].split()[0])
        if target.name == "own.o":
            both_begun.wait()
        ran.append(target.name)
        target.touch()

    def compile_engine(name: str) -> None:
        source = tmp_path / f"{name}.wrapper.cpp"
        source.write_text(f"#include <cpu.h>\n{interface}\nint run();\n")
        cpp_builder.run_compile_cmd(f"g++ {source} -c -o {tmp_path / name}.o", str(tmp_path))

    with replaced(cpp_builder, run_compile_cmd=compiled), PATCH.apply(), ThreadPoolExecutor(2) as engines:
        compile_both = [engines.submit(compile_engine, name) for name in ("block", "head")]
        for engine in compile_both:
            engine.result()
    assert sorted(ran) == ["block.o", "container.o", "head.o", "own.o", "own.o"]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # torch's own, in its packaging
def test_this_torch_writes_the_container_into_each_source(tmp_path):
    """A later torch may write another text, or none: engines then compile as torch compiles them."""
    program = torch.export.export(Sine(), (torch.zeros(4),))
    package = str(tmp_path / "engine.pt2")
    with torch._inductor.config.patch({"aot_inductor.package_cpp_only": True}):
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    with zipfile.ZipFile(package) as files:
        (name,) = [name for name in files.namelist() if name.endswith("wrapper.cpp")]
        source = files.read(name).decode()
    assert PATCH.is_needed()
    parts = split_source(source, Path(codegen.__path__[0], "aoti_runtime", "interface.cpp").read_text())
    assert parts is not None
    container, own = parts
    assert "AOTInductorModelContainerCreate" in container
    assert "AOTInductorModel::run_impl" not in container
    assert "AOTInductorModelContainerCreate" not in own
    assert "AOTInductorModel::run_impl" in own
