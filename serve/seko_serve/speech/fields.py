"""The fields of ``POST /v1/audio/speech`` and ``POST /v1/audio/voices``, as OpenAI's clients and those of other servers
send them."""

from __future__ import annotations

import re
from typing import Any

from seko_runtime.errors import UsageError
from seko_runtime.speech.manifest import MAX_GUIDANCE, MAX_TEMPERATURE
from seko_runtime.speech.normaliser import LANGUAGES
from seko_runtime.speech.texts import spoken_text
from seko_serve.errors import ServeError
from seko_serve.http.fields import (
    A_FLAG,
    A_NUMBER,
    A_TEXT,
    A_WHOLE,
    Field,
    Fields,
    Read,
    anything,
    one_of,
    structure,
    text,
    whole,
)
from seko_serve.http.schemas import SEED, TEXT, UPLOAD, Table, object_of
from seko_serve.media.sound_files import FORMS
from seko_serve.protocol import whole_seed

MAX_INPUT_LETTERS, MAX_NAME_LETTERS = 4096, 64
DEFAULT_VOICE = "default"
STOCK_VOICES = (  # of OpenAI
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip
STOCK_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
_STOCK_MODEL = re.compile(rf"(?:{'|'.join(STOCK_MODELS)})(?:-[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}})?")
# Of names with "realtime" in them: a pattern that had the word would try it at each place of a long name.
_REALTIME_MODEL = re.compile(r"gpt-[a-z0-9.-]+")
_A_VOICE: Table = {"anyOf": [TEXT, object_of({"id": TEXT})]}


def is_stock_model(name: object) -> bool:
    """Return whether a name is that of one of OpenAI's models that speak, for which the artifact stands in."""
    if not isinstance(name, str):
        return False
    pattern = _REALTIME_MODEL if "realtime" in name else _STOCK_MODEL
    return pattern.fullmatch(name) is not None


def _input(value: Any, name: str) -> str:
    try:
        spoken_text(text(value, name), name)
    except UsageError as error:
        raise ServeError("bad_request", str(error)) from None
    if len(value) > MAX_INPUT_LETTERS:
        raise ServeError(
            "too_large", f"{name} has {len(value)} letters, at most {MAX_INPUT_LETTERS} are taken"
        )
    return str(value)


def _voice(value: Any, name: str) -> str:
    """Return the name or id of a voice, which may stand in an object as ``id``."""
    value = structure(value, name)
    return text(value["id"] if isinstance(value, dict) and set(value) == {"id"} else value, name)


def _none(why: str) -> Read:
    """Return the reader of a field that is taken empty alone."""

    def read(value: Any, name: str) -> None:
        if text(value, name).strip():
            raise ServeError("unsupported", f"{why}: leave {name} out")

    return read


def _positive(value: Any, name: str) -> int:
    if (found := whole(value, name)) < 1:
        raise ServeError("bad_request", f"{name} is {found}, expected 1 or more")
    return found


def _name(value: Any, name: str) -> str:
    if not (found := text(value, name).strip()) or len(found) > MAX_NAME_LETTERS or not found.isprintable():
        raise ServeError("bad_request", f"{name} is no name of 1 to {MAX_NAME_LETTERS} letters")
    if "/" in found or found in (".", ".."):
        raise ServeError(
            "bad_request", f"{name} has a slash, or is a dot or two: no path ends in such a name"
        )
    if found == DEFAULT_VOICE:
        raise ServeError("bad_request", f"{name} is {DEFAULT_VOICE}, which is the model's own voice")
    return found


FIELDS = Fields(
    Field(
        "input",
        f"the text, at most {MAX_INPUT_LETTERS:,} letters",
        {**TEXT, "maxLength": MAX_INPUT_LETTERS},
        _input,
    ),
    Field(
        "model",
        f"the artifact's name, or one of OpenAI's ({', '.join(f'`{name}`' for name in STOCK_MODELS)})",
        *A_TEXT,
    ),
    Field(
        "voice",
        f"`{DEFAULT_VOICE}`, or one of OpenAI's such as `alloy`, which are the same; or a kept voice by name "
        "or id",
        _A_VOICE,
        _voice,
    ),
    Field(
        "response_format",
        "`mp3` (default), `opus` (Ogg), `aac`, `flac`, `wav`, or `pcm`: 16 bits, little endian, one channel, at the "
        "rate of the header `x-sample-rate`",
        {"enum": list(FORMS), "default": "mp3"},
        one_of(*FORMS),
    ),
    Field(
        "stream_format",
        "`audio` (default), or `sse`: events `speech.audio.delta` with base64 `audio`, then `speech.audio.done` with "
        "`usage` (tokens of the text, patches of sound) and `cut`: whether a limit ended a sentence",
        {"enum": ["audio", "sse"], "default": "audio"},
        one_of("audio", "sse"),
    ),
    Field("stream", "`false`: the file comes as a whole at the end", *A_FLAG),
    Field("seed", "the same text and seed give the same speech", SEED, whole_seed),
    Field("guidance", f"strength of guidance, 0 to {MAX_GUIDANCE:g}", *A_NUMBER),
    Field("temperature", f"deviation of the noise, 0 to {MAX_TEMPERATURE:g}", *A_NUMBER),
    Field("max_new_tokens", "largest number of patches of the whole speech", A_WHOLE[0], _positive),
    Field(
        "ref_audio",
        "a recording to imitate, at most 60 s and less where a session has few positions, encoded between other "
        "sessions' calls",
        UPLOAD,
        anything,
    ),
    Field("ref_text", "its words: the speech continues it", TEXT, anything),
    Field(
        "reference",
        "a further recording, to imitate while that of `ref_audio` is continued",
        UPLOAD,
        anything,
    ),
    Field(
        "task_type",
        "`Base` with a recording or kept voice, `CustomVoice` without",
        {"enum": ["Base", "CustomVoice"]},
        one_of("Base", "CustomVoice"),
    ),
    Field(
        "normalize",
        "`en`, `zh` or `ja`: numbers, dates and units of the text as words of this language (needs "
        "`seko-runtime[normalize]`)",
        {"enum": list(LANGUAGES)},
        one_of(*LANGUAGES),
    ),
    Field("language", "taken and not needed: the model reads it from the text", *A_TEXT),
    Field(
        "instructions",
        "refused unless empty: the model takes none",
        TEXT,
        _none("this model takes no instructions; to change how it sounds, send a recording as ref_audio"),
    ),
    Field("speed", "1; another number is refused", *A_NUMBER, own=lambda _: 1),
)

VOICE_FIELDS = Fields(
    Field(
        "name",
        f"1 to {MAX_NAME_LETTERS} letters without a slash, not `default`; a voice of this name is replaced",
        TEXT,
        _name,
    ),
    Field("audio_sample", "the recording: a file of the form, base64 or a data URL", UPLOAD, anything),
    Field("ref_audio", "the recording: a file of the form, base64 or a data URL", UPLOAD, anything),
    Field("ref_text", "its words: speech continues it", TEXT, anything),
    Field("reference", "a further recording, to imitate while the other is continued", UPLOAD, anything),
    Field("model", "the artifact's name; of a fleet of several, whose voice it is", *A_TEXT),
    Field("type", "`audio_sample`", {"const": "audio_sample"}, one_of("audio_sample")),
    Field("consent", "taken and not checked: who may use a voice is not the server's to know", *A_TEXT),
)
