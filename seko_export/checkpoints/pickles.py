"""Reader of the tensors of a `.pt` file with torch's restricted unpickler, which calls no function that the pickle
names except those that make tensors. For a refused pickle the reader reports the modules that the pickle would
import."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from seko_export.checkpoints.errors import DamagedCheckpointError, MissingEntryError, NotACheckpointError
from seko_export.checkpoints.model_parts import looks_like, part_of
from seko_export.checkpoints.quantised import foreign_format
from seko_export.checkpoints.sources import WEIGHT_DTYPES, Layout, OpenedFiles, TensorSource, shown
from seko_export.errors import CheckpointError, MachineError

SCANNED_BYTES = 10_000_000  # of a pickle, for the message that refuses it
MAX_PICKLE_BYTES = 8 << 20  # names and shapes of tensors; those of a model of 14B take 0.5 MB
_ENCRYPTED = 1  # flag of a zip's entry
# What TransformerEngine pickles beside its weights: the state of its quantisers, as bytes or as classes of its own.
_EXTRA_STATE = "._extra_state"
_TRANSFORMER_ENGINE = ("_codecs.encode", "_io.BytesIO", "transformer_engine.")
_HARMLESS_GLOBALS = frozenset(
    {"collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"}
)


def open_pt(path: Path, layout: Layout) -> OpenedFiles:
    """Map the zip file that `torch.save` wrote, and list the tensors of the entry that the layout names.

    Parameters
    ----------
    path : Path
        The `.pt` file.
    layout : Layout
        File layout of the weights, which names the entries that may hold them.

    Returns
    -------
    OpenedFiles
        The tensors in the file; their keys are without ``model.`` and prefixes of training wrappers.

    Raises
    ------
    CheckpointError, DamagedCheckpointError, NotACheckpointError, MissingEntryError
        If the file cannot be read, is truncated, is not a `.pt`, or lacks the entry; see the docstrings of these
        classes.
    """
    content = _load_pt(path, layout)
    table = content if isinstance(content, dict) else {}
    entries = [name for name in layout.entries if name in table and not isinstance(table[name], torch.Tensor)]
    # Trainers that keep no average write an empty one.
    entries = [name for name in entries if table[name] is not None and table[name] != {}] or entries
    entry = layout.entry or next(iter(entries), None)
    if layout.entry is not None and layout.entry not in table:
        has = f"it has {' and '.join(entries)}" if entries else "it has none"
        raise MissingEntryError(
            f"--entry {layout.entry}: {path} has no such entry; {has}, so leave the option out or correct it"
        )
    if entry is None and layout.entries and not _is_state(table):
        tops = ", ".join(repr(key)[:80] for key in list(table)[:20])
        keys = _keys_in(table)
        advice = looks_like(keys)
        if layout.entry_option and part_of(keys) is None:
            advice = f": name the entry that holds the weights with {layout.entry_option}"
        raise MissingEntryError(
            f"{path} holds {len(table)} keys: {tops}; none is one of {', '.join(layout.entries)}{advice}"
        )
    state = content if entry is None else table[entry]
    sources = _pt_sources(path, layout, "the top" if entry is None else repr(entry), state)
    others = tuple(name for name in entries if table[name] is not state)
    return OpenedFiles("pt", entry or "all", path.stat().st_size, sources, other_parts=others)


def _keys_in(table: dict[Any, object]) -> list[str]:
    """Return the keys of a dict, and those of the dicts in it."""
    inner = (key for value in table.values() if isinstance(value, dict) for key in value)
    return [key for key in (*table, *inner) if isinstance(key, str)]


def _advice_on(state: dict[str, object], layout: Layout) -> str:
    """Return a clause, beginning with a semicolon, on a dict with entries that are no tensors. Empty without advice."""
    keys = _keys_in(state)
    if not layout.entry_option or part_of(keys) is not None:  # another part than the layout's
        return looks_like(keys)
    inner = next((key for key, value in state.items() if isinstance(value, dict) and value), None)
    if inner is None or not looks_like(keys):
        return ""
    return f"; the weights seem to lie deeper, in {shown(repr(inner))}: save that dict alone"


def _is_state(content: dict[object, object]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in content.values())


def _pt_sources(path: Path, layout: Layout, part: str, state: object) -> tuple[TensorSource, ...]:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise NotACheckpointError(
            f"{part} in {path} is no dict of named tensors: {type(state).__name__}; expected {layout.formats}"
        )
    foreign = next((sentence for key in _keys_in(state) if (sentence := foreign_format(key))), None)
    strangers = [
        key for key, value in state.items() if not isinstance(value, torch.Tensor) or value.is_nested
    ]  # a nested tensor has no shape
    if strangers and foreign is not None:
        raise NotACheckpointError(f"{path}: {foreign}")
    if strangers:
        raise NotACheckpointError(
            f"{part} in {path} holds {len(strangers)} entries that are no tensors: "
            f"{', '.join(map(shown, strangers[:20]))}; expected {layout.formats}{_advice_on(state, layout)}"
        )
    return tuple(_pt_source(layout, key, tensor) for key, tensor in state.items())


def _pt_source(layout: Layout, file_key: str, tensor: torch.Tensor) -> TensorSource:
    key = layout.bare(file_key).removeprefix("model.")  # where a trained module holds the model as `model`
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    kind = str(tensor.dtype).removeprefix("torch.")
    dtype = kind if plain and kind in WEIGHT_DTYPES else None
    kind = kind if plain else f"{kind}, {tensor.layout} on {tensor.device.type}"
    return TensorSource(key, file_key, tuple(tensor.shape), kind, dtype, lambda: tensor.detach().contiguous())


def _load_pt(path: Path, layout: Layout) -> object:
    pickled = _read_pickle_of_zip(path, layout)
    try:
        with warnings.catch_warnings():
            # torch warns of an unusual pickle protocol; whatever comes out is checked strictly anyway.
            warnings.simplefilter("ignore")
            with path.open("rb") as file:
                # By its descriptor: torch takes a name that ends in .safetensors for a file of that format.
                opened = f"/proc/self/fd/{file.fileno()}"
                return torch.load(opened, map_location="cpu", weights_only=True, mmap=True)
    except Exception as fault:
        if "unable to mmap" in str(fault):
            raise unmapped(path, fault) from fault
        # A damaged file makes the unpickler raise anything at all; all of it is the file's fault.
        globals_named = globals_of_pickle(pickled)
        of_engine = all(name.startswith(_TRANSFORMER_ENGINE) for name in globals_named)
        if globals_named and of_engine and _EXTRA_STATE.encode() in pickled:
            raise NotACheckpointError(f"{path}: {foreign_format(_EXTRA_STATE)}") from fault
        if isinstance(fault, pickle.UnpicklingError) and globals_named:
            raise unsafe_pickle(path, globals_named) from fault
        first = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise DamagedCheckpointError(f"{path} is a damaged .pt ({first[:200]}); fetch it again") from fault


def _read_pickle_of_zip(path: Path, layout: Layout) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if any(
                entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED for entry in entries
            ):
                # A mapped read takes the bytes as they lie: compressed ones would be read as weights.
                raise NotACheckpointError(
                    f"{path} is a compressed or encrypted zip; torch.save stores plainly: save it again"
                )
            pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1 or any(name.endswith("/constants.pkl") for name in names):
                raise NotACheckpointError(
                    f"{path} is a zip archive, but not one that torch.save wrote "
                    f"(entries: {', '.join(map(shown, names[:5]))}); expected {layout.formats}"
                )
            size = archive.getinfo(pickles[0]).file_size
            if size > MAX_PICKLE_BYTES:
                raise NotACheckpointError(
                    f"{path} holds a pickle of {size} bytes, at most {MAX_PICKLE_BYTES} are read; "
                    "expected tensors alone: let its author save the state dict only"
                )
            return archive.read(pickles[0])
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as fault:
        raise DamagedCheckpointError(
            f"{path} begins as a .pt and is cut short or damaged "
            f"({path.stat().st_size} bytes found; {fault}); fetch it again"
        ) from fault


def unmapped(path: Path, fault: Exception) -> MachineError:
    """Return the error for a file that the kernel does not map, because the kernel is set to promise no more memory
    than the machine has."""
    return MachineError(
        f"{path} cannot be mapped ({shown(str(fault))}): use a machine with more memory, or save the checkpoint in "
        "smaller shards"
    )


def unsafe_pickle(path: Path, globals_named: list[str]) -> CheckpointError:
    """Return the error for a refused pickle; the message names the pickle's forbidden imports."""
    return CheckpointError(
        f"{path} is a pickle that asks for {', '.join(globals_named[:20])}: loading it would run code, "
        "so it was not loaded; expected tensors alone: get safetensors, or let its author save the state dict only"
    )


def globals_of_pickle(pickled: bytes) -> list[str]:
    """List the names that a series of pickles would import, except those that tensors need. The
    pickles are parsed, not executed."""
    names: set[str] = set()
    strings: list[str] = []
    stream = io.BytesIO(pickled[:SCANNED_BYTES])
    # Bytes that are no pickle, or no more, stop genops with errors of many kinds; what was seen counts.
    with contextlib.suppress(Exception):
        while stream.tell() < len(pickled):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    names.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
                    names.add(".".join(strings[-2:]))  # a memo may stand between; good enough for a message
                elif isinstance(argument, str):
                    strings.append(argument)
    harmless = {name for name in names if name.startswith("torch.") and name.endswith("Storage")}
    return sorted(shown(name) for name in names - harmless - _HARMLESS_GLOBALS)
