"""Pieces as ONNX, made once for all tests, and run by onnxruntime in the place of the eager pieces. No tests.

The pieces with an FP4 cache for `ROWS` rows are those of one artifact, which the command built: the translation of its
block takes a quarter of a minute.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto
from torch import Tensor

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.backends.onnx_form.functional import functional_piece
from seko_export.backends.onnx_form.translate import OPSET, piece_model
from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import Piece
from seko_export.families.layers.pieces import make_pieces
from tests.conftest import Built
from tests.support.new_thread import in_new_thread
from tests.support.shared import made_once
from tests.support.uncompiled import build_here
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, small_config

CHUNKS = 12
ROWS = 2  # of the artifact and of all forms that are compared with it
ODD = ModelConfig(
    "wan-144x3", layers=3, dim=144, heads=3, ffn_dim=800, text_dim=24, text_tokens=8, freq_dim=16
)
# The options of `config_of`.
LAYOUT = (
    *("--height", "32", "--width", "48", "--chunk-frames", "2", "--sink-frames", "1", "--ring-frames", "5"),
    *("--timesteps", "1000,500", "--shift", "5"),
)
folders: list[pytest.TempPathFactory] = []  # this process's own, put here before its first test


def onnx_artifact() -> Built:
    """The ONNX artifact of a model of no preset's sizes, read from its file, with an FP4 cache; built once a run and
    not to be changed."""

    def build(folder: Path) -> None:
        write_random_checkpoint(folder / "odd", ODD, format="wan-sharded", seed=0)
        options = ("--fp4-kv", "--backend", "onnx", "--batch", str(ROWS), *LAYOUT)
        built = build_here(folder / "artifact", str(folder / "odd"), *options)
        (folder / "done.json").write_text(json.dumps(vars(built.done)))

    folder = made_once(folders[0], "onnx-artifact", build)
    done = subprocess.CompletedProcess(**json.loads((folder / "done.json").read_text()))
    return Built(folder / "artifact", json.loads(done.stdout.splitlines()[-1]), done)


def config_of(scheme: str, batch: int) -> VideoBuild:
    """A small build of 6 tokens a frame whose cache of 6 frames wraps with the third chunk. Of `ROWS` rows it has the
    model of the artifact."""
    config = small_config(2, 1, 5, scheme=scheme, batch=batch, passes=2)
    stream = replace(config.workload.stream, height=32, width=48)
    return config.changed(stream=stream, **({"model": ODD} if batch == ROWS else {}))


@cache
def model_of(scheme: str, batch: int, name: str, opset: int = OPSET) -> ModelProto:
    """One piece of that build, made once a run; not to be changed."""
    if (scheme, batch, opset) == ("fp4", ROWS, OPSET):
        return onnx.load(onnx_artifact().folder / "engines" / f"{name}.onnx")

    def make(folder: Path) -> None:
        folder.mkdir()
        piece = make_pieces(config_of(scheme, batch))[name]
        onnx.save(in_new_thread(piece_model, piece, opset), folder / "model.onnx")

    return onnx.load(made_once(folders[0], f"onnx-{scheme}-{batch}-{name}-{opset}", make) / "model.onnx")


@cache
def shared_model(scheme: str, batch: int, name: str) -> ModelProto:
    """The same, made once for both schemes where they do not differ."""
    return model_of(scheme if name in ("block", "embed") else "fp4", batch, name)


def positions(config: VideoBuild) -> Iterator[tuple[int, list[int]]]:
    """Yield each chunk's number and the first frame of each row; row 1 begins anew four chunks behind row 0."""
    step = config.workload.stream.chunk_frames
    assert config.workload.stream.cache_frames < (CHUNKS - 4) * step
    for chunk in range(CHUNKS):
        yield chunk, [max(0, (chunk - 4 * row) * step) for row in range(config.workload.stream.batch)]


def run_model(model: ModelProto, *tensors: Tensor) -> list[Tensor]:
    """Run a model once."""
    return runner(model)(*tensors)


def eager_stream(scheme: str, batch: int) -> EagerStream:
    """The eager pieces of that build with random weights."""
    config = config_of(scheme, batch)
    return EagerStream(config, random_wan_weights(config.model), random_text(config.model, batch))


def onnx_stream(scheme: str, batch: int) -> EagerStream:
    """The same stream with every piece run by onnxruntime; caches that come out are put back."""
    stream = eager_stream(scheme, batch)
    stream.engines = {
        name: _in_place(piece, runner(shared_model(scheme, batch, name)))
        for name, piece in stream.pieces.items()
    }
    return stream


def runner(model: ModelProto) -> Callable[..., list[Tensor]]:
    """Return what runs a model on tensors."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        feed: dict[str, Any] = {n: t.contiguous().numpy() for n, t in zip(names, tensors, strict=True)}
        return [torch.from_numpy(np.asarray(output)) for output in session.run(None, feed)]

    return run


def _in_place(piece: Piece, run: Callable[..., list[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    written = [i for i, a in enumerate(piece.signature) if a.name in piece.mutates]
    own = len(piece.outputs)
    assert len(functional_piece(piece).outputs) == own + len(written)

    def engine(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = run(*tensors)
        for position, result in zip(written, results[own:], strict=True):
            tensors[position].copy_(result)
        return tuple(results[:own])

    return engine
