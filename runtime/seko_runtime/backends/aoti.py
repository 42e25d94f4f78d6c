"""The backend ``aoti``, which loads AOTInductor packages through torch's raw loader, without inductor, dynamo or
triton."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from seko_runtime.backends.engine_tensors import TENSORS_KEY, check_count, check_place, check_tensors_text
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.errors import ArtifactError, DeviceMemoryError
from seko_runtime.format.manifest import EngineSpec, Manifest

MODEL_NAME = "model"  # the name under which torch packages a single model
SINGLE_THREADED = True  # flag of the loader without which a capture of its engines fails
RUNNERS = 1
ANY_DEVICE_INDEX = -1  # the current device

# Loaders that are not in use, by hash of the package, for the next open of the same bytes. Torch never unloads a
# package's shared object, so a new loader for each open would leak memory and space in the temporary folder.
_idle: dict[tuple[str, str], list[Any]] = {}
_idle_lock = threading.Lock()


class AotiBackend:
    """The backend for engines compiled ahead of time by AOTInductor; see `seko_runtime.backends.base.Backend`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._loaders: list[tuple[tuple[str, str], Any]] = []

    def memory(self) -> Memory:
        return torch_memory(self._device)

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load the AOTInductor package of each engine.

        Raises
        ------
        ArtifactError
            If the loader refuses a package, or a package belongs to another engine, has constants, or has other inputs
            or outputs than the manifest. Weights must be inputs, because calling a package whose constants were never
            loaded would crash the process.
        """
        engines: dict[str, Engine] = {}
        names, on_gpu = {spec.name for spec in manifest.engines}, self._device.type == "cuda"
        for spec in manifest.engines:
            key = (manifest.files[spec.file].sha256, _place(self._device))
            with _idle_lock:
                waiting = _idle.get(key)
                loader = waiting.pop() if waiting else None
            if loader is None:
                loader = _load(spec, files[spec.file], self._device)
            self._loaders.append((key, loader))
            _check_package(spec, loader)
            check_place(spec, files[spec.file], names)
            engines[spec.name] = CudaEngine(loader, self._device) if on_gpu else loader.boxed_run
        return engines

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        with _idle_lock:
            for key, loader in self._loaders:
                _idle.setdefault(key, []).append(loader)
        self._loaders.clear()


class CudaEngine:
    """An engine on a GPU. Torch's out-of-memory error leaves a package as a RuntimeError without a word of memory, so
    the allocator's count of such errors tells.

    Parameters
    ----------
    loader : AOTIModelPackageLoader
        The package's loader.
    device : torch.device
        The GPU.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._run, self._device = loader.boxed_run, device

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the engine; the list of inputs is emptied.

        Raises
        ------
        DeviceMemoryError
            If the GPU has too little memory for what the engine computes.
        """
        try:
            outputs: Sequence[torch.Tensor] = self._run(inputs)
        except RuntimeError as error:
            # imported here, because it imports what only a GPU needs
            from seko_runtime.backends.cuda_streams import lacked_memory

            if type(error) is not RuntimeError or not lacked_memory(self._device):
                raise
            free, whole = torch.cuda.mem_get_info(self._device)
            raise DeviceMemoryError(
                f"{self._device} has too little free memory for an engine's results: {free} of {whole} bytes are free; "
                "close what else runs there, or rebuild with --fit"
            ) from error
        return outputs


def torch_memory(device: torch.device) -> Memory:
    """Return the memory of a session on ``device``, in torch."""
    if device.type == "cuda":
        from seko_runtime.backends.cuda_memory import CudaMemory

        return CudaMemory(device)
    from seko_runtime.backends.torch_memory import CpuMemory

    return CpuMemory()


def _place(device: torch.device) -> str:
    """Return the device with its index; "cuda" stands for the current device."""
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


def _load(spec: EngineSpec, package: memoryview, device: torch.device) -> Any:
    # The loader needs a path. A memory file holds exactly the bytes that were hashed, even if the artifact's folder
    # changes.
    with os.fdopen(os.memfd_create("seko-engine", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        view = package
        while view:
            view = view[file.write(view) :]
        index = ANY_DEVICE_INDEX if device.index is None else device.index
        try:
            return torch._C._aoti.AOTIModelPackageLoader(
                f"/proc/self/fd/{file.fileno()}", MODEL_NAME, SINGLE_THREADED, RUNNERS, index
            )
        except RuntimeError as error:
            raise ArtifactError(
                f"engine {spec.name} ({spec.file}) was refused by torch {torch.__version__}: "
                f"{str(error).splitlines()[0][:200]}; rebuild the artifact"
            ) from None


def _check_package(spec: EngineSpec, loader: Any) -> None:
    constants = loader.get_constant_fqns()
    if constants:
        raise ArtifactError(
            f"engine {spec.name} has {len(constants)} constants of its own ({constants[0]}, ...), expected none: "
            "weights are inputs; rebuild the artifact"
        )
    trees = loader.get_call_spec()
    # a package that was not made by aoti_compile_and_package does not describe its inputs and outputs
    if all(trees):
        input_count, output_count = (_count_leaves(json.loads(tree)[1]) for tree in trees)
        check_count(spec, "takes", input_count, spec.inputs)
        check_count(spec, "gives", output_count, spec.outputs)
    check_tensors_text(spec, loader.get_metadata().get(TENSORS_KEY))


def _count_leaves(tree: dict[str, Any]) -> int:
    """Return the number of leaves of a serialised pytree, which is the number of tensors of a call."""
    children = tree["children_spec"]
    return sum(map(_count_leaves, children)) if children or tree["type"] is not None else 1


BACKEND = AotiBackend
