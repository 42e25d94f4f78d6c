"""Records of stored tensors that are not read yet, shared by all readers. Opens no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.errors import CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Companion:
    """A file in a checkpoint's folder that holds further weights of the same model, such as an adapter.

    Parameters
    ----------
    names : tuple of str
        Its possible file names; the first that is there is read. None of them is ever taken for the checkpoint itself.
    parts : tuple of str
        Its keys are those whose name (the exporter's) contains one of these.
    pt_part : str or None
        Entry of a `.pt` that may hold the weights; without that entry the `.pt` holds them directly.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...]
    pt_part: str | None = None


@dataclass(frozen=True)
class LoraFile:
    """A LoRA to merge into a model: its file or PEFT folder, and the weight that multiplies it.

    Raises
    ------
    CheckpointError
        If the weight is negative or not finite.
    """

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise CheckpointError(f"--lora {self.path}:{self.weight}: expected a finite weight of at least 0")

    @classmethod
    def parse(cls, text: str) -> LoraFile:
        """Read ``FILE`` or ``FILE:WEIGHT``; a colon without a number behind it belongs to the file's name."""
        name, colon, number = text.rpartition(":")
        if colon and name and not Path(text).exists():
            try:
                return cls(Path(name), float(number))
            except ValueError:
                pass
        return cls(Path(text))


@dataclass(frozen=True)
class MergedLora:
    """A LoRA that is merged into weights: its name, the weight that multiplied it, and its SHA-256."""

    name: str
    weight: float
    sha256: str


@dataclass(frozen=True)
class Layout:
    """File layout of the weights of one kind of model.

    Parameters
    ----------
    formats : str
        The supported formats in words, for messages.
    subfolders : tuple of str
        Subfolders that may hold this model, as that of a diffusers pipeline; the first that is there is used.
    pt_part : str or None
        Entry of a `.pt` that holds the weights. None: the `.pt` holds them directly.
    pt_parts : mapping of str to str
        Entries that such a `.pt` may have, and the option that selects each.
    companions : tuple of Companion
        Further files with weights of the same model.
    row_scales : bool
        Whether matrices may be in fp8 with a scale for each row; see `row_scales`.
    optional_part : str or None
        Entry of a `.pt` that holds the weights if the file has it; otherwise the `.pt` holds them directly.
    """

    formats: str
    subfolders: tuple[str, ...]
    pt_part: str | None
    pt_parts: Mapping[str, str] = field(default_factory=dict)
    companions: tuple[Companion, ...] = ()
    row_scales: bool = False
    optional_part: str | None = None


@dataclass(frozen=True)
class TensorSource:
    """One stored tensor, not read yet.

    Parameters
    ----------
    key : str
        The key, without prefixes that come from training wrappers.
    file_key : str
        The key as the file spells it.
    shape : tuple[int, ...]
        Stored shape.
    dtype_name : str
        Stored dtype, as the file spells it.
    dtype : torch.dtype or None
        Stored dtype as a torch dtype; None if the loader does not support it.
    read : Callable[[], torch.Tensor]
        Returns the tensor on the CPU, mapped from the file.
    """

    key: str
    file_key: str
    shape: tuple[int, ...]
    dtype_name: str
    dtype: torch.dtype | None
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class OpenedFiles:
    """The content of a path: container, selected part, size, tensors."""

    container: str  # "pt" or "safetensors"
    part: str  # "generator", "generator_ema", or "all" where the container has no parts
    file_bytes: int
    sources: tuple[TensorSource, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a safetensors header


def shown(key: str) -> str:
    """Return a key from a foreign file in a form safe to print: no control characters, limited length."""
    printable = key if key.isprintable() else ascii(key)
    return printable if len(printable) <= 120 else f"{printable[:117]}..."
