"""The files and prompts that the options of `run` name. Files and prompts are read and checked before torch or an
engine is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.host import check_device
from seko_runtime.cli.output import note
from seko_runtime.controls import Controls
from seko_runtime.errors import InputFileError, ManifestError, UsageError, one_line
from seko_runtime.format.json_fields import Fields, as_integer, as_items, as_number, as_text, parse_json
from seko_runtime.host.user_files import first_bytes
from seko_runtime.media_files.arrays import load_array
from seko_runtime.opening.checked_artifact import read_file
from seko_runtime.video.clocks import checked_seed
from seko_runtime.video.conditioning import of_one_row
from seko_runtime.video.contract import (
    IMAGE,
    PICTURE_LEVELS,
    TEXT_BUFFER,
    begins_with_picture,
    picture_input,
    start_pictures,
    text_vocabulary,
)
from seko_runtime.video.manifest import Stream, VideoManifest
from seko_runtime.video.reference_frames import check_reference
from seko_runtime.video.schedule import rescheduled
from seko_runtime.video.text import NO_TEXT, PromptIds, no_sentences, prompt_words

MAX_SCHEDULE_BYTES = 1 << 20
MAX_WORDS_TOLD = 8


@dataclass(frozen=True)
class PromptAt:
    """One entry of a prompt schedule: a prompt, and the time from which the prompt is used.

    The entry's prompt is used from the first chunk that begins at ``at_s`` (seconds of video) or later. With
    ``at_frame``, the number of a video frame, the prompt is used from the first chunk whose first latent frame is the
    latent frame of this video frame, or a later latent frame. A latent frame is four video frames.
    """

    at_s: float
    prompt: str
    recache: bool = False
    at_frame: int | None = None

    def due(self, stream: Stream, first_frame: int, video_frames: int) -> bool:
        """Return whether the chunk that begins with latent frame ``first_frame``, after ``video_frames`` video frames,
        uses the entry's prompt.
        """
        if self.at_frame is None:
            return self.at_s * stream.fps <= video_frames
        return self.at_frame // stream.video_frames_per_latent <= first_frame


@dataclass(frozen=True)
class Conditioning:
    """The prompts and embeddings that a run's options name, in the form that `Session` takes."""

    prompts: list[PromptAt]
    text: NDArray[np.float32] | None


def read_conditioning(options: argparse.Namespace) -> Conditioning:
    """Read the files that the options of `run` name.

    Raises
    ------
    UsageError
        If a file is missing or invalid, or options exclude each other.
    VideoWriterError
        If a picture needs PyAV, which is not installed.
    """
    return Conditioning(
        _prompts_of(options),
        None if options.text is None else _load_text(Path(options.text)),
    )


def with_own_picture(
    conditioning: Conditioning,
    options: argparse.Namespace,
    manifest: VideoManifest,
    arrays: Mapping[str, NDArray[Any]],
) -> Conditioning:
    """Return the run's conditioning; where the model needs a picture and the options name none, with the first picture
    that the artifact brings, and with its first prompt if they name no text either. ``options`` then name both.
    ``arrays`` are the arrays of ``--input``.

    Raises
    ------
    ArtifactError, VideoWriterError
        If the artifact's picture cannot be read.
    """
    viewer, spec = manifest.workload.viewer, picture_input(manifest)
    given = options.image or options.reference or (spec is not None and spec.name in arrays)
    takes_one = "encode" in manifest.programs and start_pictures(manifest) == 1
    if viewer is None or not viewer.pictures or not begins_with_picture(manifest) or not takes_one or given:
        return conditioning
    picture = viewer.pictures[0]
    read_file(options.artifact, manifest, picture.file)  # its hash
    options.image = Path(options.artifact, picture.file)
    note(one_line(f"image    of the artifact: {picture.caption or picture.file}; --image takes another"))
    prompts = conditioning.prompts
    if not prompts and conditioning.text is None and viewer.prompts and manifest.workload.text is not None:
        options.prompt = viewer.prompts[0]
        prompts = [PromptAt(0.0, options.prompt)]
        note(one_line(f"prompt   of the artifact: {options.prompt}; --prompt takes another"))
    return replace(conditioning, prompts=prompts)


def check_conditioning(
    conditioning: Conditioning,
    options: argparse.Namespace,
    manifest: VideoManifest,
    controls: Sequence[Controls],
) -> None:
    """Check prompts, embeddings and the arguments that ``controls``, those of each of the run's sessions, give to
    `open_session`, against the manifest. The function prints to stderr which words of the prompts the tokenizer does
    not know.

    Raises
    ------
    UsageError
        If a prompt or picture is not possible for the artifact.
    ArtifactError, EnvironmentLacksError
        If the artifact's tokenizer cannot be used.
    """
    check_device(manifest.target, options.device)
    rescheduled(manifest, options.steps, options.shift)
    rows = range(len(controls))
    for row in rows:
        checked_seed(options.seed + row)
    shapes = {buffer.name: buffer.shape for buffer in manifest.buffers}
    if conditioning.prompts:
        _check_prompts(conditioning.prompts, options, manifest)
    if conditioning.text is not None:
        if TEXT_BUFFER not in shapes:
            raise UsageError(f"--text {options.text}: {NO_TEXT}")
        expected_shape = (len(rows), *shapes[TEXT_BUFFER][1:])
        if conditioning.text.shape != expected_shape:
            raise UsageError(
                f"--text {options.text} is {conditioning.text.shape}, this artifact takes {expected_shape}"
            )
    opening = controls[0].opening()
    image, reference = opening.get("image"), opening.get("reference")
    if image is not None:
        shape = shapes[PICTURE_LEVELS if picture_input(manifest) is not None else IMAGE]
        count = start_pictures(manifest)
        shape = shape if count == 1 else (count, *shape)
        of_one_row(image, shape, image.dtype.type, f"--image {options.image}")
    if reference is not None:
        check_reference(manifest, reference)


def _check_prompts(prompts: Sequence[PromptAt], options: argparse.Namespace, manifest: VideoManifest) -> None:
    """Tokenise each prompt; warn about words that the tokenizer does not know. Refuse a rebuild of the cache that the
    artifact cannot do; where a stream begins, there is nothing to rebuild."""
    spec, stream = manifest.workload.text, manifest.workload.stream
    if spec is None:
        raise UsageError(no_sentences(manifest))
    changes = prompts[int(prompts[0].due(stream, 0, 0)) :]
    if manifest.no_rebuild and any(prompt_at.recache for prompt_at in changes):
        raise UsageError(f"--prompts {options.prompts}: {manifest.no_rebuild}; leave recache out")
    document = read_file(options.artifact, manifest, spec.tokenizer)
    ids = PromptIds(spec, document, text_vocabulary(manifest))
    may_be_empty = begins_with_picture(manifest)
    words = [prompt_words(prompt_at.prompt, may_be_empty=may_be_empty) for prompt_at in prompts]
    for prompt in dict.fromkeys(words):
        if not prompt:
            note("the prompt is empty: the video follows its picture alone")
        ids.ids(prompt)  # raises if it is too long and may not be cut
        length = ids.length(prompt)
        if length > spec.tokens:
            note(f"warning: the prompt has {length} tokens and is cut to {spec.tokens}")
        unknown = ids.unknown_words(prompt)
        if unknown:
            word_list = ", ".join(map(repr, unknown[:MAX_WORDS_TOLD]))
            more = f" and {len(unknown) - MAX_WORDS_TOLD} more" if len(unknown) > MAX_WORDS_TOLD else ""
            note(
                one_line(
                    f"warning: this artifact does not know the words {word_list}{more}; they mean nothing to it"
                )
            )


def load_schedule(path: Path) -> list[PromptAt]:
    """Read a prompt schedule, a JSON file that lists prompts with the times from which they are used.

    An example is ``[{"at_s": 0, "prompt": "..."}, {"at_s": 6.5, "prompt": "...", "recache": true}]``. All entries may
    have ``at_frame``, the number of a video frame, in place of ``at_s``, a time in seconds.

    Raises
    ------
    InputFileError
        If the file is invalid, or the times of its entries are not ascending.
    """
    document = first_bytes(path, f"--prompts {path}", MAX_SCHEDULE_BYTES + 1)
    try:
        lines = list(as_items(parse_json(document, "it", MAX_SCHEDULE_BYTES), "it", _prompt_at))
    except ManifestError as error:
        problem = str(error).rsplit("; ", 1)[0][:200]  # without what to do about an artifact
        raise InputFileError(
            f'--prompts {path} is no schedule of prompts: {problem}; expected [{{"at_s": 0, "prompt": "..."}}]'
        ) from None
    by_frame = {line.at_frame is not None for line in lines}
    if len(by_frame) > 1:
        raise InputFileError(
            f"--prompts {path} has at_s in some entries and at_frame in others; take one of them"
        )
    times = [line.at_s if line.at_frame is None else line.at_frame for line in lines]
    if not lines or times[0] < 0 or times != sorted(set(times)):
        raise InputFileError(f"--prompts {path} has the times {times[:8]}, expected rising ones from 0 on")
    return lines


def _prompts_of(options: argparse.Namespace) -> list[PromptAt]:
    named = [name for name in ("prompt", "prompts", "text") if getattr(options, name) is not None]
    if len(named) > 1:
        raise UsageError(f"--{' and --'.join(named)} exclude each other; give one")
    if options.prompt is not None:
        return [PromptAt(0.0, options.prompt)]
    return [] if options.prompts is None else load_schedule(options.prompts)


def _prompt_at(value: object, where: str) -> PromptAt:
    fields = Fields(value, where)
    by_frame = "at_frame" in fields.names() and "at_s" not in fields.names()
    surplus = set(fields.names()) - {"at_frame" if by_frame else "at_s", "prompt", "recache"}
    if surplus:
        raise ManifestError(f"{where} has the unknown {sorted(surplus)[:4]}")
    return PromptAt(
        0.0 if by_frame else as_number(fields.value("at_s"), f"{where}.at_s"),
        as_text(fields.value("prompt"), f"{where}.prompt"),
        fields.flag("recache", default=False),
        as_integer(fields.value("at_frame"), f"{where}.at_frame") if by_frame else None,
    )


def _load_text(path: Path) -> NDArray[np.float32]:
    if path.suffix != ".npy" and not path.exists():
        raise InputFileError(
            f"--text {path} was not found: it takes an .npy of embeddings, and --prompt words"
        )
    text = load_array(path, "--text")
    if text.dtype.kind not in "fiu":
        raise InputFileError(f"--text {path} holds no array of numbers")
    with np.errstate(over="ignore"):  # an infinite number is refused, by name
        return text.astype(np.float32)
