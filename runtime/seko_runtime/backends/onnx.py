"""The backend ``onnx``, which runs ONNX files in onnxruntime on the CPU, without torch. Engines of this backend return
caches instead of writing them in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from seko_runtime.backends.engine_tensors import Side, check_side
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.backends.numpy_memory import NumpyMemory
from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import EngineSpec, Manifest

PROVIDERS = ("CPUExecutionProvider",)
# Folder in which onnxruntime looks for external data of a file. It does not exist, because external data were not
# hashed.
NO_FOLDER = "/dev/null/seko"
DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(float8e4m3fn)": "float8_e4m3fn",
    **{f"tensor({name})": name for name in ("uint8", "int8", "int32", "int64", "bool")},
}


class OnnxBackend:
    """The backend for engines that onnxruntime runs; see `seko_runtime.backends.base.Backend`."""

    def __init__(self, _device: str = "cpu") -> None:
        self._sessions: dict[str, Any] = {}

    def memory(self) -> Memory:
        return NumpyMemory()

    def load_engines(self, manifest: Manifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        """Load the ONNX file of each engine.

        Raises
        ------
        ArtifactError
            If onnxruntime refuses a file, the manifest says that an engine writes in place, which ONNX cannot, or
            inputs or outputs differ from the manifest's.
        """
        engines: dict[str, Engine] = {}
        for spec in manifest.engines:
            if spec.mutates:
                raise ArtifactError(
                    f"engine {spec.name} is said to write {', '.join(spec.mutates)} in place, which an ONNX file "
                    "cannot; rebuild the artifact"
                )
            session = _load(spec, files[spec.file])
            check_side(spec, "takes", _side(session.get_inputs()), spec.inputs)
            check_side(spec, "gives", _side(session.get_outputs()), spec.outputs)
            self._sessions[spec.name] = session
            engines[spec.name] = _engine(session)
        return engines

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._sessions.clear()


def _load(spec: EngineSpec, content: memoryview) -> Any:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # without spinning, because thread pools of several engines would compete for the cores
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", NO_FOLDER)
    try:
        return onnxruntime.InferenceSession(bytes(content), options, providers=list(PROVIDERS))
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise ArtifactError(
            f"engine {spec.name} ({spec.file}) was refused by onnxruntime {onnxruntime.__version__}: "
            f"{(str(error).splitlines() or [type(error).__name__])[0][:200]}; rebuild the artifact"
        ) from None


def _engine(session: Any) -> Engine:
    names = [argument.name for argument in session.get_inputs()]

    def engine(inputs: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = session.run(
            None, dict(zip(names, map(np.ascontiguousarray, inputs), strict=True))
        )
        return results

    return engine


def _side(tensors: Sequence[Any]) -> Side:
    return [(list(tensor.shape), DTYPES.get(tensor.type, tensor.type)) for tensor in tensors]


BACKEND = OnnxBackend
