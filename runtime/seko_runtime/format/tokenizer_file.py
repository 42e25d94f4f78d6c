"""The tokenizer's JSON file, for the library `tokenizers`, which is imported when the first text is encoded.

No error message quotes a text, because texts are private and error messages end up in logs.
"""

from __future__ import annotations

from typing import Any

from seko_runtime.errors import ArtifactError, LibraryMissingError


def open_tokenizer(document: bytes | memoryview, name: str) -> Any:
    """Return the tokenizer of the library `tokenizers` for a JSON file. The tokenizer's own cutting and padding are
    switched off.

    Parameters
    ----------
    document : bytes or memoryview
        Content of the tokenizer's file.
    name : str
        Name of the tokenizer's file, for error messages.

    Raises
    ------
    LibraryMissingError
        If `tokenizers` is not installed.
    ArtifactError
        If the file is not a valid tokenizer.
    """
    tokenizers = tokenizers_library()
    text = bytes(document).decode("utf-8", errors="replace")
    try:
        loaded: Any = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        _raise_foreign(error)
        raise ArtifactError(
            f"{name} is no file of tokenizers {tokenizers.__version__}: {str(error)[:120]}; "
            "update the library, or rebuild the artifact"
        ) from None
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def tokenizers_library() -> Any:
    """Return the library `tokenizers`; LibraryMissingError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise LibraryMissingError(
            "a sentence needs the library tokenizers, which is not installed; "
            "pip install tokenizers, or give text embeddings in place of a sentence"
        ) from None
    return tokenizers


def cut_text(tokenizer: Any, text: str, name: str, *, marks: bool = True) -> Any:
    """Return the encoding of a text by the library `tokenizers`, with or without the tokenizer's own marks for begin
    and end.

    Raises
    ------
    ArtifactError
        If the tokenizer fails on the text.
    """
    try:
        return tokenizer.encode(text) if marks else tokenizer.encode(text, add_special_tokens=False)
    except BaseException as error:  # the library's message is dropped, because it may quote the text
        _raise_foreign(error)
        raise ArtifactError(
            f"{name} cannot cut a text into ids ({type(error).__name__}); rebuild the artifact"
        ) from None


def _raise_foreign(error: BaseException) -> None:
    """Raise exceptions again that do not come from the tokenizer library, whose own exceptions have the class Exception
    or are panics.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
