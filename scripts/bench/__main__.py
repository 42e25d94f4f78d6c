"""The runner of the benchmarks: builds what a case of `cases.py` measures, measures it, and appends its rows.

    python -m scripts.bench CASE...                        rows go to docs/benchmarks/, by the name of the GPU
    python -m scripts.bench CASE... --prepare              only builds; a later run of the same commit uses it
    python -m scripts.bench CASE... --trial --rows FILE    tiny, on a CPU: tries a case, no figure
    python -m scripts.bench CASE --part NAME...            of a case made of parts, these alone

Several cases run one after another, each in a process of its own. The exit code is 0 if all ended well.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.cases import CASES, ROOT, Case


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that were asked for; return the exit code."""
    known = "\n".join(f"  {name:<16} {case.what}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=f"{__doc__}\ncases:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir(), "seko-bench"), help="folder of builds"
    )
    parser.add_argument(
        "--rows", type=Path, help="jsonl file to append to; default: this machine's of docs/benchmarks"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="of a case; what does not fit is named")
    parser.add_argument("--prepare", action="store_true", help="only build what is measured")
    parser.add_argument("--trial", action="store_true", help="tiny, on a CPU")
    parser.add_argument(
        "--part", action="append", metavar="NAME", help="of a case made of parts, this one alone"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)  # work that a case does in a process of its own
    options = parser.parse_args(arguments)
    if len(options.cases) > 1:
        given = sys.argv[1:] if arguments is None else arguments
        more = [argument for argument in given if argument not in options.cases]
        failed = [
            name
            for name in options.cases
            if subprocess.run(
                [sys.executable, "-m", "scripts.bench", name, *more], cwd=ROOT, check=False
            ).returncode
        ]
        print(f"failed: {', '.join(failed) or 'none'}")
        return len(failed)
    return run(options.cases[0], options)


def run(name: str, options: argparse.Namespace) -> int:
    """Run one case in this process; return its exit code.

    Raises
    ------
    SystemExit
        If the case needs a GPU, builds nothing that could be prepared, or lacks a part that was asked for.
    """
    case = CASES[name]
    if options.trial and case.trial is None:
        raise SystemExit(f"{name} needs a GPU: it has no trial")
    if options.prepare and not case.builds:
        raise SystemExit(f"{name} builds nothing ahead")
    given = {**case.options, **((case.trial or {}) if options.trial else {})}
    if options.part:
        parts = given.get("parts", ())
        if unknown := [part for part in options.part if part not in parts]:
            raise SystemExit(f"{name} has no part {', '.join(unknown)}: it has {', '.join(parts) or 'none'}")
        given["parts"] = tuple(options.part)
    own = argparse.Namespace(
        case=name,
        work=options.work / (case.folder or name),
        rows=options.rows or ROOT / "docs" / "benchmarks" / f"{case.rows or this_machine()}.jsonl",
        seconds=options.seconds - case.reserve_s,
        prepare=options.prepare,
        trial=options.trial,
        eager=options.trial,
        child=options.child,
        **given,
    )
    own.work.mkdir(parents=True, exist_ok=True)
    return module_of(case).run(own) or 0


def module_of(case: Case) -> Any:
    """Return a case's module, imported."""
    return importlib.import_module(case.module if "." in case.module else f"scripts.bench.{case.module}")


def this_machine() -> str:
    """Return the name of the file of docs/benchmarks that has the rows of this machine's GPU, or of a CPU."""
    import torch  # here: a case that runs in a process of its own, or cannot run, needs none

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    model = re.search(r"\b[A-Z]+\d+\w*", name)
    return model[0].lower() if model else "cpu"


if __name__ == "__main__":
    sys.exit(main())
