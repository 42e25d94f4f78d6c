"""Expansion of matrices that a file stores in 8 bits with separate scales. Codes and scales of a matrix become one
tensor.

- LightX2V stores a matrix as ``X.weight`` in e4m3 or int8. The scales ``X.weight_scale`` of LightX2V are [out, 1] in
  float32, bfloat16 or float16.
- Older files of ComfyUI store a matrix as ``X.weight`` in e4m3. The scale ``X.scale_weight`` of these files is one
  number, and the file is marked with ``scaled_fp8``.
- Newer files of ComfyUI store a matrix as ``X.weight`` in e4m3, e5m2 or int8, with a scale ``X.weight_scale``. The
  tensor ``X.comfy_quant`` or the header names the format.
- A plain cast stores a matrix as ``X.weight`` in e4m3 or e5m2. A plain cast has no scale, so its scale counts as 1. A
  file that lost its scales has the same keys; it is told by its codes, which reach the largest numbers of their type
  in every matrix.

Formats whose plain expansion would give wrong numbers are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from seko_export.checkpoints.json_files import parse_json
from seko_export.checkpoints.sources import OpenedFiles, TensorSource, shown
from seko_export.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# How safetensors and torch spell the dtypes of codes.
_CODES = {
    **dict.fromkeys(("F8_E4M3", "float8_e4m3fn"), "e4m3"),
    **dict.fromkeys(("F8_E5M2", "float8_e5m2"), "e5m2"),
    **dict.fromkeys(("I8", "int8"), "int8"),
}
_PACKED = ("U8", "uint8")
_WEIGHT, _FORMAT, _LAYERS, _HEADER = ".weight", ".comfy_quant", "layers", "_quantization_metadata"
_SCALES = (".weight_scale", ".scale_weight")
_UNUSED = (".input_scale", ".scale_input")  # scales of activations: they are measured where they are computed
_MARKER = "scaled_fp8"
_MAX_FORMAT_BYTES = 4096
# The largest numbers of each type begin here. Scaled codes reach them in every matrix; weights are a thousand times
# smaller, but for single ones, such as a text encoder's embeddings.
_TOP_BINADE = {"e4m3": 256.0, "e5m2": 32768.0}
_SAMPLED_MATRICES = 5
# Formats of ComfyUI that are expanded, with the codes that they have. Int8 may be rotated, which its options say.
_READ = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8_tensorwise": "int8"}
_ROTATED = "convrot"
_NVFP4_LIGHTX2V, _ALPHA = "NVFP4 of LightX2V", ".alpha"
# Keys behind a matrix's name that only formats of other bits have.
_FOREIGN = {
    ".weight_scale_2": "NVFP4 of ComfyUI",
    ".weight_global_scale": _NVFP4_LIGHTX2V,
    ".input_global_scale": _NVFP4_LIGHTX2V,
    ".qweight": "int4 (AWQ, GPTQ or Marlin)",
    ".qzeros": "int4 (AWQ or GPTQ)",
    ".wscales": "Nunchaku",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".weight._data": "quanto",
    ".weight._scale": "quanto",
    "._extra_state": "TransformerEngine",
}


def with_quantised(opened: OpenedFiles) -> OpenedFiles:
    """Return the tensors with each quantised matrix as one tensor: its codes times their scales, in float32.

    Other tensors are returned unchanged; unsupported dtypes, unknown keys and scales without a matrix are refused
    later.

    Raises
    ------
    CheckpointError
        If a matrix has an unsupported format, or its scale has a wrong shape; the message names matrix and format or
        shape.
    """
    sources = {source.file_key: source for source in opened.sources}
    _refuse_foreign(sources)
    formats = _stated_formats(opened, sources)
    used = {key for key in sources if key.endswith((_FORMAT, *_UNUSED, _MARKER))}
    expanded: dict[str, TensorSource] = {}
    bare: list[str] = []
    for key, source in sources.items():
        base = key.removesuffix(_WEIGHT)
        codes = _CODES.get(source.dtype_name)
        scale = next((sources[base + suffix] for suffix in _SCALES if base + suffix in sources), None)
        if base in formats and base != key:
            codes = _codes_of(base, formats[base], codes)
        if scale is not None and base != key:
            if source.dtype_name in _PACKED:
                raise CheckpointError(
                    f"{shown(key)} holds packed codes of less than 8 bits, which are not read; {_ADVICE}"
                )
            if codes is not None:
                _check_scale(source, scale)
                used.add(scale.file_key)
                expanded[key] = _expanded(source, scale, codes)
        elif codes in ("e4m3", "e5m2") and key not in used:
            bare.append(key)
            expanded[key] = _expanded(source, None, codes)
    if bare and len(bare) < len(expanded):
        raise CheckpointError(
            f"{shown(bare[0])} is in 8 bits and has no scale, where other matrices of the file have one; fetch it again"
        )
    stated = [key for key in sources if key.endswith((_MARKER, *_UNUSED))] + [
        f"{base}{_FORMAT}" for base in formats
    ]
    if bare and (stated or _lost_scales([sources[key] for key in bare])):
        sign = (
            f"{shown(stated[0])} says"
            if stated
            else "its codes show, as they reach the largest of their type,"
        )
        raise CheckpointError(
            f"{shown(bare[0])} is in 8 bits and has no scale, and {sign} that it had one: the scales of all matrices "
            "are missing; fetch the file again"
        )

    def expanded_sources() -> Iterator[TensorSource]:
        for source in opened.sources:
            key = source.file_key
            if sources[key] is not source:  # a key of two files: told later
                yield source
            elif key in expanded:
                yield expanded[key]
            elif key not in used or not expanded:
                yield source

    return replace(opened, sources=tuple(expanded_sources()))


def _lost_scales(sources: Sequence[TensorSource]) -> bool:
    """Return whether codes without scales had some: the smallest matrices reach the largest numbers of their type."""
    matrices = sorted(
        (source for source in sources if len(source.shape) == 2), key=lambda of: math.prod(of.shape)
    )
    tops = [
        source.read().float().abs().amax().item() >= _TOP_BINADE[_CODES[source.dtype_name]]
        for source in matrices[:_SAMPLED_MATRICES]
        if math.prod(source.shape)
    ]
    return bool(tops) and all(tops)


_ADVICE = "take the bfloat16 checkpoint, or one in e4m3 or int8 with scales of rows or tensors"


def foreign_format(key: str) -> str | None:
    """Return a sentence on the unsupported format of quantised weights that a key reveals; None for other keys."""
    foreign = next((name for suffix, name in _FOREIGN.items() if key.endswith(suffix)), None)
    return None if foreign is None else f"{shown(key)} is of {foreign}, which is not read; {_ADVICE}"


def _refuse_foreign(sources: Mapping[str, TensorSource]) -> None:
    """Refuse a file with a key that only a format of other bits has, whatever other keys the file has."""
    for key in sources:
        sentence = foreign_format(key)
        if sentence is not None:
            raise CheckpointError(sentence)
        # A LoRA has a key `.alpha`, too, but no packed matrix beside it.
        matrix = sources.get(key.removesuffix(_ALPHA) + _WEIGHT) if key.endswith(_ALPHA) else None
        if matrix is not None and matrix.dtype_name in _PACKED:
            raise CheckpointError(f"{shown(key)} is of {_NVFP4_LIGHTX2V}, which is not read; {_ADVICE}")


def _stated_formats(
    opened: OpenedFiles, sources: Mapping[str, TensorSource]
) -> dict[str, Mapping[str, object]]:
    """Return the format of each matrix that ComfyUI's tensors or the file's header state."""
    stated: dict[str, object] = {}
    if _HEADER in opened.metadata:
        table = _json(_HEADER, opened.metadata[_HEADER].encode())
        layers = table.get(_LAYERS)
        if not isinstance(layers, dict):
            raise CheckpointError(f"{_HEADER} of the header has no {_LAYERS!r}; fetch the file again")
        stated |= {_base_in_file(base, opened): about for base, about in layers.items()}
    for key, source in sources.items():
        if key.endswith(_FORMAT):
            if source.dtype_name not in _PACKED or len(source.shape) != 1:
                raise CheckpointError(
                    f"{shown(key)} is {source.dtype_name} {[*source.shape]}, expected bytes of JSON"
                )
            if source.shape[0] > _MAX_FORMAT_BYTES:
                raise CheckpointError(
                    f"{shown(key)} has {source.shape[0]} bytes, at most {_MAX_FORMAT_BYTES} are read"
                )
            base, by_key = key.removesuffix(_FORMAT), _json(key, source.read().numpy().tobytes())
            by_header = stated.get(base, by_key)
            if isinstance(by_header, dict) and by_header.get("format") != by_key.get("format"):
                raise CheckpointError(
                    f"{shown(base)} is in the format {shown(repr(by_key.get('format')))} by {shown(key)}, and "
                    f"{shown(repr(by_header.get('format')))} by {_HEADER} of the header; fetch the file again"
                )
            stated[base] = by_key
    for base, about in stated.items():
        if not isinstance(about, dict):
            raise CheckpointError(f"the format of {shown(base)} is {shown(repr(about))}, expected an object")
    return stated  # type: ignore[return-value]


def _base_in_file(base: str, opened: OpenedFiles) -> str:
    """Return a matrix's name as the file's keys spell it; a header may leave out the prefix of all keys."""
    names = {f"{base}{_WEIGHT}", f"{base}{_FORMAT}"}
    spelled = [source.file_key for source in opened.sources if {source.file_key, source.key} & names]
    if not spelled:
        raise CheckpointError(
            f"{_HEADER} of the header names {shown(base)}, which is not in the file; fetch the file again"
        )
    return spelled[0].removesuffix(_WEIGHT).removesuffix(_FORMAT)


def _json(key: str, content: bytes) -> dict[str, object]:
    table: object
    try:
        table = parse_json(content)
    except ValueError as fault:
        raise CheckpointError(
            f"{shown(key)} is no JSON ({shown(str(fault))}); fetch the file again"
        ) from fault
    if not isinstance(table, dict):
        raise CheckpointError(f"{shown(key)} holds a JSON {type(table).__name__}, expected an object")
    return table


def _codes_of(base: str, stated: Mapping[str, object], stored: str | None) -> str:
    """Return the codes of a matrix whose format is stated; refuse an unsupported format."""
    name = stated.get("format")
    if stated.get(_ROTATED):
        raise CheckpointError(
            f"{shown(base)} is in int8 of rotated weights ({_ROTATED}), which is not read; {_ADVICE}"
        )
    codes = _READ.get(name) if isinstance(name, str) else None
    if codes is None:
        raise CheckpointError(
            f"{shown(base)} is in the format {shown(repr(name))}, which is not read; {_ADVICE}"
        )
    if codes != stored:
        raise CheckpointError(
            f"{shown(base)} is said to be in {codes} and stored as {stored or 'another type'}; fetch the file again"
        )
    return codes


def _check_scale(codes: TensorSource, scale: TensorSource) -> None:
    """Refuse the scale of a matrix that is neither one number nor one number for each row."""
    scalar = all(size == 1 for size in scale.shape)
    rows = len(codes.shape) >= 1 and scale.shape in ((codes.shape[0],), (codes.shape[0], 1))
    if scale.dtype is None:
        raise CheckpointError(
            f"{shown(scale.file_key)} is {scale.dtype_name}, as in MXFP8 or NVFP4, which are not read; {_ADVICE}"
        )
    if not (scalar or rows):
        raise CheckpointError(
            f"{shown(scale.file_key)} is {[*scale.shape]} beside {shown(codes.file_key)} of {[*codes.shape]}: expected "
            f"one number, or one a row; scales of blocks are not read; {_ADVICE}"
        )


def _expanded(source: TensorSource, scale: TensorSource | None, codes: str) -> TensorSource:
    name = f"{codes} without scales" if scale is None else f"{codes} with scales"
    row_codes: Callable[[], tuple[Tensor, Tensor]] | None = None
    if codes == "e4m3" and len(source.shape) == 2:
        row_codes = partial(_row_codes, source, scale)
    return replace(
        source,
        dtype_name=name,
        dtype="float32",
        read=partial(_numbers, source, scale),
        copy=None,
        row_codes=row_codes,
        quantised=True,
    )


def _numbers(source: TensorSource, scale: TensorSource | None) -> Tensor:
    numbers = source.read().float()
    if scale is None:
        return numbers
    factor = (
        scale.read().float().reshape(-1, *(1 for _ in numbers.shape[1:]))
    )  # of the matrix, or of each row
    name = shown(scale.file_key)
    if bool((factor < 0).any()):
        raise CheckpointError(
            f"{name} holds negative numbers, expected the sizes of codes; fetch the file again"
        )
    if bool((factor == 0).any()) and bool(((factor == 0) & (numbers != 0)).any()):
        raise CheckpointError(
            f"{name} is 0 for codes of {shown(source.file_key)} that are not; fetch the file again"
        )
    return numbers.mul_(factor)


def _row_codes(source: TensorSource, scale: TensorSource | None) -> tuple[Tensor, Tensor]:
    """Return the e4m3 codes [out, in] of a matrix, and a float32 scale for each row [out, 1]."""
    import torch

    factor = torch.ones(1) if scale is None else scale.read().float().reshape(-1)
    return source.read(), factor.view(-1, 1).expand(source.shape[0], 1).contiguous()
