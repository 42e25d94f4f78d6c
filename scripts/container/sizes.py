"""The size of each installed package, and the packages without which an artifact still replays (hidden one at a time).

    python scripts/container/sizes.py                       the sizes
    python scripts/container/sizes.py --artifact DIR --hide  and the output of `verify` without each

Hiding renames the package's files in this environment and back again, so use an environment that can be thrown away. A
package whose libraries were loaded from elsewhere, such as the system's own CUDA, counts as needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

HIDDEN = ".seko-hidden"
KEPT = ("seko-runtime", "numpy", "torch")  # without these nothing can run
TIMEOUT_S = 600
_VERIFY = """
import json, sys
from seko_runtime.cli.commands import main
code = main(["verify", sys.argv[1]])
with open("/proc/self/maps", encoding="utf-8") as maps:
    print(json.dumps(sorted({line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line})))
sys.exit(code)
"""


def main() -> None:
    """Print a row a package, largest first, and all rows as one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, help="what to verify without each package")
    parser.add_argument("--hide", action="store_true", help="really hide packages of this environment")
    parser.add_argument(
        "--at-least", type=int, default=100_000, metavar="BYTES", help="do not try smaller ones"
    )
    options = parser.parse_args()
    if options.hide != (options.artifact is not None):
        parser.error("--artifact and --hide belong together")
    packages = {name: files_of(distribution) for name, distribution in installed().items()}
    restore(packages.values())  # what a killed run left hidden
    sizes = {name: sum(file.stat().st_size for file in files) for name, files in packages.items()}
    rows = []
    if options.hide:
        whole = verify(options.artifact, [])
        if not whole["runs"]:
            raise SystemExit(f"the artifact does not verify with everything there: {whole['says']}")
    for name in sorted(sizes, key=lambda package: -sizes[package]):
        row: dict[str, object] = {"package": name, "bytes": sizes[name]}
        if options.hide and name not in KEPT and sizes[name] >= options.at_least:
            with hidden(packages[name]):
                row |= verify(options.artifact, packages[name])
        rows.append(row)
        print(f"{sizes[name]:14,}  {name:40} {_words(row)}", flush=True)
    without = sum(int(str(row["bytes"])) for row in rows if row.get("runs"))
    print(f"{sum(sizes.values()):14,}  all; each of those that it runs without, together {without:,}")
    print(json.dumps({"bytes": sum(sizes.values()), "bytes_it_runs_without": without, "packages": rows}))


def installed() -> dict[str, metadata.Distribution]:
    """Return the distributions of this environment by name."""
    return {
        str(distribution.metadata["Name"]).lower().replace("_", "-"): distribution
        for distribution in metadata.distributions()
    }


def files_of(distribution: metadata.Distribution) -> list[Path]:
    """Return a distribution's files that are there, or are there hidden, under their own names."""
    paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    return [path for path in paths if path.is_file() or _away(path).is_file()]


@contextmanager
def hidden(files: list[Path]) -> Iterator[None]:
    """Take files away for a while; they come back whatever happens."""
    try:
        for path in files:
            path.rename(_away(path))
        yield
    finally:
        restore([files])


def restore(packages: Iterable[list[Path]]) -> None:
    """Give every hidden file of these packages its name back."""
    for files in packages:
        for path in files:
            if _away(path).is_file():
                _away(path).rename(path)


def verify(artifact: Path, away: list[Path]) -> dict[str, object]:
    """Replay the goldens in a fresh process; say whether that works without the files `away` and, if not, why."""
    command = [sys.executable, "-c", _VERIFY, str(artifact)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"runs": False, "says": f"no end after {TIMEOUT_S} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"runs": False, "says": last[:160]}
    loaded = json.loads(done.stdout.strip().splitlines()[-1])
    names = {path.name for path in away}
    elsewhere = [path for path in loaded if Path(path).name in names]
    if elsewhere:
        return {"runs": False, "says": f"another copy was loaded: {elsewhere[0]}"}
    return {"runs": True}


def _away(path: Path) -> Path:
    return path.with_name(path.name + HIDDEN)


def _words(row: dict[str, object]) -> str:
    if "runs" not in row:
        return ""
    return "runs without it" if row["runs"] else f"needed: {row['says']}"


if __name__ == "__main__":
    main()
