"""The cost and the savings of NVIDIA's `cuda-bindings` in place of the runtime's own driver calls, without a GPU.

    python scripts/bench/driver_calls.py --bindings FOLDER     # what `pip install --target FOLDER cuda-bindings` made

Prints one JSON object: bytes on disk, processor time of the import, processor time of a call over a driver that does
nothing (compiled here, in the place of libcuda.so.1), and lines of `cuda_driver.py` that describe the library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ROOT / "runtime/seko_runtime/backends/cuda_driver.py"
LIBRARY_ONLY = ("_ENTRIES", "class _Copy2D", "def load_driver")  # what a binding has of its own
RUNS = 9
# Every entry succeeds and does nothing; a binding asks for entries by cuGetProcAddress, ours by name.
STUB = """
#include <stddef.h>
int nothing(void) {{ return 0; }}
int cuGetProcAddress_v2(const char *n, void **f, int v, unsigned long long g, int *s)
{{ *f = (void *)nothing; if (s) *s = 0; return 0; }}
int cuGetProcAddress(const char *n, void **f, int v, unsigned long long g)
{{ *f = (void *)nothing; return 0; }}
int cuDriverGetVersion(int *v) {{ *v = 13000; return 0; }}
{entries}
"""
IMPORT = "import time, numpy, ctypes; t = time.process_time(); {}; print(time.process_time() - t)"
CALLS = """
import time
{setup}
def timed(count=20000):
    t = time.process_time()
    for _ in range(count): {call}
    return (time.process_time() - t) / count
timed(); print(min(timed() for _ in range(5)))
"""
OUR_SETUP = "from seko_runtime.backends.cuda_driver import load_driver, _check\nlibrary = load_driver()"
THEIR_SETUP = (
    "from cuda.bindings import driver\ndriver.cuInit(0)\n"
    "def check(name, *arguments):\n"
    "    result, *values = getattr(driver, name)(*arguments)\n"
    "    if result != 0: raise RuntimeError(name)\n"
    "    return values"
)

OUR_CALL = "_check(library, 'cuStreamWaitEvent', 1, 2, 0)"
THEIR_CALL = "check('cuStreamWaitEvent', 1, 2, 0)"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--bindings", type=Path, required=True, help="folder that holds the package cuda")
    folder = options.parse_args().bindings.resolve()
    text = OURS.read_text(encoding="utf-8")
    names = re.findall(r'"(cu\w+)":', text)
    with tempfile.TemporaryDirectory() as place:
        stub = Path(place) / "stub.c"
        own = [name for name in names if name != "cuDriverGetVersion"]
        stub.write_text(STUB.format(entries="\n".join(f"int {name}(void) {{ return 0; }}" for name in own)))
        library = Path(place) / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, stub], check=True)
        environ = os.environ | {"LD_LIBRARY_PATH": place}
        environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "runtime"), str(folder)))

        def seconds(script: str) -> float:
            command = [sys.executable, "-c", script]
            done = [
                subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
                for _ in range(RUNS)
            ]
            return statistics.median(float(run.stdout) for run in done)

        report = {
            "python": sys.version.split()[0],
            "bindings_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            "bindings_files": sum(path.is_file() for path in folder.rglob("*")),
            "own_bytes": OURS.stat().st_size,
            "own_lines": len(text.splitlines()),
            "own_lines_of_the_library": lines_of_the_library(text),
            "own_entries": len(names),
            "import_ms": {
                "own": 1e3 * seconds(IMPORT.format("import seko_runtime.backends.cuda_driver")),
                "bindings": 1e3 * seconds(IMPORT.format("from cuda.bindings import driver")),
            },
            "call_us": {
                "own": 1e6 * seconds(CALLS.format(setup=OUR_SETUP, call=OUR_CALL)),
                "bindings": 1e6 * seconds(CALLS.format(setup=THEIR_SETUP, call=THEIR_CALL)),
            },
        }
    print(json.dumps(report))


def lines_of_the_library(text: str) -> int:
    """Count the lines of the statements that say what the library's entries and structures are, and load it."""
    count, inside = 0, False
    for line in text.splitlines():
        if line[:1] not in ("", " ", "}", ")", "]"):
            inside = line.startswith(LIBRARY_ONLY)
        count += inside and bool(line.strip())
    return count


if __name__ == "__main__":
    main()
