"""Token ids of prompts: a prompt is cleaned, then tokenised by the library `tokenizers`.

The first prompt that needs `tokenizers`, or `ftfy` for its cleaning, imports the library.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import ArtifactError, LibraryMissingError, UsageError
from seko_runtime.format.tokenizer_file import cut_text, open_tokenizer
from seko_runtime.video.contract import TEXT_BUFFER
from seko_runtime.video.manifest import Text, VideoManifest

MAX_PROMPT_LETTERS = 1 << 16
# Prompts that `ftfy` leaves as they are: ASCII without its control characters, and without the & of HTML.
_PLAIN = re.compile(r"[\t\n\f\r -%'-~]*")
NO_TEXT_ENCODER = (
    "this artifact has no text encoder; rebuild it with --text-encoder, or give the embeddings of one as text "
    "(seko-run: --text FILE.npy)"
)


NO_TEXT = "this artifact's model takes no text; leave prompt and text out"


def no_sentences(manifest: VideoManifest) -> str:
    """Return why an artifact without a text encoder takes no sentence as a prompt."""
    return NO_TEXT_ENCODER if any(buffer.name == TEXT_BUFFER for buffer in manifest.buffers) else NO_TEXT


class PromptIds:
    """Makes the token ids of prompts, as an artifact's text encoder takes them.

    Parameters
    ----------
    spec : Text
        The manifest's table of the tokenizer and the limits of a prompt.
    document : bytes or memoryview
        The tokenizer's JSON file.
    vocabulary : int, optional
        Number of token ids that the text encoder can look up; None: not checked.
    """

    def __init__(self, spec: Text, document: bytes | memoryview, vocabulary: int | None = None) -> None:
        self._spec, self._vocabulary = spec, vocabulary
        self._document = document
        self._tokenizer: Any = None

    def ids(self, cleaned: str) -> NDArray[np.int64]:
        """Return the token ids of a cleaned prompt, int64 [1, tokens]. A short prompt is padded; a long prompt is cut,
        keeping its last id.

        Raises
        ------
        LibraryMissingError
            If `tokenizers` is not installed.
        ArtifactError
            If the artifact's file is no valid tokenizer, or the tokenizer returns an id that the text encoder does not
            know.
        UsageError
            If the prompt is too long, and the artifact was built not to cut prompts.
        """
        spec = self._spec
        token_ids = list(self._encoded(cleaned).ids)
        if self._vocabulary is not None and max(token_ids, default=0) >= self._vocabulary:
            raise ArtifactError(
                f"{spec.tokenizer} gives the id {max(token_ids)}, the text encoder knows ids below {self._vocabulary}; "
                "rebuild the artifact"
            )
        if len(token_ids) > spec.tokens:
            if not spec.truncate:
                raise UsageError(
                    f"the prompt has {len(token_ids)} tokens, this artifact takes {spec.tokens}; shorten it"
                )
            token_ids = [*token_ids[: spec.tokens - 1], token_ids[-1]]
        out = np.full((1, spec.tokens), spec.pad_id, np.int64)
        out[0, : len(token_ids)] = token_ids
        return out

    def length(self, cleaned: str) -> int:
        """Return the number of tokens of a cleaned prompt before it is cut; the method raises the same errors as
        `ids`."""
        return len(self._encoded(cleaned).ids)

    def unknown_words(self, cleaned: str) -> list[str]:
        """Return the words of a cleaned prompt that contain unknown tokens, each once.

        The list is empty if the tokenizer has no token for unknown words. `unknown_words` raises the same errors as
        `ids`.
        """
        encoded = self._encoded(cleaned)
        unknown = self._unknown_id()
        words = [
            _word_at(cleaned, *span)
            for token_id, span in zip(encoded.ids, encoded.offsets, strict=True)
            if token_id == unknown
        ]
        return list(dict.fromkeys(word for word in words if word))

    def _unknown_id(self) -> int | None:
        tokenizer = self._loaded()
        model = json.loads(bytes(self._document))["model"]  # the library has already read this document
        if model.get("unk_id") is not None:
            return int(model["unk_id"])
        token = model.get("unk_token")
        token_id: int | None = None if token is None else tokenizer.token_to_id(token)
        return token_id

    def _encoded(self, cleaned: str) -> Any:
        return cut_text(self._loaded(), cleaned, self._spec.tokenizer)

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._document, self._spec.tokenizer)
        return self._tokenizer


def _word_at(text: str, begin: int, end: int) -> str:
    """Return the word around a span of a text, or the span itself if it is not in a word."""
    if not re.search(r"\w", text[begin:end]):
        return text[begin:end].strip()
    while begin > 0 and re.match(r"\w", text[begin - 1]):
        begin -= 1
    while end < len(text) and re.match(r"\w", text[end]):
        end += 1
    return re.sub(r"^\W+|\W+$", "", text[begin:end])


def clean_prompt(prompt: str) -> str:
    """Clean a prompt as the pipelines of Wan's authors and of diffusers do: the library `ftfy` straightens curly quotes
    and repairs wrongly decoded text, HTML is unescaped twice, white space collapsed, and both ends stripped.

    No error message quotes a prompt: prompts are private, and error messages end up in logs.

    Raises
    ------
    UsageError
        If the prompt is not a string, is too long, or contains a lone surrogate.
    LibraryMissingError
        If the prompt is not plain ASCII and `ftfy` is not installed.
    """
    if not isinstance(prompt, str):
        raise UsageError(f"a prompt is a text, got {type(prompt).__name__}")
    if len(prompt) > MAX_PROMPT_LETTERS:
        raise UsageError(
            f"the prompt has {len(prompt)} letters, at most {MAX_PROMPT_LETTERS} are taken; shorten it"
        )
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"letter {error.start + 1} of the prompt is a lone surrogate, which no text holds"
        ) from None
    mended = prompt if _PLAIN.fullmatch(prompt) else ftfy_library().fix_text(prompt)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(mended))).strip()


def prompt_words(prompt: str, *, may_be_empty: bool) -> str:
    """Return a cleaned prompt, as `clean_prompt` does, that has words.

    Parameters
    ----------
    prompt : str
        The prompt of a caller.
    may_be_empty : bool
        Whether an empty text is taken as a wish for no words; see `contract.begins_with_picture`. White space alone is
        no such wish.

    Raises
    ------
    UsageError
        If the prompt holds NUL or has no words, and for the reasons of `clean_prompt`.
    LibraryMissingError
        See `clean_prompt`.
    """
    if isinstance(prompt, str) and "\0" in prompt:
        raise UsageError(f"letter {prompt.index(chr(0)) + 1} of the prompt is NUL, which no text holds")
    cleaned = clean_prompt(prompt)
    if any(letter.isprintable() and not letter.isspace() for letter in cleaned) or (
        may_be_empty and not prompt
    ):
        return cleaned
    what = "has no letter that can be seen" if prompt else "is empty"
    more = ', or give an empty text ("") for a video without words' if may_be_empty else ""
    raise UsageError(f"the prompt {what}; write what the video is to show{more}")


def ftfy_library() -> Any:
    """Return the library `ftfy`; LibraryMissingError if it is not installed."""
    try:
        import ftfy
    except ImportError:
        raise LibraryMissingError(
            "a prompt that is not plain ASCII needs the library ftfy, which is not installed; pip install ftfy"
        ) from None
    return ftfy


def prompt_key(cleaned: str, digest: str) -> str:
    """Return a SHA-256 over a cleaned prompt and the digest of the artifact that encodes it."""
    return hashlib.sha256(f"{digest}\n{cleaned}".encode()).hexdigest()
