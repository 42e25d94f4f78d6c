"""Checks that compare the tensors in an engine file's own description with the manifest. The checks run no code of the
engine file."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence

from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import EngineSpec, TensorSpec

TENSORS_KEY = "seko_tensors"  # key in an AOTInductor package's metadata, with the text of `tensors_text`
ZIP_MAGIC = b"PK\3\4"
Side = Sequence[tuple[Sequence[int], str]]  # shape and dtype of each tensor


def check_side(spec: EngineSpec, verb: str, in_file: Side, wanted: Sequence[TensorSpec]) -> None:
    """Compare the inputs or the outputs in an engine file with those in the manifest.

    Parameters
    ----------
    spec : EngineSpec
        The engine's entry in the manifest.
    verb : str
        Verb for error messages: ``takes`` for inputs, ``gives`` for outputs.
    in_file : sequence of shape and dtype
        Tensors according to the file.
    wanted : sequence of TensorSpec
        Tensors according to the manifest.

    Raises
    ------
    ArtifactError
        If the file's tensors differ from the manifest's in their number, a shape or a dtype.
    """
    for place, (our, (shape, dtype)) in enumerate(zip(wanted, in_file, strict=False)):
        if (list(our.shape), our.dtype) != (list(shape), dtype):
            raise ArtifactError(
                f"engine {spec.name} {verb} {dtype} {list(shape)} as number {place}, the manifest says {our.dtype} "
                f"{list(our.shape)}; rebuild the artifact"
            )
    check_count(spec, verb, len(in_file), wanted)


def check_count(spec: EngineSpec, verb: str, count: int, wanted: Sequence[TensorSpec]) -> None:
    """Compare only the number of tensors in file and manifest; ArtifactError if the numbers differ."""
    if count != len(wanted):
        raise ArtifactError(
            f"engine {spec.name} {verb} {count} tensors, the manifest says {len(wanted)}; rebuild the artifact"
        )


def check_place(spec: EngineSpec, package: memoryview, engines: Container[str]) -> None:
    """Check that a torch package belongs to this engine and not to another engine of the artifact.

    Inside a package the files lie in a folder named after the engine, which distinguishes engines with equal
    signatures.

    Raises
    ------
    ArtifactError
        If the package belongs to another engine.
    """
    packed = packed_name(package)
    if packed != spec.name and packed in engines:
        raise ArtifactError(
            f"engine {spec.name}: {spec.file} holds the engine {packed}; rebuild the artifact"
        )


def packed_name(package: memoryview) -> str:
    """Return the folder of a zip file's first entry, or an empty string."""
    if package[:4] != ZIP_MAGIC:
        return ""
    length = int.from_bytes(package[26:28], "little")
    folder, slash, _ = bytes(package[30 : 30 + length]).partition(b"/")
    return folder.decode("utf-8", "replace") if slash else ""


def tensors_text(spec: EngineSpec) -> str:
    """Return an engine's signature as JSON for the engine's package: shapes and dtypes, and the inputs that the engine
    writes."""
    sides = ([[list(tensor.shape), tensor.dtype] for tensor in side] for side in (spec.inputs, spec.outputs))
    places = [place for place, tensor in enumerate(spec.inputs) if tensor.name in spec.mutates]
    return json.dumps([*sides, places])


def check_tensors_text(spec: EngineSpec, text: str | None) -> None:
    """Compare the signature in a package with the manifest; a package without a signature is not compared.

    Raises
    ------
    ArtifactError
        If the signature in the package differs from the manifest's.
    """
    if text is None or text == tensors_text(spec):
        return
    try:
        inputs, outputs, places = json.loads(text)
        check_side(spec, "takes", inputs, spec.inputs)
        check_side(spec, "gives", outputs, spec.outputs)
        names = [spec.inputs[place].name for place in places]
    except (ValueError, TypeError, IndexError, RecursionError):
        raise ArtifactError(
            f"engine {spec.name}: {spec.file} carries an invalid signature; rebuild the artifact"
        ) from None
    raise ArtifactError(
        f"engine {spec.name} writes {', '.join(names)[:200] or 'nothing'} in place, the manifest says "
        f"{', '.join(spec.mutates)[:200] or 'nothing'}; rebuild the artifact"
    )
