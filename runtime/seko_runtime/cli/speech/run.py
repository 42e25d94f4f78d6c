"""The command `run` for a speech artifact: speaks a text with a voice and writes the sound patch by patch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seko_runtime.cli.output import Report, note, stdout_for_video
from seko_runtime.errors import InputFileError, UsageError
from seko_runtime.format.outputs import STDOUT
from seko_runtime.format.whole_files import check_file_place, is_inside
from seko_runtime.host.user_files import unreadable
from seko_runtime.media_files.sound import load_sound
from seko_runtime.media_files.sound_writer import SoundWriter, check_sound_output
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.speech.artifact import speech_artifact
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.normaliser import normalised
from seko_runtime.speech.prompts import Floats
from seko_runtime.speech.sentences import sentences_of
from seko_runtime.speech.session import SpeechSession
from seko_runtime.speech.texts import checked_text, spoken_text
from seko_runtime.speech.voice import Voice, check_voice

ENCODED = ".safetensors"  # suffix of an encoded voice's file


@dataclass(frozen=True)
class _Recordings:
    """The arguments of `SpeechSession.encode_voice`."""

    reference: Floats | None
    continued: Floats | None = None
    text: str = ""


def run(options: argparse.Namespace, manifest: SpeechManifest) -> Report:
    """Speak the text, write the sound, and return the report.

    Raises
    ------
    SekoRuntimeError
        If the run fails; the subclass tells the cause. A failed run leaves no new file.
    KeyboardInterrupt
        If a signal ends the run; the sound so far is kept, see `SoundWriter`.
    """
    check_sound_output(options.output, options.format)
    if (options.text is None) == (options.text_file is None):
        raise UsageError("this artifact speaks: give --text or --text-file, one of them")
    _check_voice(options)
    text = _text_of(options)
    if options.voice_text is not None:
        checked_text(options.voice_text, "--voice-text")
    voice = _read_voice(options, manifest)
    if options.output != STDOUT:
        return _run(options, text, manifest, voice, None)
    if sys.stdout is None or sys.stdout.isatty():
        raise UsageError(
            "-o - writes to stdout, which is closed or a terminal; pipe it, or choose another -o"
        )
    if options.json:
        raise UsageError("-o - and --json both write to stdout; give one")
    with stdout_for_video() as descriptor:
        return _run(options, text, manifest, voice, descriptor)


def _check_voice(options: argparse.Namespace) -> None:
    encoded = options.voice is not None and options.voice.suffix == ENCODED
    if options.voice_text is not None and options.voice is None:
        raise UsageError("--voice-text are the words of --voice, which is not given; give both")
    if encoded and (options.voice_text is not None or options.reference is not None):
        raise UsageError(
            f"--voice {options.voice} is encoded with its words: leave --voice-text and --reference out"
        )
    if options.reference is not None and options.voice_text is None:
        raise UsageError(
            "--reference stands beside a --voice with --voice-text; a voice to sound like is --voice"
        )
    if options.save_voice is not None and options.save_voice.suffix != ENCODED:
        raise UsageError(f"--save-voice {options.save_voice} does not end in {ENCODED}")
    if options.save_voice is not None and (options.voice is None or encoded):
        raise UsageError("--save-voice keeps the recording of --voice: give one")
    if options.save_voice is not None and is_inside(options.save_voice, options.artifact):
        raise UsageError(f"--save-voice {options.save_voice} lies inside the artifact, which it would spoil")
    if options.save_voice is not None:
        check_file_place(options.save_voice)


def _read_voice(options: argparse.Namespace, manifest: SpeechManifest) -> Voice | _Recordings | None:
    """Return the voice of the options, or the recordings of which the session makes it; None if they name none."""
    if options.voice is None:
        return None
    if options.voice.suffix == ENCODED:
        voice = Voice.load(options.voice)
        if voice.reference is None and voice.continued is None:
            raise InputFileError(
                f"--voice {options.voice} holds no voice: leave --voice out for the model's own"
            )
        check_voice(voice, manifest.workload.patch.shape)
        return voice
    rate = manifest.workload.voice.sample_rate
    sound = load_sound(options.voice, "--voice", rate=rate)
    if options.voice_text is None:
        return _Recordings(sound)
    reference = None if options.reference is None else load_sound(options.reference, "--reference", rate=rate)
    return _Recordings(reference, sound, options.voice_text)


def _text_of(options: argparse.Namespace) -> str | Iterator[str]:
    """Return the text to speak: whole, or the lines of a pipe or terminal, each as soon as it is read. UsageError if a
    whole text has nothing to say, or a letter that no tokenizer takes."""
    path: Path | None = options.text_file
    name = "--text" if path is None else f"--text-file {path}"
    if path is not None and (path == STDOUT or not path.is_file()):
        lines = _lines_of(path)
        return lines if options.normalize is None else normalised(lines, options.normalize, name)
    text: str = options.text if path is None else "".join(_lines_of(path))
    spoken_text(text, name)
    return text if options.normalize is None else "".join(normalised(text, options.normalize, name))


def _lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file, each as soon as it is read; ``-`` is stdin."""
    if path == STDOUT and sys.stdin is None:  # closed by whoever started this
        raise InputFileError("--text-file - reads stdin, which is closed; give a file")
    try:
        with sys.stdin if path == STDOUT else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                # editors of Windows begin a file with this mark
                yield line if number else line.removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise InputFileError(f"--text-file {path} is no text in UTF-8; convert it") from None
    except OSError as fault:
        raise unreadable(f"--text-file {path}", fault) from None


def _run(
    options: argparse.Namespace,
    text: str | Iterator[str],
    manifest: SpeechManifest,
    voice: Voice | _Recordings | None,
    descriptor: int | None,
) -> Report:
    began = time.perf_counter()
    rate = manifest.workload.patch.sample_rate
    if options.output.is_fifo():
        note(f"writing to the pipe {options.output}, which waits for whoever reads it")
    came: list[float] = []
    with (
        open_artifact(
            options.artifact, device=options.device, trust=options.trust, copy_weights=options.copy_weights
        ) as opened,
        speech_artifact(opened).open_session(
            seed=options.seed, guidance=options.guidance, temperature=options.temperature
        ) as session,
        SoundWriter(options.output, rate, form=options.format, descriptor=descriptor) as writer,
    ):
        opened_at = time.perf_counter()
        if isinstance(voice, _Recordings):
            session.voice = session.encode_voice(voice.reference, continued=voice.continued, text=voice.text)
        elif voice is not None:
            session.voice = voice
        if isinstance(text, str):
            session.check_text(text)
        if options.save_voice is not None:
            session.voice.save(options.save_voice)
        cut = apart = 0
        refusal: UsageError | InputFileError | None = None
        try:
            for number, sentence in enumerate(sentences_of(text, f"--text-file {options.text_file}")):
                session.begin(sentence, patches=options.patches, continues=number > 0)
                apart += number > 0 and not session.continues
                for samples in session.sound():
                    writer.write(samples)
                    came.append(time.perf_counter())
                cut += session.cut
        except (UsageError, InputFileError) as error:  # of a pipe, which nobody could check before
            if not came:
                raise
            refusal = error
        result = _result(options, session, writer, came, opened_at)
    if refusal is not None:
        raise type(refusal)(
            f"{refusal}; kept {result['sound_s']:.2f} s in {options.output}, what came before"
        )
    result |= {"artifact": str(options.artifact), "open_s": opened_at - began, "cut": cut, "apart": apart}
    return Report(result, _report_lines(result), aside=descriptor is not None)


def _result(
    options: argparse.Namespace,
    session: SpeechSession,
    writer: SoundWriter,
    came: list[float],
    opened_at: float,
) -> dict[str, object]:
    patch = session.manifest.workload.patch
    seconds = writer.samples / patch.sample_rate
    return {
        "output": str(options.output if options.output == STDOUT else options.output.resolve()),
        "format": writer.form,
        "seed": options.seed,
        "patches": len(came),
        "sample_rate": patch.sample_rate,
        "sound_s": seconds,
        "first_sound_s": came[0] - opened_at,
        "realtime_factor": seconds / (came[-1] - opened_at),
    }


def _report_lines(result: dict[str, object]) -> tuple[str, ...]:
    raw = "; 16-bit samples of one channel, little endian" if result["format"] == "raw" else ""
    lines = [
        f"wrote    {result['output']} ({result['sound_s']:.2f} s of {result['sample_rate']} samples a second{raw})",
        f"speed    {result['realtime_factor']:.2f} x real time, the first sound after {result['first_sound_s']:.2f} s",
    ]
    if result["cut"]:
        lines.append(
            f"cut      {result['cut']} sentences ended at their limit, before the model said that they are over"
        )
    if result["apart"]:
        lines.append(
            f"apart    {result['apart']} sentences do not go on in the voice of the one before, which ended at its "
            "limit, or needs more --positions beside them than the artifact has"
        )
    return tuple(lines)
