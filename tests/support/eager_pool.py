"""A pool over the eager modules of a build: sessions and calls as in an artifact, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import dtype_name
from seko_export.families.registry import graph_of
from seko_export.video.recording import eager_engine
from seko_runtime.backends.aoti import torch_memory
from seko_runtime.format.manifest import Weight
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.pool import Pool
from tests.support.stacked import open_rows


def eager_pool(config: VideoBuild, weights: Mapping[str, Tensor], like: VideoManifest | None = None) -> Pool:
    """Return the pool of a build with one; ``weights`` are all that its programs use, the schedule's tables too.

    It has the files of weights of the artifact that it is ``like``.
    """
    table = tuple(
        Weight(name, tuple(weight.shape), dtype_name(weight.dtype)) for name, weight in weights.items()
    )
    engines = {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}
    manifest = describe(config, EAGER, table, {})
    if like is not None:
        manifest = replace(manifest, weights=like.weights, files=like.files)
    memory = torch_memory(torch.device(config.target.eager_device))
    memory.captures = False
    return Pool(open_rows(manifest, engines, weights, memory, digest="d"))
