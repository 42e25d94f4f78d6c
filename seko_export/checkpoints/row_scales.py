"""Matrices that a file holds in fp8: ``X.weight`` [out, in] e4m3 and ``X.weight_scale`` [out, 1] float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from seko_export.checkpoints.sources import OpenedFiles, TensorSource

_CODES = ("F8_E4M3", "float8_e4m3fn")  # as safetensors and torch spell the dtype
_SUFFIX = "_scale"  # behind the name of what is scaled


def with_row_scales(opened: OpenedFiles) -> OpenedFiles:
    """Return the tensors with each such pair as one matrix, whose numbers are the codes times their row's scale.

    What is no such pair stays as it is: its dtype or its key is refused later. So are scales without a matrix.
    """
    sources = {source.file_key: source for source in opened.sources}
    pairs = {key: sources[key + _SUFFIX] for key, source in sources.items() if _is_pair(source, sources)}
    scales = {source.file_key for source in pairs.values()}

    def unpaired() -> Iterator[TensorSource]:
        for source in opened.sources:
            if source.file_key in pairs:
                read = partial(_scaled, source, pairs[source.file_key])
                yield replace(source, dtype_name="e4m3 with scales", dtype=torch.float32, read=read)
            elif source.file_key not in scales:
                yield source

    return replace(opened, sources=tuple(unpaired()))


def _is_pair(codes: TensorSource, sources: dict[str, TensorSource]) -> bool:
    scale = sources.get(codes.file_key + _SUFFIX)
    return (
        scale is not None
        and codes.dtype_name in _CODES
        and len(codes.shape) == 2
        and scale.dtype is torch.float32
        and scale.shape == (codes.shape[0], 1)
    )


def _scaled(codes: TensorSource, scale: TensorSource) -> torch.Tensor:
    return codes.read().float() * scale.read()
