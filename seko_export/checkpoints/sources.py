"""Stored tensors that are not read yet, and the words in which any reader speaks of them; opens no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Layout:
    """Where the files of one kind of model keep its weights.

    Parameters
    ----------
    formats : str
        The formats that are read, in words, for messages.
    subfolder : str
        Where a diffusers pipeline keeps this model.
    pt_part : str or None
        Entry of a `.pt` that holds the weights; None: the `.pt` is the weights.
    pt_parts : mapping of str to str
        Entries that such a `.pt` may have, and how each is asked for.
    """

    formats: str
    subfolder: str
    pt_part: str | None
    pt_parts: Mapping[str, str] = field(default_factory=dict)


VAE_LAYOUT = Layout(
    "a Wan VAE's .pth, safetensors under the same names, or diffusers safetensors (a file, or a folder)",
    "vae",
    None,
)
TEXT_LAYOUT = Layout(
    "Wan's models_t5_umt5-xxl-enc-bf16.pth, or transformers safetensors (a file, or a folder)",
    "text_encoder",
    None,
)


@dataclass(frozen=True)
class TensorSource:
    """One stored tensor, not read yet.

    Parameters
    ----------
    key : str
        The key, free of wrappers that only say how the trainer held the model.
    file_key : str
        The key as the file spells it.
    shape : tuple[int, ...]
        Stored shape.
    dtype_name : str
        Stored dtype, in the file's own words.
    dtype : torch.dtype or None
        The same for torch; None where the loader does not read that kind.
    read : Callable[[], torch.Tensor]
        Gives the tensor on the CPU, mapped from the file.
    """

    key: str
    file_key: str
    shape: tuple[int, ...]
    dtype_name: str
    dtype: torch.dtype | None
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class OpenedFiles:
    """What lies at a path: the container, the part chosen in it, its size, its tensors."""

    container: str  # "pt" or "safetensors"
    part: str  # "generator", "generator_ema", or "all" where the container has no parts
    file_bytes: int
    sources: tuple[TensorSource, ...]


def shown(key: str) -> str:
    """Return a key from a foreign file as it may be printed: no control characters, not endless."""
    printable = key if key.isprintable() else ascii(key)
    return printable if len(printable) <= 120 else f"{printable[:117]}..."
