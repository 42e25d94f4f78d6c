"""The bill of materials (CycloneDX JSON): packages that made the engines, with versions and licences, and LoRAs that
are merged into the weights. The bill of materials contains no times and no host names.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from seko_export.checkpoints.sources import MergedLora
from seko_export.host import environment

SBOM_FILE = "sbom.cdx.json"
SPEC_VERSION = "1.6"
OWN = ("seko-export", "seko-kernels", "seko-runtime")
# packages to list, with all that they require
TOOLCHAIN = (*OWN, "torch", "triton", "numpy", "safetensors", "tokenizers")
_LONGEST_NAME = 80  # longest licence name: some packages put the whole text of their licence there

Component = dict[str, Any]


def write_sbom(
    folder: Path,
    model: str,
    cuda: str | None,
    further: tuple[str, ...] = (),
    adapters: tuple[MergedLora, ...] = (),
) -> None:
    """Write the artifact's bill of materials; equal environments give equal bytes.

    Parameters
    ----------
    folder : Path
        The artifact's folder.
    model : str
        Name of the model, which the bill of materials describes.
    cuda : str or None
        Version of CUDA, if the engines are for a GPU.
    further : tuple of str
        Further packages that were used to make the engines.
    adapters : tuple of MergedLora
        LoRAs that are merged into the weights.
    """
    packages = _closure((*TOOLCHAIN, *further))
    components = [_component(package) for package in packages.values()]
    tools = {"python": platform.python_version(), "c++": environment.producer()["compiler"]}
    if cuda is not None:
        tools["cuda"] = cuda
    components += [
        {"type": "application", "bom-ref": f"tool:{name}", "name": name, "version": version}
        for name, version in tools.items()
    ]
    components += [
        {
            "type": "machine-learning-model",
            "bom-ref": f"lora:{number}",
            "name": adapter.name,
            "hashes": [{"alg": "SHA-256", "content": adapter.sha256}],
            "properties": [{"name": "seko:lora-weight", "value": str(adapter.weight)}],
        }
        for number, adapter in enumerate(adapters)
    ]
    dependencies = [
        {
            "ref": _purl(package),
            "dependsOn": sorted({_purl(packages[name]) for name in _needs(package, packages)}),
        }
        for package in packages.values()
    ]
    top = {"type": "machine-learning-model", "bom-ref": "artifact", "name": model}
    bill: dict[str, Any] = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {"component": top, "lifecycles": [{"phase": "build"}]},
        "components": sorted(components, key=lambda entry: str(entry["bom-ref"])),
        "dependencies": sorted(dependencies, key=lambda entry: str(entry["ref"])),
    }
    # The serial number is computed from the content; a random one would make every build a different artifact.
    digest = hashlib.sha256(_to_bytes(bill)).digest()
    bill["serialNumber"] = uuid.UUID(bytes=digest[:16], version=5).urn
    (folder / SBOM_FILE).write_bytes(_to_bytes(bill))


def _closure(roots: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Return these distributions and all distributions that they require, as far as they are installed, by normalised
    name."""
    packages: dict[str, metadata.Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = _normal(waiting.pop())
        if name in packages:
            continue
        try:
            packages[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # a requirement for another platform
            continue
        waiting += _required(packages[name])
    return dict(sorted(packages.items()))


def _needs(package: metadata.Distribution, packages: dict[str, metadata.Distribution]) -> list[str]:
    return [name for name in map(_normal, _required(package)) if name in packages]


def _required(package: metadata.Distribution) -> list[str]:
    """Return the names of the packages that a distribution requires without extras."""
    names = []
    for requirement in package.requires or ():
        name = re.match(r"[\w.-]+", requirement)
        if name and "extra ==" not in requirement:
            names.append(name[0])
    return names


def _component(package: metadata.Distribution) -> Component:
    component: Component = {
        "type": "library",
        "bom-ref": _purl(package),
        "name": _normal(package.metadata["Name"]),
        "version": package.version,
        "purl": _purl(package),
    }
    licences = _licences(package)
    if licences:
        component["licenses"] = licences
    else:
        component["properties"] = [{"name": "seko:licence", "value": "not stated by the package"}]
    return component


def _licences(package: metadata.Distribution) -> list[dict[str, Any]]:
    """Return the licence of a package: its SPDX expression; without one, its licence name or classifiers."""
    package_metadata = package.metadata
    if "License-Expression" in package_metadata:
        return [{"expression": package_metadata["License-Expression"]}]
    name = package_metadata["License"].strip() if "License" in package_metadata else ""
    if name and "\n" not in name and len(name) <= _LONGEST_NAME:
        return [{"license": {"name": name}}]
    classifiers = [
        classifier.split(" :: ")[-1]
        for classifier in package_metadata.get_all("Classifier") or []
        if classifier.startswith("License ::")
    ]
    return [{"license": {"name": classifier}} for classifier in sorted(set(classifiers))]


def _purl(package: metadata.Distribution) -> str:
    return f"pkg:pypi/{_normal(package.metadata['Name'])}@{quote(package.version, safe='')}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _to_bytes(bill: dict[str, Any]) -> bytes:
    return json.dumps(bill, indent=1, sort_keys=True, ensure_ascii=False).encode("utf-8") + b"\n"
