"""Command line of the inference box: `run`, `verify` and `info` an artifact. Needs nothing but the runtime."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seko_runtime import __version__
from seko_runtime.artifact import OpenArtifact, open_artifact, read_manifest
from seko_runtime.errors import NumericError, SekoRuntimeError, UsageError
from seko_runtime.golden import ChunkError, error_row, verdict
from seko_runtime.video import ChunkWriter, check_suffix


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 usage, 4 artifact, 5 environment, 6 numeric."""
    options = _parser().parse_args(arguments)
    try:
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
    """Replay chunks into a file."""
    check_suffix(options.output)
    text = None if options.text is None else _load_text(options.text)
    began = time.perf_counter()
    with open_artifact(options.artifact, device=options.device) as artifact:
        manifest, stream = artifact.manifest, artifact.manifest.stream
        seeds = [options.seed + row for row in range(stream.batch)]
        compared = _comparable_chunks(artifact, seeds, text is not None)
        errors: list[ChunkError] = []
        seconds: list[float] = []
        with (
            artifact.open_session(seeds=seeds, text=text) as session,
            ChunkWriter(options.output, stream, options.chunks) as writer,
        ):
            open_s = time.perf_counter() - began
            for number in range(options.chunks):
                chunk_began = time.perf_counter()
                latents = session.run_chunk().to_host()
                seconds.append(time.perf_counter() - chunk_began)
                writer.write(latents)
                if number in compared:
                    errors.append(artifact.chunk_error(number, latents))
    steady = seconds[1:] or seconds  # the first chunk may pay for what is set up late
    chunks_per_s = len(steady) / sum(steady)
    video_s = stream.chunk_frames * stream.video_frames_per_latent / stream.fps
    result: dict[str, object] = {
        "artifact": str(options.artifact),
        "digest": artifact.digest,
        "output": str(options.output.resolve()),
        "preview": writer.is_preview,
        "chunks": options.chunks,
        "seed": options.seed,
        "open_s": open_s,
        "first_chunk_s": seconds[0],
        "chunks_per_s": chunks_per_s,
        "realtime_factor": video_s * chunks_per_s,
        "kv": {
            "scheme": manifest.kv.scheme,
            "pool_bytes": manifest.kv.pool_bytes,
            "bf16_pool_bytes": manifest.kv.bf16_pool_bytes,
        },
        "errors": [error_row(error) for error in errors],
    }
    kind = "a linear preview of the latents, not decoded video" if writer.is_preview else "latents"
    ratio = manifest.kv.pool_bytes / max(manifest.kv.bf16_pool_bytes, 1)
    print(f"wrote    {result['output']} ({kind})")
    print(
        f"speed    {chunks_per_s:.2f} chunks/s, {video_s * chunks_per_s:.2f} x real time at {stream.fps} fps"
    )
    print(f"KV pool  {manifest.kv.pool_bytes} bytes ({manifest.kv.scheme}), {ratio:.4f} of bf16")
    for error in errors:
        print(f"error    {error}")
    if not errors:
        print("error    not compared: the golden was recorded with other seeds, text or chunks")
    return result


def verify(options: argparse.Namespace) -> dict[str, object]:
    """Replay the goldens; NumericError if one is missed."""
    with open_artifact(options.artifact, device=options.device) as artifact:
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
    manifest, digest = read_manifest(options.artifact)
    stream, target = manifest.stream, manifest.target
    print(f"name     {manifest.name}, format {manifest.format_version}, digest {digest}")
    print(
        f"target   {manifest.backend} on {target.device} {target.arch}, torch {target.torch}, CUDA {target.cuda}"
    )
    print(
        f"stream   {stream.width}x{stream.height} at {stream.fps} fps, chunk {stream.chunk_frames} latent frames,"
    )
    print(f"         sink {stream.sink_frames}, ring {stream.ring_frames}, batch {stream.batch}")
    print(
        f"KV pool  {manifest.kv.pool_bytes} bytes ({manifest.kv.scheme}), bf16 {manifest.kv.bf16_pool_bytes}"
    )
    return {
        "name": manifest.name,
        "digest": digest,
        "format_version": manifest.format_version,
        "backend": manifest.backend,
        "device": target.device,
        "arch": target.arch,
        "torch": target.torch,
        "kv": {"scheme": manifest.kv.scheme, "pool_bytes": manifest.kv.pool_bytes},
        "files": {path: entry.size for path, entry in manifest.files.items()},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seko_runtime", description=__doc__)
    parser.add_argument("--version", action="version", version=f"seko-runtime {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function, summary in (
        (run, "replay chunks and write them to a file"),
        (verify, "replay the recorded chunks and compare"),
        (info, "print what the manifest says"),
    ):
        command = commands.add_parser(function.__name__, help=summary, description=summary)
        command.set_defaults(command=function)
        command.add_argument("artifact", type=Path, metavar="ARTIFACT", help="the artifact's folder")
        command.add_argument("--json", action="store_true", help="end stdout with one JSON object")
        if function is not info:
            command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
        if function is run:
            command.add_argument("--chunks", type=_positive, default=4, metavar="N")
            command.add_argument("--seed", type=int, default=0, metavar="S", help="row r gets S + r")
            command.add_argument(
                "--text", type=Path, metavar="FILE.npy", help="text embeddings [B, tokens, dim]"
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


def _load_text(path: Path) -> np.ndarray:
    try:
        text = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--text {path} is no .npy file of numbers: {str(error)[:120]}") from None
    if not isinstance(text, np.ndarray) or text.dtype.kind not in "fiu":
        raise UsageError(f"--text {path} holds no array of numbers")
    return text.astype(np.float32)


def _comparable_chunks(artifact: OpenArtifact, seeds: list[int], own_text: bool) -> frozenset[int]:
    """Chunks whose golden was recorded with these seeds and the golden's text."""
    golden = artifact.manifest.golden
    if golden is None or own_text or list(golden.seeds) != seeds:
        return frozenset()
    return frozenset(golden.chunks)


if __name__ == "__main__":
    sys.exit(main())
