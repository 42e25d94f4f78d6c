"""Records of stored tensors that are not read yet, shared by all readers. The records of stored tensors open no
file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.errors import UsageError

if TYPE_CHECKING:
    import torch


WEIGHT_DTYPES = ("float32", "bfloat16", "float16")  # of weights that a build reads, as torch names them
WRAPPERS = (
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
)  # wherever training wrapped a module


@dataclass(frozen=True)
class Companion:
    """A companion: a file in a checkpoint's folder with further weights of the same model, such as an adapter.

    Parameters
    ----------
    names : tuple of str
        Possible names of the companion file; the first existing file is read. A file with such a name is never taken
        for the checkpoint itself.
    parts : tuple of str
        Parts of names: the companion holds the keys whose exporter's name contains one of these parts.
    entries : tuple of str
        Entries of a `.pt` that may hold the weights; see `Layout`.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...]
    entries: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoraFile:
    """A LoRA to merge into a model: its file or PEFT folder, and the weight by which its change of the model is
    multiplied. A negative weight subtracts the change.

    Raises
    ------
    UsageError
        If the weight is not finite.
    """

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise UsageError(f"--lora {self.path}:{self.weight}: expected a finite weight")

    @classmethod
    def parse(cls, text: str) -> LoraFile:
        """Parse ``FILE`` or ``FILE:WEIGHT``; a colon without a number after it belongs to the name of the file."""
        if not text:
            raise UsageError("--lora '': expected FILE or FILE:WEIGHT")
        name, colon, number = text.rpartition(":")
        if colon and name and not Path(text).exists():
            try:
                return cls(Path(name), float(number))
            except ValueError:
                pass
        return cls(Path(text))


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading a model's checkpoint.

    Parameters
    ----------
    entry : str, optional
        The entry of a `.pt` file that holds the weights; files of other formats hold one set of weights.
    first_entry : str, optional
        The entry to read if the file has this entry and ``entry`` is None.
    companion : Path, optional
        A second file with weights of the same model, such as an audio adapter; see `readers.open_files`.
    dtype : torch.dtype, optional
        Dtype to which weights are converted: float32, bfloat16 or float16; None keeps the stored dtype.
    loras : sequence of LoraFile
        LoRAs that are merged into the weights.
    lora_partial : bool
        Whether keys of a LoRA that belong to no weight of the model are left out; otherwise they are refused.
    seed : int
        Seed of random weights, where there is no checkpoint.
    """

    entry: str | None = None
    first_entry: str | None = None
    companion: Path | None = None
    dtype: torch.dtype | None = None
    loras: Sequence[LoraFile] = ()
    lora_partial: bool = False
    seed: int = 0


AS_STORED = LoadOptions()


@dataclass(frozen=True)
class MergedLora:
    """A LoRA that is merged into weights: its name, the weight by which its change of the model was multiplied, and its
    SHA-256."""

    name: str
    weight: float
    sha256: str


@dataclass(frozen=True)
class Layout:
    """The file layout of the weights of one kind of model.

    Parameters
    ----------
    formats : str
        The supported formats in words, for error messages.
    subfolders : tuple of str
        Names of subfolders that may hold this model, as in a diffusers pipeline. The first existing subfolder is used.
    entries : tuple of str
        Names of the entries of a `.pt` file that may hold the weights. The first existing entry is read. A `.pt` file
        without any of these entries holds the weights directly.
    entry : str or None
        The entry that the user requested; a `.pt` without this entry is refused.
    companions : tuple of Companion
        Further files with weights of the same model.
    prefixes : tuple of str
        Prefixes that may precede every key in a file.
    entry_option : str
        The command-line option that names an entry; empty if there is no option for it.
    """

    formats: str
    subfolders: tuple[str, ...]
    entries: tuple[str, ...] = ()
    entry: str | None = None
    companions: tuple[Companion, ...] = ()
    prefixes: tuple[str, ...] = ()
    entry_option: str = ""

    def bare(self, key: str) -> str:
        """Return a key without prefixes, such as those of training wrappers."""
        for wrapper in WRAPPERS:
            key = key.replace(wrapper, "")
        while True:
            prefix = next((prefix for prefix in self.prefixes if key.startswith(prefix)), None)
            if prefix is None:
                return key
            key = key.removeprefix(prefix)


@dataclass(frozen=True)
class TensorSource:
    """One stored tensor, whose numbers are not read yet.

    Parameters
    ----------
    key : str
        Key of the tensor, without prefixes that come from training wrappers.
    file_key : str
        The key as the file spells it.
    shape : tuple[int, ...]
        Shape of the tensor in the file.
    dtype_name : str
        Dtype of the tensor in the file, as the file spells it.
    dtype : str or None
        Torch's name of the dtype that ``read`` returns, such as ``bfloat16``; None if the loader does not support the
        dtype in the file.
    read : Callable[[], torch.Tensor]
        Function that returns the tensor on the CPU, mapped from the file.
    copy : callable or None
        Function that returns a copy of the tensor, read without the mapping; None if the file format does not state the
        tensor's offset.
    row_codes : callable or None
        For a matrix that is stored in e4m3: function that returns the matrix's codes [out, in] and a float32 scale for
        each row [out, 1].
    quantised : bool
        Whether the file stores codes and scales that ``read`` expands.
    """

    key: str
    file_key: str
    shape: tuple[int, ...]
    dtype_name: str
    dtype: str | None
    read: Callable[[], torch.Tensor]
    copy: Callable[[], torch.Tensor] | None = None
    row_codes: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    quantised: bool = False


@dataclass(frozen=True)
class OpenedFiles:
    """The content of a checkpoint path: format, selected part, size, tensors."""

    container: str  # "pt", "safetensors" or "gguf"
    part: str  # the entry of a .pt that was read, or "all" where the container has none
    file_bytes: int
    sources: tuple[TensorSource, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a safetensors header
    other_parts: tuple[str, ...] = ()  # entries of the .pt that could be read instead
    files: tuple[Path, ...] = ()  # every file that is read: an index, shards, companions


def shown(key: str) -> str:
    """Return a key from a foreign file in a form safe to print: no control characters, limited length."""
    printable = key if key.isprintable() else ascii(key)
    return printable if len(printable) <= 120 else f"{printable[:117]}..."
