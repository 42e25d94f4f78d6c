"""A sentence to token ids: cleaning, and the library `tokenizers`, imported when the first sentence comes."""

from __future__ import annotations

import hashlib
import html
import re
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import TokenizerError, TokenizerMissingError, UsageError
from seko_runtime.format.manifest import Text

MAX_PROMPT_LETTERS = 1 << 16


class TokenIds(Protocol):
    """What a session needs of a tokenizer."""

    def ids(self, cleaned: str) -> NDArray[np.int64]:
        """Token ids [1, tokens] of a cleaned prompt."""
        ...


class PromptIds:
    """Token ids of prompts, as an artifact's text encoder takes them.

    Parameters
    ----------
    spec : Text
        The manifest's table.
    document : bytes or memoryview
        The tokenizer's JSON file.
    vocabulary : int, optional
        How many ids the text encoder can look up; not compared without it.
    """

    def __init__(self, spec: Text, document: bytes | memoryview, vocabulary: int | None = None) -> None:
        self._spec, self._vocabulary = spec, vocabulary
        self._document = document
        self._tokenizer: Any = None

    def ids(self, cleaned: str) -> NDArray[np.int64]:
        """Return int64 [1, tokens] of a cleaned prompt, padded, or cut with its last id kept.

        Raises
        ------
        TokenizerMissingError
            If `tokenizers` is not installed.
        TokenizerError
            If the artifact's file is no tokenizer of it, or gives an id that the text encoder does not know.
        UsageError
            If the prompt is too long, and the artifact does not cut.
        """
        spec = self._spec
        tokenizer = self._loaded()
        try:
            found = list(tokenizer.encode(cleaned).ids)
        except BaseException as error:  # its message is not told: it may quote the prompt
            _raise_foreign(error)
            raise TokenizerError(
                f"{spec.tokenizer} cannot cut a prompt into ids ({type(error).__name__}); rebuild the artifact"
            ) from None
        if self._vocabulary is not None and max(found, default=0) >= self._vocabulary:
            raise TokenizerError(
                f"{spec.tokenizer} gives the id {max(found)}, the text encoder knows ids below {self._vocabulary}; "
                "rebuild the artifact"
            )
        if len(found) > spec.tokens:
            if not spec.truncate:
                raise UsageError(
                    f"the prompt has {len(found)} tokens, this artifact takes {spec.tokens}; shorten it"
                )
            found = [*found[: spec.tokens - 1], found[-1]]
        out = np.full((1, spec.tokens), spec.pad_id, np.int64)
        out[0, : len(found)] = found
        return out

    def _loaded(self) -> Any:
        if self._tokenizer is not None:
            return self._tokenizer
        try:
            import tokenizers
        except ImportError:
            raise TokenizerMissingError(
                "a prompt needs the library tokenizers, which is not installed; "
                "pip install 'seko-runtime[text]', or give text embeddings in place of a sentence"
            ) from None
        document = bytes(self._document).decode("utf-8", errors="replace")
        try:
            loaded: Any = tokenizers.Tokenizer.from_str(document)
        except BaseException as error:
            _raise_foreign(error)
            raise TokenizerError(
                f"{self._spec.tokenizer} is no file of tokenizers {tokenizers.__version__}: {str(error)[:120]}; "
                "update the library, or rebuild the artifact"
            ) from None
        loaded.no_truncation()  # the manifest says how to cut and pad, whatever the file says
        loaded.no_padding()
        self._tokenizer = loaded
        return loaded


def _raise_foreign(error: BaseException) -> None:
    """Raise again what is not the tokenizer library's: it raises no class below Exception, and panics outside of it."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def clean_prompt(prompt: str) -> str:
    """Return the prompt as the models were trained on it: HTML unescaped twice, white space collapsed, stripped.

    No error quotes a prompt: it is its author's alone, and errors end in logs.

    Raises
    ------
    UsageError
        If it is no text, too long, or holds a lone surrogate.
    """
    if not isinstance(prompt, str):
        raise UsageError(f"a prompt is a text, got {type(prompt).__name__}")
    if len(prompt) > MAX_PROMPT_LETTERS:
        raise UsageError(
            f"the prompt has {len(prompt)} letters, at most {MAX_PROMPT_LETTERS} are taken; shorten it"
        )
    cleaned = re.sub(r"\s+", " ", html.unescape(html.unescape(prompt))).strip()
    try:
        cleaned.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"letter {error.start + 1} of the cleaned prompt is a lone surrogate, which no text holds"
        ) from None
    return cleaned


def prompt_key(cleaned: str, digest: str) -> str:
    """Return the SHA-256 that names a cleaned prompt with the artifact that encodes it."""
    return hashlib.sha256(f"{digest}\n{cleaned}".encode()).hexdigest()
