"""What plans are made of, exported once a run for all tests. No tests."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
from onnx import ModelProto

from seko_export.backends.tensorrt_plans import backend
from seko_export.config.video import VideoBuild
from seko_export.families.registry import graph_of
from tests.export.media_files import TEXT, VAE
from tests.onnx import forms
from tests.support.new_thread import in_new_thread
from tests.support.shared import made_once


def gpu_config(scheme: str = "fp4") -> VideoBuild:
    """The small build of the ONNX tests, as it would be for a GPU."""
    return forms.config_of("fp32", 1).changed(device="cuda", kv_scheme=scheme)


# A small build with every piece that there is; those of its transformer are `gpu_config`'s.
WHOLE = gpu_config().changed(text=replace(TEXT, dim=gpu_config().model.text_dim), vae=VAE)

# The same with layers that attend to the past in 8 bits.
PAST_IN_8_BITS = gpu_config().changed(fused=True, attention="fp8")


@cache
def form_of(config: VideoBuild, name: str) -> ModelProto:
    """What a plan of a piece is made of; not to be changed.

    It is made once for all builds whose piece is the same: the schedule is among the weights, only the layers and what
    comes before them know the cache, and only text encoder and VAE know of themselves.
    """
    around = {} if name.startswith(("text", "vae")) else {"text": None, "vae": None}
    scheme = config.workload.kv_scheme if name.startswith(("embed", "block")) else "bf16"
    same = config.changed(schedule=gpu_config().workload.schedule, kv_scheme=scheme, archs=(), **around)
    digest = hashlib.sha256(repr(same).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        folder.mkdir()
        in_new_thread(backend.export_form, same, graph_of(same).pieces[name], folder / "form.onnx")

    return onnx.load(made_once(forms.folders[0], f"plan-form-{digest}-{name}", make) / "form.onnx")


def write_form(config: VideoBuild, name: str, path: str) -> float:
    """What `backend.export_form` does, out of the forms that are there."""
    Path(path).write_bytes(form_of(config, name).SerializeToString(deterministic=True))
    return 0.0
