#!/usr/bin/env python3
"""Write stubs/tensorrt and stubs/tensorrt_lean from the real bindings, as far as we use them.

    pip install --no-deps tensorrt-cu13-bindings==11.4.0.106 tensorrt-lean-cu13-bindings==11.4.0.106
    python scripts/tensorrt_stubs.py [--check]

The bindings' wheels bring no stubs. Their compiled modules say the signature of every method, once they are loaded;
for that they need TensorRT's libraries, in whose place empty ones are put that define the symbols and do nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STUBS = Path(__file__).parents[1] / "stubs"
BUILDER = """ILogger IHostMemory IProgressMonitor ITimingCache ITensor Dims IBuilderConfig INetworkDefinition Builder
OnnxParser ParserError IPluginRegistry BuilderFlag DataType MemoryPoolType NetworkDefinitionCreationFlag
PreviewFeature"""
LEAN = """ILogger IHostMemory Runtime ICudaEngine IExecutionContext DataType TensorIOMode Dims
ExecutionContextAllocationStrategy IStreamReaderV2"""
# What the compiled modules need of TensorRT's libraries, by the name under which they ask for each.
SYMBOLS = {
    "libnvinfer.so.11": "createInferBuilder_INTERNAL createInferRefitter_INTERNAL createInferRuntime_INTERNAL "
    "getBuilderPluginRegistry getPluginRegistry",
    "libnvinfer_lean.so.11": "createInferRefitter_INTERNAL createInferRuntime_INTERNAL getPluginRegistry",
    "libnvinfer_plugin.so.11": "initLibNvInferPlugins",
    "libnvonnxparser.so.11": "createNvOnnxParser_INTERNAL createNvOnnxParserRefitter_INTERNAL getNvOnnxParserVersion",
}
HEAD = '''"""Part of {package} {version}, as its bindings say themselves; written by scripts/tensorrt_stubs.py."""

# fmt: off
# ruff: noqa
'''
_TYPES = (
    (r"tensorrt_(lean_)?bindings\.tensorrt(_lean)?\.", ""),
    (r"nvonnxparser::I(\w+)", r"\1"),
    (r"nvinfer1::", ""),
    (r"typing_extensions\.Buffer", "Buffer"),
    (r"typing\.SupportsInt", "int"),
    (r"typing\.SupportsFloat", "float"),
    (r"collections\.abc\.", ""),
    (r"<[^>]*>", "..."),
    (r"typing_extensions\.\w+|[\w]+::\w+", "Any"),
)


def load_bindings(package: str) -> Any:
    """Import bindings beside empty libraries."""
    with tempfile.TemporaryDirectory() as folder:
        for library, symbols in SYMBOLS.items():
            source = Path(folder) / "empty.c"
            source.write_text(
                "".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols.split())
            )
            target = Path(folder) / library
            command = [
                os.environ.get("CC", "cc"),
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{library}",
                str(source),
                "-o",
                str(target),
            ]
            subprocess.run(command, check=True)
            ctypes.CDLL(str(target), ctypes.RTLD_GLOBAL)
        return importlib.import_module(package)


def module_stub(package: str, names: list[str]) -> str:
    bindings = load_bindings(package)
    parts = [HEAD.format(package=package, version=bindings.__version__)]
    parts.append(
        "from collections.abc import Callable, Iterable, Sequence\nfrom typing import Any, overload\n"
    )
    parts.append("Buffer = bytes | memoryview\n__version__: str\n")
    known = {*names}
    parts += [class_stub(getattr(bindings, name), known) for name in names]
    return "\n".join(parts)


def class_stub(cls: type, known: set[str], name: str = "", indent: str = "") -> str:
    members = getattr(cls, "__members__", None)
    lines = [f"{indent}class {name or cls.__name__}:"]
    inner = indent + "    "
    if members is not None:
        lines += [f"{inner}{member}: {cls.__name__}" for member in sorted(members)]
        lines += [f"{inner}name: str", f"{inner}value: int", f"{inner}def __int__(self) -> int: ..."]
        return "\n".join(lines) + "\n"
    for key, value in sorted(vars(cls).items()):
        if isinstance(value, type) and hasattr(value, "__members__"):
            lines.append(class_stub(value, known, key, inner))
        elif isinstance(value, property):
            doc = getattr(value.fget, "__doc__", None) or ""
            kind = clean(doc.partition("->")[2].strip() or "object", known)
            lines.append(f"{inner}{key}: {kind}")
        elif callable(value) and (key in ("__init__", "__len__", "__getitem__") or not key.startswith("_")):
            lines += [f"{inner}{line}" for line in method_stub(key, inspect.getdoc(value) or "", known)]
    if "buffer protocol" in (inspect.getdoc(cls) or ""):
        lines.append(f"{inner}def __buffer__(self, flags: int, /) -> memoryview: ...")
    if len(lines) == 1:
        lines[0] += " ..."
    return "\n".join(lines) + "\n"


def method_stub(name: str, doc: str, known: set[str]) -> Iterator[str]:
    """Signatures of a compiled method: the first line of its text, or a numbered line an overload."""
    signatures = re.findall(rf"^(?:\d+\. )?{re.escape(name)}\((self: .*)\) -> (.*)$", doc, re.MULTILINE)
    if name == "__init__" and "accurate signature" in doc:
        return  # made by the library alone
    if not signatures:
        raise SystemExit(f"{name} does not say its signature: {doc[:80]!r}")
    if len(signatures) > 1:
        signatures = [*dict.fromkeys(signatures)]
    for arguments, result in signatures:
        if len(signatures) > 1:
            yield "@overload"
        yield f"def {name}({in_order(clean(drop_self(arguments), known))}) -> {clean(result, known)}: ..."


def drop_self(arguments: str) -> str:
    return re.sub(r"^self: [\w.:]+", "self", arguments)


def in_order(arguments: str) -> str:
    """Give every argument behind one with a default a default too: C++ has some, of which Python knows nothing."""
    parts = re.split(r", (?=\w+: )", arguments)
    first = next((place for place, part in enumerate(parts) if " = " in part), len(parts))
    return ", ".join(
        part if place < first or " = " in part else f"{part} = ..." for place, part in enumerate(parts)
    )


def clean(text: str, known: set[str]) -> str:
    """Python's spelling of a type; a class that is not among ours becomes Any."""
    for pattern, replacement in _TYPES:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r": (\w+) = None", r": \1 | None = None", text)
    plain = {
        *known,
        "Severity",
        "Buffer",
        "Sequence",
        "Callable",
        "Iterable",
        "int",
        "str",
        "bool",
        "float",
        "bytes",
    }
    plain |= {"None", "object", "list", "dict", "tuple", "self", "True", "False", "Any"}

    def plain_or_any(match: re.Match[str]) -> str:
        return match[0] if match[0].partition(".")[0] in plain else "Any"

    return re.sub(
        r"(?<=[:>\[,|] )[A-Z][\w.]*|^[A-Z][\w.]*|(?<=\[)[A-Z][\w.]*", plain_or_any, text.replace("->", "-> ")
    )


def main() -> int:
    options = argparse.ArgumentParser(description="Stubs of TensorRT's bindings, as far as we use them.")
    options.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    options.add_argument("--part", choices=("tensorrt", "tensorrt_lean"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.part:
        names = (BUILDER if chosen.part == "tensorrt" else LEAN).split()
        print(module_stub(f"{chosen.part}_bindings", names), end="")
        return 0
    stubs: dict[str, str] = {}
    for part in ("tensorrt", "tensorrt_lean"):  # a process each: both bindings define the same types
        command = [sys.executable, __file__, "--part", part]
        stubs[f"{part}/__init__.pyi"] = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout
    stale = [
        name
        for name, text in stubs.items()
        if not (STUBS / name).is_file() or (STUBS / name).read_text() != text
    ]
    for name in () if chosen.check else stale:
        (STUBS / name).parent.mkdir(parents=True, exist_ok=True)
        (STUBS / name).write_text(stubs[name])
    print(f"stale: {', '.join(stale) or 'none'}")
    return int(chosen.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
