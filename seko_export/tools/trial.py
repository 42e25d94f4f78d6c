"""The command `seko-export try`, which builds an artifact into a cache folder and shows a video of it. The name of the
cache entry is a hash of everything that determines the artifact."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from seko_export.checkpoints.lora_files import read_files
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import Layout, OpenedFiles
from seko_export.config.media import VaeConfig
from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.errors import ExportError, MachineError, RunError, UsageError
from seko_export.families.registry import family_named
from seko_export.host import environment
from seko_export.host.child_process import run_child
from seko_export.media.hubert.files import weights_of
from seko_export.media.layouts import CLIP_LAYOUT, HUBERT_LAYOUT, TEXT_LAYOUT
from seko_export.media.vaes import vae_of
from seko_export.media.viewer import read_viewer
from seko_export.options.asked import workload_asked
from seko_export.options.checks import check_files
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolved import ResolvedBuild
from seko_runtime.errors import ArtifactError
from seko_runtime.errors import UsageError as RuntimeUsageError
from seko_runtime.format.manifest import MANIFEST_FILE
from seko_runtime.format.own_folders import remove
from seko_runtime.format.pipes import is_pipe
from seko_runtime.format.private_files import shared_folder
from seko_runtime.media_files.films import Film
from seko_runtime.media_files.pictures import load_image
from seko_runtime.video.files import SUFFIXES, check_output

TRIALS = "trials"  # below the user's cache
SERVER = "seko_serve"
_KEY_LETTERS = 16


def try_artifact(
    options: BuildOptions,
    build: Callable[[BuildOptions, Path], object],
    run_options: Collection[str] = (),
    *,
    serves: bool = False,
) -> tuple[Path, bool]:
    """Return the folder in the cache of the artifact with the given options, and whether this call has built the
    artifact.

    The artifact is built unless the cache has one with the same input files (by SHA-256), configuration, backend,
    target and toolchain.

    Parameters
    ----------
    options : BuildOptions
        The options of `seko-export build`.
    build : callable
        Function that builds an artifact: `seko_export.build`, which is called with the options and the folder.
    run_options : collection of str
        Options of the run that will follow, such as ``--prompt``.
    serves : bool
        Whether the page will run instead.

    Raises
    ------
    UsageError
        If the artifact could not take one of the run's options.
    ExportError
        If the build of the artifact fails, with the errors of `seko_export.build`.
    """
    workload = workload_asked(options)
    if workload.name != ModelConfig.workload:
        raise UsageError(
            f"try makes video: build a {workload.name} model with `seko-export build`, and run it with seko-run"
        )
    check_files(options)
    resolved = workload.resolve_options(options)
    _check_run(resolved.config, run_options, serves=serves)
    home = _own_home()
    folder = home / _key(options, resolved)
    if _is_whole(folder):
        return folder, False
    built = True
    try:
        build(options, folder)
    except RuntimeUsageError:
        if not (folder / MANIFEST_FILE).is_file():
            raise
        built = False  # another process built the same meanwhile
    folder.chmod(0o700)
    return folder, built


def _own_home() -> Path:
    """Make the folder of all trials, whose artifacts are run without further questions; refuse one in which others may
    have put an artifact."""
    home = environment.user_cache() / TRIALS
    advice = "set XDG_CACHE_HOME to a folder of your own"
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            home.mkdir(mode=0o700)
        fault = shared_folder(home)
        if fault is None:
            home.chmod(0o700)
    except OSError as problem:
        raise MachineError(
            f"the cache {home} cannot be made ({problem.strerror or problem}): {advice}"
        ) from problem
    if fault is not None:
        raise MachineError(
            f"{home} {fault}, and try runs the native code of the artifacts in it: {advice}, or remove it"
        )
    return home


def _is_whole(folder: Path) -> bool:
    """Return whether the cache has an artifact; remove the rest of one that lost its manifest."""
    if not os.path.lexists(folder):
        return False
    fault = shared_folder(folder)
    if fault is not None:
        raise MachineError(
            f"{folder} {fault}, and try runs the native code in it: remove it, and try builds it again"
        )
    if (folder / MANIFEST_FILE).is_file():
        return True
    remove(folder)
    if os.path.lexists(folder):
        raise MachineError(f"{folder} has no {MANIFEST_FILE} and cannot be removed: remove it, and try again")
    print(f"removed {folder}: it was an artifact without {MANIFEST_FILE}", file=sys.stderr)
    return False


def _check_run(config: VideoBuild, run_options: Collection[str], *, serves: bool) -> None:
    """Refuse an option of the run that an artifact with this configuration does not take."""
    if "--prompt" in run_options and not config.model.takes_text:
        raise UsageError(f"--prompt: {config.model.name!r} takes no text; leave it out")
    if "--prompt" in run_options and config.workload.text is None:
        raise UsageError(
            "--prompt: this build has no text encoder; name one with --text-encoder, or leave it out"
        )
    if "--image" in run_options and config.workload.encoding_vae is None:
        raise UsageError(
            "--image: no VAE of this build encodes pictures; name one with --vae, or beside a tiny decoder with "
            "--vae-encoder, or leave it out"
        )
    turns, video = config.workload.stream.strength is not None, "--video" in run_options
    if video and not turns:
        raise UsageError("--video: this build takes no video; give --strength, or leave it out")
    if turns and not (video or serves):
        raise UsageError(
            "this build turns a video into another one: give --video FILE, or --serve for a camera in the page"
        )
    two, named = config.model.seen_pictures > 1, "--last-image" in run_options
    if "--image" in run_options and two != named:
        wrong = "a last picture, too; give --last-image" if two else "no last picture; leave --last-image out"
        raise UsageError(f"--image: this build's model takes {wrong}")
    if named and "--image" not in run_options:
        raise UsageError("--last-image belongs to --image: give the first picture, too")


def check_shown(
    output: Path | None, pictures: Mapping[str, Path | None] = MappingProxyType({}), video: Path | None = None
) -> None:
    """Check, before the build, that a video can be written or, without an output, that the server is installed; and
    that pictures, by the option that names each, and an input video can be read.

    Raises
    ------
    UsageError
        If the output's suffix is of no format.
    MachineError
        If the server is not installed.
    SekoRuntimeError
        If the output cannot be written, or a picture cannot be read.
    """
    for option, path in pictures.items():
        if path is not None:
            load_image(path, option)
    if video is not None:
        Film(video)
    if output is not None:
        if output.suffix not in SUFFIXES and not is_pipe(output):
            raise UsageError(f"-o {output}: expected a file that ends in one of {', '.join(SUFFIXES)}")
        check_output(output)
    elif importlib.util.find_spec(SERVER) is None:
        raise MachineError(
            "--serve needs the server, which is not installed: install the folder serve, or leave it out"
        )


def write_video(artifact: Path, output: Path, run_options: Iterable[str] = ()) -> dict[str, Any]:
    """Write a video of an artifact in a process of its own; return the JSON line of ``seko-run run --json``.

    Parameters
    ----------
    artifact : Path
        Folder of the artifact.
    output : Path
        File of the video, ``.mp4``, ``.y4m`` or ``.npy``.
    run_options : iterable of str
        Further options of ``seko-run run``, such as ``--prompt`` and a sentence.

    Raises
    ------
    ExportError
        If ``seko-run run`` fails, with its exit code; a RunError if it has stated why.
    """
    with _kept(artifact):
        done = run_child(
            "seko_runtime", "run", str(artifact), f"--output={output}", *run_options, "--json", shown=True
        )
    lines = done.stdout.strip().splitlines()
    report: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if done.returncode:
        ended = f"the run ended with exit code {done.returncode}"
        fault = RunError(str(report["error"])) if "error" in report else ExportError(ended)
        fault.exit_code = done.returncode
        if fault.exit_code == ArtifactError.exit_code:
            fault.add_note(f"{artifact} is damaged: remove this folder, and try builds it again")
        raise fault
    return report


def serve_page(artifact: Path) -> int:
    """Serve an artifact's page until a signal ends it; returns the exit code."""
    with _kept(artifact):
        return run_child(SERVER, str(artifact), shown=True).returncode


@contextlib.contextmanager
def _kept(artifact: Path) -> Iterator[None]:
    """Have the sentence about an interruption say that the artifact stays; what else stays, the child says."""
    try:
        yield
    except KeyboardInterrupt as ended:
        ended.add_note(f"{artifact} is kept")
        raise


def _key(options: BuildOptions, resolved: ResolvedBuild[VideoBuild]) -> str:
    """Return a name made from everything that determines an artifact, except paths."""
    media, workload, read = resolved.media, resolved.config.workload, _digests
    model = _opened_model(resolved)
    facts = {
        "config": repr(resolved.config),
        "checkpoint": [] if model is None else read(model.files),
        "part": None if model is None else model.part,
        "vae": read(_vae_files(media.vae, workload.vae)),
        "vae_encoder": read(_vae_files(media.vae_encoder, workload.vae_encoder)),
        "text": read(_files_of(media.text_encoder, TEXT_LAYOUT)),
        "tokenizer": read([] if media.tokenizer is None else [media.tokenizer]),
        "audio": read(_audio_files(media.audio_encoder)),
        "image": read(_files_of(media.image_encoder, CLIP_LAYOUT)),
        "viewer": read(read_viewer(media.viewer).pictures) if media.viewer else [],
        "loras": [[*read(read_files(lora.path)), lora.weight] for lora in options.lora_files],
        "partial": options.lora_partial,
        "random": options.random_weights,
        "backend": [options.backend, options.no_goldens],
        "target": asdict(environment.local_target(resolved.config.target.device)),
        "producer": environment.producer(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_KEY_LETTERS]


def _opened_model(resolved: ResolvedBuild[VideoBuild]) -> OpenedFiles | None:
    """Return the opened checkpoint of a build, with the entry and the files that the build reads; None: random
    weights."""
    if resolved.checkpoint is None:
        return None
    chosen, keys = resolved.load_options, family_named(resolved.config.model.family).keys
    layout = keys.layout(chosen.entry, chosen.first_entry)
    return open_files(resolved.checkpoint, layout, chosen.companion)


def _files_of(path: Path | None, layout: Layout) -> tuple[Path, ...]:
    """Return the files of weights that a build reads at a path. What it reads of a config.json is in its
    configuration."""
    return () if path is None else open_files(path, layout).files


def _vae_files(path: Path | None, config: VaeConfig | None) -> tuple[Path, ...]:
    return () if config is None else _files_of(path, vae_of(config).layout)


def _audio_files(folder: Path | None) -> tuple[Path, ...]:
    return () if folder is None else _files_of(weights_of(folder), HUBERT_LAYOUT)


def _digests(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of one file, or of several files the SHA-256 of each with the file's name."""
    found = []
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        found.append(digest if len(files) == 1 else f"{file.name} {digest}")
    return found
