"""The options of `seko-run run` for a speech artifact."""

from __future__ import annotations

import argparse
from pathlib import Path

from seko_runtime.cli.options import (
    format_option,
    option,
    output_option,
    positive,
    seed_option,
    text_option,
)
from seko_runtime.cli.output import Report
from seko_runtime.cli.runs import RunCommand
from seko_runtime.speech.manifest import SpeechManifest

SPEECH = "Speech (voice, length)"


class SpeechRun(RunCommand):
    """Speaks a text, patch by patch."""

    kind = "speech"
    they, it = "speak", "speaks, see the heading Speech of --help"
    options = (
        text_option("speech: the text to speak"),
        seed_option(),
        option(
            "--text-file",
            group=SPEECH,
            type=Path,
            metavar="FILE",
            help="speak a text in UTF-8, sentence by sentence; a pipe, or - for stdin, as it is read",
        ),
        option(
            "--voice",
            group=SPEECH,
            type=Path,
            metavar="FILE",
            help="the voice to sound like: wav; with PyAV also mp3, m4a; .safetensors of --save-voice. Default: the "
            "model chooses one",
        ),
        option(
            "--voice-text",
            group=SPEECH,
            metavar="TEXT",
            help="the words of --voice: the text goes on where it ends",
        ),
        option(
            "--reference",
            group=SPEECH,
            type=Path,
            metavar="FILE",
            help="a recording to sound like, beside a --voice that goes on",
        ),
        option(
            "--save-voice",
            group=SPEECH,
            type=Path,
            metavar="FILE",
            help="write the encoded voice there (.safetensors), for --voice of later runs",
        ),
        option(
            "--normalize",
            group=SPEECH,
            metavar="LANGUAGE",
            help="en, zh or ja: numbers, dates and units as words (seko-runtime[normalize])",
        ),
        option(
            "--patches",
            group=SPEECH,
            type=positive,
            metavar="N",
            help="the most patches of a sentence; default: by its tokens",
        ),
        option(
            "--guidance", group=SPEECH, type=float, metavar="X", help="default: the artifact's, such as 2"
        ),
        option(
            "--temperature",
            group=SPEECH,
            type=float,
            metavar="X",
            help="of the noise; default: the artifact's",
        ),
        output_option("speech: .wav .mp3 .flac"),
        format_option("speech: wav, mp3, flac, or raw: 16-bit samples alone, which is for - and pipes"),
    )

    def run(self, options: argparse.Namespace, manifest: SpeechManifest) -> Report:
        """Speak the text, write the sound, and return the report."""
        from seko_runtime.cli.speech.run import run

        return run(options, manifest)


COMMAND = SpeechRun()
