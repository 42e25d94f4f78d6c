"""The commands of `seko-run`: `run`, `verify`, `info` and `unpack`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from seko_runtime import open_artifact, read_manifest
from seko_runtime.cli.output import Report, note, show, show_failure
from seko_runtime.errors import NumericError, SekoRuntimeError, UsageError
from seko_runtime.format.outputs import STDOUT
from seko_runtime.format.whole_files import is_inside
from seko_runtime.host.end_signals import until_ended
from seko_runtime.host.faults import machine_faults

# What the commands need is imported in them: a signal that comes meanwhile ends them as any other does.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of `seko-run` and return its exit code.

    The exit code is 2 for wrong usage, 3 for a bad input file, 4 for a bad artifact, 5 for a missing part of the
    environment, and 6 for a numeric error. The exit code is 128 plus the number of a signal that ended the command, and
    1 if the reader of the command's output closed the pipe. With ``--json`` a failed command also prints a JSON object
    on stdout.
    """
    argv = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in argv
    ended: list[str] = []

    def interrupted(message: str) -> None:
        note(f"error: {message}")
        ended.append(message)

    code = until_ended(lambda: _run_command(argv, as_json=as_json), interrupted)
    if ended and as_json:
        show_failure({}, ended[0], code)
    return code


def _run_command(arguments: Sequence[str], *, as_json: bool) -> int:
    result: dict[str, object] = {}
    try:
        with machine_faults():
            from seko_runtime.cli.parser import parse  # with the options of the controls, which import numpy

            options = parse(arguments, {"run": run, "verify": verify, "info": info, "unpack": unpack})
            as_json = options.json
            report: Report = options.command(options)
            result = report.result
            if report.error is None or not as_json:
                show(report, as_json=as_json)
            if report.error is not None:
                raise report.error
    except SekoRuntimeError as error:
        note(f"error: {error}")
        if as_json:
            show_failure(result, str(error), error.exit_code)
        return error.exit_code
    except BrokenPipeError:
        note("error: whoever read the output stopped reading")
        return 1
    return 0


def run(options: argparse.Namespace) -> Report:
    """Make what an artifact's model makes, and write it to a file."""
    from seko_runtime.cli.runs import command_of

    if options.output != STDOUT and is_inside(options.output, options.artifact):
        raise UsageError(
            f"-o {options.output} lies inside the artifact, which it would spoil; choose another place"
        )
    _check_spares_inputs(options)
    manifest, _ = read_manifest(options.artifact, trust=options.trust)
    return command_of(manifest.workload.kind, options).run(options, manifest)


def _check_spares_inputs(options: argparse.Namespace) -> None:
    """Raise a UsageError if a run would write over a file that it reads."""
    goals = {"output": "-o", "save_voice": "--save-voice"}
    read = [
        (f"--{name.replace('_', '-')}", file)
        for name, value in vars(options).items()
        for given in (value if isinstance(value, list) else [value])
        if name not in goals and isinstance(given, str | Path)
        for file in (str(given), str(given).partition("=")[2])  # `--input` and `--control` have NAME=FILE
        if os.path.isfile(file)
    ]
    for name, goal in goals.items():
        written = getattr(options, name, None)
        if written is None or written == STDOUT or not os.path.isfile(written):
            continue
        for option, file in read:
            if os.path.samefile(file, written):
                raise UsageError(f"{goal} {written} is also read, by {option}; choose another place")


def verify(options: argparse.Namespace) -> Report:
    """Replay the recorded results of an artifact. The report has a NumericError if a replayed result differs by more
    than its tolerance."""
    from seko_runtime.sessions.verdict import verdict

    with open_artifact(
        options.artifact, device=options.device, trust=options.trust, copy_weights=options.copy_weights
    ) as artifact:
        errors = artifact.verify()
        result = {"artifact": str(options.artifact), "digest": artifact.digest} | verdict(errors)
    lines = [f"golden   {error}" for error in errors]
    missed = next((error for error in errors if not error.within), None)
    if missed is None:
        lines.append(f"verified {len(errors)} recorded results: all within their bounds")
        return Report(result, tuple(lines))
    message = f"a golden is missed: {missed}; rebuild the artifact on this kind of machine"
    return Report(result, tuple(lines), NumericError(message))


def info(options: argparse.Namespace) -> Report:
    """Print the content of an artifact's manifest; no other file is read."""
    from seko_runtime.opening.workloads import workload_of

    manifest, digest = read_manifest(options.artifact, trust=options.trust)
    target = manifest.target
    own_lines, own_facts = workload_of(manifest.workload.kind).described(manifest)
    cuda = f", CUDA {target.cuda}" if target.cuda else ""
    rows = f"batch {manifest.rows}"
    if manifest.pool is not None:
        rows = f"{manifest.rows} sessions in calls of {', '.join(map(str, manifest.pool.buckets))}"
    lines = [
        f"name     {manifest.name}, format {manifest.format_version}, digest {digest}",
        f"target   {manifest.backend} on {target.device} {target.arch}, torch {target.torch}{cuda}",
        f"rows     {rows}",
        *own_lines,
    ]
    if manifest.least_bytes is not None:
        holds = "its pool" if manifest.pool is not None else "a session"
        lines.append(f"memory   at least {manifest.least_bytes / 1e9:.1f} GB of a GPU, with {holds}")
    if manifest.ranks > 1:
        lines.append(f"ranks    {manifest.ranks} processes, one a GPU")
    lines += [
        f"input    {spec.name} ({spec.dtype} {list(spec.shape)}, per {spec.per}, {spec.default})"
        for spec in manifest.caller_inputs
    ]
    result: dict[str, object] = {
        "name": manifest.name,
        "digest": digest,
        "format_version": manifest.format_version,
        "workload": manifest.workload.kind,
        "backend": manifest.backend,
        "device": target.device,
        "arch": target.arch,
        "torch": target.torch,
        "ranks": manifest.ranks,
        "least_bytes": manifest.least_bytes,
        **own_facts,
        "inputs": [asdict(spec) for spec in manifest.caller_inputs],
        "files": {path: entry.size for path, entry in manifest.files.items()},
    }
    return Report(result, tuple(lines))


def unpack(options: argparse.Namespace) -> Report:
    """Unpack a tar that `seko-export pack` made."""
    from seko_runtime.format.unpacking import unpack_artifact

    unpacked = unpack_artifact(options.artifact, options.output, trust=options.trust, replace=options.force)
    line = f"artifact {unpacked.folder}, {unpacked.files} files, {unpacked.bytes} bytes, digest {unpacked.digest}"
    return Report(asdict(unpacked) | {"folder": str(unpacked.folder)}, (line,))
