"""Text to token ids for speech: tokens of several Chinese characters are split into one token for each character."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import ArtifactError, UsageError
from seko_runtime.format.tokenizer_file import cut_text, open_tokenizer

MAX_LETTERS = 1 << 16
_WORD = "▁"  # begins a word in a Llama tokenizer's pieces
_CHINESE = ("\u4e00", "\u9fff")  # first and last


class SpeechTokenizer:
    """A Llama tokenizer that splits Chinese words into characters, as VoxCPM2 was trained.

    Parameters
    ----------
    document : bytes or memoryview
        The tokenizer's JSON file.
    name : str
        Name of the tokenizer's file, for error messages.
    vocabulary : int, optional
        Number of token ids that the model can look up; None: not checked.
    """

    def __init__(self, document: bytes | memoryview, name: str, vocabulary: int | None = None) -> None:
        self._document, self._name, self._vocabulary = document, name, vocabulary
        self._tokenizer: Any = None

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the token ids [n] of a text, without special tokens for begin and end.

        Raises
        ------
        LibraryMissingError
            If `tokenizers` is not installed.
        ArtifactError
            If the artifact's file is no valid tokenizer, or the tokenizer returns an id that the model does not know.
        UsageError
            If the text is not a string, or is too long.
        """
        if not isinstance(text, str) or len(text) > MAX_LETTERS:
            description = f"{len(text)} characters" if isinstance(text, str) else f"a {type(text).__name__}"
            raise UsageError(f"the text has {description}, expected a string of at most {MAX_LETTERS}")
        pieces = cut_text(self._opened(), text, self._name, marks=False).tokens
        ids = [self._id(part) for piece in pieces for part in self._split(piece)]
        if self._vocabulary is not None and max(ids, default=0) >= self._vocabulary:
            raise ArtifactError(
                f"{self._name} gives the id {max(ids)}, the model knows ids below {self._vocabulary}; rebuild the "
                "artifact"
            )
        return np.array(ids, np.int64)

    def _split(self, piece: str) -> list[str]:
        """Return the characters of a token that is a Chinese word of the vocabulary; otherwise the token alone."""
        word = piece.replace(_WORD, "")
        first, last = _CHINESE
        several = len(word) > 1 and all(first <= letter <= last for letter in word)
        return list(word) if several and self._tokenizer.token_to_id(word) is not None else [piece]

    def _id(self, piece: str) -> int:
        token_id: int | None = self._tokenizer.token_to_id(piece)
        if token_id is None:  # a character that only longer pieces have
            token_id = self._tokenizer.token_to_id(self._tokenizer.model.unk_token or "")
        if token_id is None:
            raise ArtifactError(
                f"{self._name} has no token for a character of the text, and no unknown token; rebuild the artifact"
            )
        return token_id

    def _opened(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._document, self._name)
        return self._tokenizer
