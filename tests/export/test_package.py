"""What stays of an AOTInductor package, on packages made by hand."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from seko_export.errors import MachineError
from seko_export.lowering.package import blank_paths, slim_package, strip_symbols

HOME = Path("/home/somebody")
FOLDER = "block/data/aotinductor/model"


@pytest.fixture(scope="module")
def shared_object(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared object with debug data and a path of the builder's in its strings."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("object")
    source = folder / "answer.cpp"
    source.write_text(f'extern "C" const char* place() {{ return "{HOME}/x.cpp"; }}')
    subprocess.run(["g++", "-g", "-shared", "-fPIC", source, "-o", folder / "answer.so"], check=True)
    return (folder / "answer.so").read_bytes()


def write_package(path: Path, shared_object: bytes, serial: str) -> Path:
    with zipfile.ZipFile(path, "w") as package:
        package.writestr(f"{FOLDER}/a.wrapper.cpp", f"// {HOME}")
        package.writestr(f"{FOLDER}/b.kernel.cpp", f"// in {HOME}/a.wrapper.cpp")
        package.writestr(f"{FOLDER}/a.wrapper_metadata.json", "{}")
        package.writestr(f"{FOLDER}/b.kernel_metadata.json", "{}")
        package.writestr("block/.data/serialization_id", serial)
        package.writestr(f"{FOLDER}/a.wrapper.so", shared_object)
    return path


def test_slimming_keeps_the_code_and_drops_the_rest(shared_object, tmp_path):
    """One source, empty, with its metadata; the object smaller, loadable, without the path of the machine."""
    package = write_package(tmp_path / "block.pt2", shared_object, "1" * 40)
    slim_package(package, [HOME])
    with zipfile.ZipFile(package) as slim:
        content = {entry.filename: slim.read(entry) for entry in slim.infolist()}
        assert {entry.compress_type for entry in slim.infolist()} == {zipfile.ZIP_STORED}
    assert not [name for name in content if "kernel" in name]
    assert content[f"{FOLDER}/a.wrapper.cpp"] == b""
    assert content[f"{FOLDER}/a.wrapper_metadata.json"] == b"{}"
    library_bytes = content[f"{FOLDER}/a.wrapper.so"]
    assert len(library_bytes) < len(shared_object)
    assert bytes(HOME) not in package.read_bytes()
    library = tmp_path / "kept.so"
    library.write_bytes(library_bytes)
    place = ctypes.CDLL(str(library)).place
    place.restype = ctypes.c_char_p
    assert len(place()) == len(f"{HOME}/x.cpp")
    assert place().endswith(b"/x.cpp")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".slim"] == []


def test_equal_code_gives_equal_bytes(shared_object, tmp_path):
    """Torch's serial sums what was dropped too, so it differs from build to build; ours sums what is kept."""
    for folder, serial in (("one", "1" * 40), ("two", "2" * 40), ("three", "3" * 40)):
        (tmp_path / folder).mkdir()
        code = shared_object if folder != "three" else shared_object.replace(b"x.cpp", b"y.cpp")
        slim_package(write_package(tmp_path / folder / "block.pt2", code, serial), [HOME])
    first, second, third = ((tmp_path / f / "block.pt2").read_bytes() for f in ("one", "two", "three"))
    assert first == second
    serials = []
    for folder in ("one", "three"):
        with zipfile.ZipFile(tmp_path / folder / "block.pt2") as package:
            serials.append(package.read("block/.data/serialization_id"))
    assert all(len(serial) == 40 and serial.isdigit() for serial in serials)
    assert serials[0] != serials[1]
    assert first != third


def test_no_offset_moves_when_paths_are_blanked():
    content = b"a\0/home/somebody/venv/x\0/home/somebody/y\0tail"
    blanked = blank_paths(content, [b"/home/somebody/venv", b"/home/somebody"])
    assert len(blanked) == len(content)
    assert b"somebody" not in blanked
    assert blanked.endswith(b"\0tail")
    assert blanked.index(b"/x\0") == content.index(b"/x\0")


def test_without_binutils_the_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="install binutils"):
        strip_symbols(b"")


def test_what_is_no_shared_object_is_refused():
    with pytest.raises(MachineError, match="strip failed with exit code 1"):
        strip_symbols(b"no object")
