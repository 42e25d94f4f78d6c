"""The commands of the inference box: `run`, `verify`, `info`, `unpack`. Needs nothing but the runtime."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from seko_runtime import __version__, open_artifact, read_manifest
from seko_runtime.end_signals import until_ended
from seko_runtime.errors import NumericError, SekoRuntimeError
from seko_runtime.faults import machine_faults

# What the commands need is imported in them: a signal that comes meanwhile ends them as any other does.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    2 usage, 4 artifact, 5 environment, 6 numeric; 128 plus the number of the signal that ended it.
    """
    return until_ended(
        lambda: _run_command(_parser().parse_args(arguments)),
        lambda said: print(f"error: {said}", file=sys.stderr),
    )


def _run_command(options: argparse.Namespace) -> int:
    try:
        with machine_faults():
            result = options.command(options)
    except SekoRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 1
    if options.json:
        print(json.dumps(result, sort_keys=True))
    return 0


def run(options: argparse.Namespace) -> dict[str, object]:
    """Replay chunks and write them to a file."""
    from seko_runtime.cli import run as run_command

    return run_command.run(options)


def verify(options: argparse.Namespace) -> dict[str, object]:
    """Replay the goldens; NumericError if one is missed."""
    from seko_runtime.opening.golden import verdict

    with open_artifact(
        options.artifact, device=options.device, trust=options.trust, copy_weights=options.copy_weights
    ) as artifact:
        errors = artifact.verify()
        for error in errors:
            print(f"error    {error}")
        result = {"artifact": str(options.artifact), "digest": artifact.digest} | verdict(errors)
    if not result["ok"]:
        if options.json:
            print(json.dumps(result, sort_keys=True))
        missed = next(error for error in errors if not error.within)
        raise NumericError(f"a golden is missed: {missed}; rebuild the artifact on this kind of machine")
    return result


def info(options: argparse.Namespace) -> dict[str, object]:
    """Print what the manifest says; opens no other file."""
    manifest, digest = read_manifest(options.artifact, trust=options.trust)
    stream, target = manifest.stream, manifest.target
    print(f"name     {manifest.name}, format {manifest.format_version}, digest {digest}")
    print(
        f"target   {manifest.backend} on {target.device} {target.arch}, torch {target.torch}, CUDA {target.cuda}"
    )
    print(
        f"stream   {stream.width}x{stream.height} at {stream.fps} fps, chunk {stream.chunk_frames} latent frames,"
    )
    rows = f"batch {stream.batch}"
    if manifest.pool is not None:
        rows = f"{manifest.rows} sessions in calls of {', '.join(map(str, manifest.pool.buckets))}"
    reference = f"reference {stream.reference_frames}, " if stream.reference_frames else ""
    print(f"         {reference}sink {stream.sink_frames}, ring {stream.ring_frames}, {rows}")
    print(
        f"KV pool  {manifest.kv.pool_bytes} bytes ({manifest.kv.scheme}), bf16 {manifest.kv.bf16_pool_bytes}"
    )
    if manifest.streams_cache:
        print(
            f"         on the host, streamed layer by layer; {manifest.device_pool_bytes} bytes on the device"
        )
    text, video = manifest.text, manifest.video
    if video is not None:
        print(
            f"video    {video.width}x{video.height}, {video.first_frames} frames, then {video.chunk_frames} a chunk"
        )
    if text is not None:
        print(f"text     sentences of up to {text.tokens} tokens")
    return {
        "name": manifest.name,
        "digest": digest,
        "format_version": manifest.format_version,
        "backend": manifest.backend,
        "device": target.device,
        "arch": target.arch,
        "torch": target.torch,
        "kv": {
            "scheme": manifest.kv.scheme,
            "pool_bytes": manifest.kv.pool_bytes,
            "device_bytes": manifest.device_pool_bytes,
        },
        "text": None if text is None else {"tokens": text.tokens, "truncate": text.truncate},
        "video": None if video is None else asdict(video),
        "files": {path: entry.size for path, entry in manifest.files.items()},
    }


def unpack(options: argparse.Namespace) -> dict[str, object]:
    """Unpack what `seko-export pack` made."""
    from seko_runtime.format.unpacking import unpack_artifact

    made = unpack_artifact(options.artifact, options.output, trust=options.trust)
    print(f"artifact {made.folder}, {made.files} files, {made.bytes} bytes, digest {made.digest}")
    return asdict(made) | {"folder": str(made.folder)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seko-run", description=__doc__)
    parser.add_argument("--version", action="version", version=f"seko-runtime {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function, summary in (
        (run, "replay chunks and write them to a file"),
        (verify, "replay the recorded chunks and compare"),
        (info, "print what the manifest says"),
        (unpack, "make a folder of a packed artifact"),
    ):
        command = commands.add_parser(function.__name__, help=summary, description=summary)
        command.set_defaults(command=function)
        packed = function is unpack
        command.add_argument(
            "artifact",
            type=Path,
            metavar="FILE.tar" if packed else "ARTIFACT",
            help="what `seko-export pack` made" if packed else "the artifact's folder",
        )
        command.add_argument("--json", action="store_true", help="end stdout with one JSON object")
        command.add_argument(
            "--trust",
            type=Path,
            metavar="FILE",
            help="open only what a key of this file signed; or SEKO_TRUST",
        )
        if packed:
            command.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
        if function in (run, verify):
            command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
            command.add_argument(
                "--copy-weights",
                action="store_true",
                help="read the weights into memory of its own: others may truncate their files",
            )
        if function is run:
            command.add_argument("--chunks", type=_positive, default=4, metavar="N")
            command.add_argument("--seed", type=int, default=0, metavar="S", help="row r gets S + r")
            command.add_argument(
                "--prompt", metavar="TEXT", help="a sentence; the one of the golden without it"
            )
            command.add_argument(
                "--prompts",
                type=Path,
                metavar="FILE.json",
                help='prompts over time: [{"at_s": 0, "prompt": "..."}, {"at_s": 6.5, "prompt": ..., "recache": true}]',
            )
            command.add_argument(
                "--text", type=Path, metavar="FILE.npy", help="text embeddings [B, tokens, dim]"
            )
            command.add_argument("--steps", type=_positive, metavar="N", help="denoise passes of a chunk")
            command.add_argument("--shift", type=float, metavar="X", help="warp of their times")
            command.add_argument(
                "--image",
                type=Path,
                metavar="FILE",
                help="start with a picture: .npy uint8, or with PyAV .png",
            )
            command.add_argument(
                "--reference",
                type=Path,
                metavar="FILE",
                help="reference frames: pictures as --image takes them, or .npy float32 latents",
            )
            command.add_argument(
                "-o", "--output", type=Path, required=True, metavar="FILE", help=".npy .y4m .mp4"
            )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
