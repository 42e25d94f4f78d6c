"""Merging of LoRAs into a checkpoint in float32; each weight is merged when it is read.

A low-rank pair is merged as ``W' = W + weight * scale * (up @ down)`` with ``scale = alpha / r`` (rsLoRA ``alpha /
sqrt(r)``; 1 if no file states an alpha). A DoRA is merged as ``W' = m / ||V|| * V`` with ``V = W + weight * scale
* (up @ down)`` and the norm of each row. Full differences of a LoRA are multiplied by the LoRA's weight and added;
  ``set_weight`` replaces the model's weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from seko_export.checkpoints.errors import WeightKeysError
from seko_export.checkpoints.key_table import KeyTable, Shapes
from seko_export.checkpoints.keycheck import SHOWN_KEYS
from seko_export.checkpoints.load import MERGED, Checkpoint, is_finite
from seko_export.checkpoints.lora_files import OpenedLora, Role, open_lora
from seko_export.checkpoints.sources import (
    WEIGHT_DTYPES,
    WRAPPERS,
    LoraFile,
    MergedLora,
    TensorSource,
    shown,
)
from seko_export.config.build import ModelIdentity
from seko_export.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Change: TypeAlias = "Callable[[Tensor], Tensor]"  # of a float32 tensor, which it may write to
_LARGEST = float.fromhex("0x1.fffffep127")  # float32 number

# What trainers and tools put in front of a module's name; several may stand there.
_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "generator.",
    "model.",
    "module.",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
)
# Modules of Wan 2.1's image branch, in Wan's and diffusers' words: a LoRA for image to video has them.
_IMAGE_BRANCH = ("k_img", "v_img", "img_emb", "add_k_proj", "add_v_proj", "norm_added_k", "image_embedder")
_LEAVES = {
    Role.UP_BIAS: ("bias",),
    Role.DIFF_BIAS: ("bias",),
    Role.DIFF_MODULATION: ("modulation", "scale_shift_table"),
}
_LOW_RANK = (Role.DOWN, Role.UP, Role.ALPHA, Role.MAGNITUDE)  # together they change one weight


def with_loras(
    checkpoint: Checkpoint,
    model: ModelIdentity,
    keys: KeyTable,
    files: Sequence[LoraFile],
    *,
    partial_match: bool = False,
) -> Checkpoint:
    """Return a checkpoint whose weights are merged with LoRAs when they are read. `with_loras` opens and checks the
    LoRA files, before any weight is read.

    Parameters
    ----------
    checkpoint : Checkpoint
        The base weights, into which the LoRAs are merged.
    model : ModelIdentity
        Dimensions of the checkpoint's model.
    keys : KeyTable
        Key table of the model's family; a LoRA may name modules in any naming of this table.
    files : sequence of LoraFile
        The LoRAs, which are merged in this order.
    partial_match : bool
        Whether keys that belong to no weight of the model are left out, with a note; otherwise they are refused.

    Raises
    ------
    CheckpointError
        If a file cannot be read, is of another model, or has wrong ranks; the message names ``--lora`` and the file.
    WeightKeysError
        If keys belong to no weight of the model; the message lists them.
    """
    if not files:
        return checkpoint
    shapes = keys.shapes(model)
    spellings = _spellings(keys, shapes)
    changes: dict[str, list[Change]] = {}
    adapters, notes = [], [*checkpoint.notes]
    for file in files:
        matched = _match(open_lora(file.path), file, spellings, shapes, partial_match=partial_match)
        for name, change in matched.changes:
            changes.setdefault(name, []).append(change)
        adapters.append(MergedLora(_name(file.path), file.weight, matched.sha256))
        notes += matched.notes
    merged = {
        name: replace(
            source,
            dtype_name=MERGED,
            dtype="float32",
            read=partial(_merged, source, tuple(changes[name])),
            copy=None,
            row_codes=None,
            quantised=False,
        )
        if name in changes
        else source
        for name, source in checkpoint.sources.items()
    }
    return replace(checkpoint, sources=merged, adapters=(*checkpoint.adapters, *adapters), notes=tuple(notes))


def fits(lora: OpenedLora, model: ModelIdentity, keys: KeyTable) -> bool:
    """Return whether a LoRA can be merged into a model: its keys belong to weights of the model, in their shapes."""
    shapes = keys.shapes(model)
    try:
        _match(lora, LoraFile(lora.path), _spellings(keys, shapes), shapes, partial_match=False)
    except CheckpointError:
        return False
    return True


def _name(path: Path) -> str:
    """Return the name of a LoRA's file for JSON files in UTF-8, into which not every name of a file fits."""
    name = path.name or path.resolve().name
    return name.encode("utf-8", "backslashreplace").decode()


def _merged(source: TensorSource, changes: tuple[Change, ...]) -> Tensor:
    import torch

    weight = (source.copy or source.read)().to(torch.float32, copy=source.copy is None)
    for change in changes:
        weight = change(weight)
    return weight


def _spellings(keys: KeyTable, shapes: Shapes) -> dict[str, str]:
    """Return the model's names by each way to spell them: every naming of the family, also with underscores for
    dots."""
    spelled: dict[str, str] = {}
    for naming in (*keys.namings, *keys.lora_namings):
        for name in shapes:
            try:
                theirs = naming.to_theirs(name)
            except KeyError:  # a naming of LoRAs need not name every weight
                continue
            spelled.setdefault(theirs, name)
            spelled.setdefault(theirs.replace(".", "_"), name)
    return spelled


def _parameter(module: str, role: Role, spellings: Mapping[str, str]) -> str | None:
    """Return the model's name of the parameter that a tensor of a LoRA's module changes; None if the model has no such
    parameter."""
    for wrapper in WRAPPERS:
        module = module.replace(wrapper, "")
    while True:
        for leaf in _LEAVES.get(role, ("weight",)):
            for spelled in (f"{module}.{leaf}", f"{module}_{leaf}", module):
                if spelled in spellings:
                    return spellings[spelled]
        prefix = next((prefix for prefix in _PREFIXES if module.startswith(prefix)), None)
        if prefix is None:
            return None
        module = module.removeprefix(prefix)


@dataclass(frozen=True)
class _Matched:
    """The parameters that a LoRA changes, and notes about the LoRA for the user."""

    sha256: str
    changes: list[tuple[str, Change]]
    notes: list[str]


def _match(
    lora: OpenedLora, file: LoraFile, spellings: Mapping[str, str], shapes: Shapes, *, partial_match: bool
) -> _Matched:
    changes: list[tuple[str, Change]] = []
    skipped: list[str] = []
    unmatched = [*lora.strange]
    ranks: set[int] = set()
    origins: set[str] = set()
    where = f"--lora {file.path}"
    changed_by: dict[tuple[str, bool], str] = {}  # weight and whether by a low-rank pair: the first module
    lacks_branch = not any(part in name for name in spellings for part in _IMAGE_BRANCH)
    for module, tensors in lora.modules.items():
        names = {role: _parameter(module, role, spellings) for role in tensors}
        lost = [tensors[role].file_key for role, name in names.items() if name is None]
        if lost:
            of_branch = any(part in module for part in _IMAGE_BRANCH)
            (skipped if lacks_branch and of_branch else unmatched).extend(lost)
        known = {role: name for role, name in names.items() if name is not None}
        for role, name in known.items():
            first = changed_by.setdefault((name, role in _LOW_RANK), module)
            if first != module:
                raise CheckpointError(
                    f"{where}: {shown(first)} and {shown(module)} both change {name}: it would change twice; keep one"
                )
        reader = _Module(where, module, {role: tensors[role] for role in known}, file.weight, lora)
        if Role.RESHAPE in known:
            raise CheckpointError(
                f"{where}: {shown(module)}.reshape_weight widens the model, and merging keeps its sizes; take the LoRA "
                "of this model"
            )
        if {*known} & {*_LOW_RANK, Role.UP_BIAS}:
            weight = next((known[role] for role in _LOW_RANK if role in known), "")
            changes.append((weight, reader.low_rank(shapes.get(weight, ()))))
            ranks.add(reader.rank)
            origins.add(reader.scale_origin)
        for role, name in known.items():
            if role not in _LOW_RANK:
                changes.append((name, reader.full(role, name, shapes[name])))
    if unmatched and not partial_match:
        rest = f", and {len(unmatched) - SHOWN_KEYS} more" if len(unmatched) > SHOWN_KEYS else ""
        raise WeightKeysError(
            f"{where}: {len(unmatched)} keys belong to no weight of the model: "
            f"{', '.join(map(shown, unmatched[:SHOWN_KEYS]))}{rest}; take the LoRA of this model, or give "
            "--lora-partial to leave them out",
            unknown=tuple(unmatched),
        )
    if not changes:
        raise CheckpointError(f"{where}: it changes no weight of the model; take the LoRA of this model")
    weights = len({name for name, _ in changes})
    rank = f", rank {_listed(ranks)}" if ranks else ""
    scales = f", scale by {_listed(origins)}" if origins else ""
    notes = [f"{where}: {weights} weights changed{rank}{scales}, weight {file.weight:g}"]
    for left, why in (
        (skipped, "of an image branch that this model lacks"),
        (unmatched, "of no weight of it"),
    ):
        if left:
            notes.append(f"{where}: {len(left)} keys left out, {why} ({shown(left[0])} first)")
    return _Matched(lora.sha256, changes, notes)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))


class _Module:
    """One module of a LoRA: checks its tensors by their shapes, and returns the changes of the module's parameters."""

    def __init__(
        self,
        where: str,
        module: str,
        tensors: Mapping[Role, TensorSource],
        weight: float,
        lora: OpenedLora,
    ) -> None:
        self._where, self._module, self._tensors = where, module, tensors
        self._weight, self._config = weight, lora.config
        self.rank, self.scale_origin = 0, ""
        for role, source in tensors.items():
            if role not in (Role.ALPHA, Role.RESHAPE) and source.dtype not in WEIGHT_DTYPES:
                self._refuse(f"{role} is {source.dtype_name}, expected float32, bfloat16 or float16")

    def low_rank(self, shape: tuple[int, ...]) -> Change:
        """Return the scaled low-rank product ``up @ down`` in the weight's shape."""
        down, up = self._tensors.get(Role.DOWN), self._tensors.get(Role.UP)
        if down is None or up is None:
            have = ", ".join(self._tensors)
            lacking = "matrices" if down is None and up is None else "up" if up is None else "down"
            self._refuse(f"it has {have} without {lacking}; the file is incomplete")
        if len(shape) < 2 or len(down.shape) < 2 or len(up.shape) < 2:
            self._refuse(f"up {[*up.shape]} and down {[*down.shape]} do not change a weight of {[*shape]}")
        self.rank = down.shape[0]
        if self.rank == up.shape[1] == 0:
            self._refuse(
                f"down {[*down.shape]} and up {[*up.shape]} have rank 0 and change nothing; take another file"
            )
        if up.shape[1] != self.rank or math.prod(up.shape[2:]) != 1:
            self._refuse(f"down {[*down.shape]} and up {[*up.shape]} have different ranks; take another file")
        if (up.shape[0], math.prod(down.shape[1:])) != (shape[0], math.prod(shape[1:])):
            self._refuse(
                f"its matrices are for a weight of {[up.shape[0], *down.shape[1:]]}, the model's has {[*shape]}: it is "
                "of another base model; take the LoRA of this one"
            )
        stated = self._config.rank_of(self._module)
        if stated is not None and stated != self.rank:
            self._refuse(f"its rank is {self.rank}, and {stated:g} by {self._config.origin}")
        scale = self._factor(self._scale())
        magnitude = self._tensors.get(Role.MAGNITUDE)
        if self._config.dora and magnitude is None:
            self._refuse(f"{self._config.origin} says DoRA, and it has no magnitude")
        if magnitude is not None and magnitude.shape not in (
            (shape[0],),
            (shape[0], *(1 for _ in shape[1:])),
        ):
            self._refuse(f"its magnitude is {[*magnitude.shape]}, expected one number a row, {[shape[0]]}")

        def change(weight: Tensor) -> Tensor:
            rows = weight.view(weight.shape[0], -1)
            rows.addmm_(self._read(up).flatten(1), self._read(down).flatten(1), alpha=scale)
            if magnitude is not None:
                rows *= self._read(magnitude).view(-1, 1) / rows.norm(dim=1, keepdim=True)
            return weight

        return change

    def full(self, role: Role, name: str, shape: tuple[int, ...]) -> Change:
        """Return the scaled difference that a LoRA adds to a parameter, in the parameter's shape."""
        source = self._tensors[role]
        if source.shape != shape:
            self._refuse(
                f"{role} is {[*source.shape]}, and {name} is {[*shape]}: it is of another base model; take the LoRA of "
                "this one"
            )
        if role is Role.SET:
            return lambda _: self._read(source).clone()
        factor = self._factor(self._scale() if role is Role.UP_BIAS else 1.0)
        return lambda weight: weight.add_(self._read(source), alpha=factor)

    def _factor(self, scale: float) -> float:
        """Return the LoRA's weight times a scale, which must be a float32 number."""
        factor = self._weight * scale
        if abs(factor) > _LARGEST:
            self._refuse(
                f"its weight {self._weight:g} times its scale {scale:g} is no float32 number; take a smaller weight"
            )
        return factor

    def _scale(self) -> float:
        """Return the LoRA's scale alpha / r, and note the source of alpha."""
        alpha, self.scale_origin = self._config.alpha_of(self._module), self._config.origin
        if Role.ALPHA in self._tensors:
            alpha, self.scale_origin = self._alpha(self._tensors[Role.ALPHA]), "its keys"
        if alpha is None:
            self.scale_origin = "no alpha: 1"
            return 1.0
        rank = self.rank or self._tensors[Role.DOWN].shape[0]
        return alpha / (math.sqrt(rank) if self._config.rank_stabilised else rank)

    def _alpha(self, source: TensorSource) -> float:
        if any(size != 1 for size in source.shape):
            self._refuse(f"alpha is {[*source.shape]}, expected one number")
        stored = source.read()
        import torch

        if stored.is_complex() or stored.dtype is torch.bool:
            self._refuse(f"alpha is {source.dtype_name}, expected a real number")
        alpha = float(stored.to(torch.float64).item())
        if not (math.isfinite(alpha) and alpha > 0):
            self._refuse(f"alpha is {alpha:g}, expected a finite number above 0")
        return alpha

    def _read(self, source: TensorSource) -> Tensor:
        tensor = source.read().float()
        if not is_finite(tensor):
            raise CheckpointError(
                f"{self._where}: {shown(source.file_key)} holds NaN or infinite numbers; take another file"
            )
        return tensor

    def _refuse(self, fault: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: {shown(self._module)}: {fault}")
