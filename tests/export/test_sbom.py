"""The bill of materials: the fields that CycloneDX requires, equal bytes, nothing of the machine, in every artifact.

The checks of required fields are written here by hand after the CycloneDX 1.6 JSON schema; they are not that schema.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from seko_export.artifact import sbom
from seko_export.checkpoints.sources import MergedLora
from seko_runtime.opening.artifact import read_manifest

# Types of components and phases of lifecycles that the schema of version 1.6 enumerates, as far as they could occur.
COMPONENT_TYPES = {
    *("application", "framework", "library", "container", "platform", "operating-system", "device"),
    *("device-driver", "firmware", "file", "machine-learning-model", "data", "cryptographic-asset"),
}
PHASES = {"design", "pre-build", "build", "post-build", "operations", "discovery", "decommission"}
SERIAL = re.compile(r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TOP_FIELDS = {
    *("$schema", "bomFormat", "specVersion", "serialNumber", "version"),
    *("metadata", "components", "dependencies"),
}
COMPONENT_FIELDS = {"type", "bom-ref", "name", "version", "purl", "licenses", "properties", "hashes"}


def check_bill(bill: dict) -> None:
    """What the schema requires of the fields that we write, and that there are no others."""
    assert set(bill) == TOP_FIELDS
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert SERIAL.fullmatch(bill["serialNumber"])
    components = [bill["metadata"]["component"], *bill["components"]]
    for part in components:
        assert set(part) <= COMPONENT_FIELDS
        assert part["type"] in COMPONENT_TYPES
        assert isinstance(part["name"], str)
        assert part["name"]
        assert isinstance(part.get("version", ""), str)
        licences = part.get("licenses", [])
        # either one expression alone, or licences each by id or name
        assert [set(entry) for entry in licences] in ([{"expression"}], [{"license"}] * len(licences))
        for entry in licences:
            licence = entry.get("expression") or entry["license"]["name"]
            assert isinstance(licence, str)
            assert licence
        assert all(set(entry) == {"name", "value"} for entry in part.get("properties", []))
    refs = [component["bom-ref"] for component in components]
    assert len(set(refs)) == len(refs)
    assert {lifecycle["phase"] for lifecycle in bill["metadata"]["lifecycles"]} <= PHASES
    named = [dependency["ref"] for dependency in bill["dependencies"]]
    assert len(set(named)) == len(named)
    for dependency in bill["dependencies"]:
        assert set(dependency) == {"ref", "dependsOn"}
        assert len(set(dependency["dependsOn"])) == len(dependency["dependsOn"])
        assert {dependency["ref"], *dependency["dependsOn"]} <= set(refs)


@pytest.fixture
def bill(tmp_path: Path) -> dict:
    sbom.write_sbom(tmp_path, "tiny", None)
    return json.loads((tmp_path / sbom.SBOM_FILE).read_bytes())


def test_it_has_what_cyclonedx_requires(bill):
    check_bill(bill)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b.pop("bomFormat"),
        lambda b: b.update(serialNumber="urn:uuid:1"),
        lambda b: b["components"][0].pop("name"),
        lambda b: b["components"][0].update(type="package"),
        lambda b: b["components"].append(dict(b["components"][0])),
        lambda b: b["dependencies"][0]["dependsOn"].append("pkg:pypi/none@1"),
    ],
)
def test_the_check_can_fail(bill, damage):
    damage(bill)
    with pytest.raises((AssertionError, KeyError)):
        check_bill(bill)


def test_it_names_the_toolchain_with_versions_and_licences(bill):
    components = {component["name"]: component for component in bill["components"]}
    for name in ("torch", "numpy", "safetensors", "tokenizers", "triton", "sympy", "seko-runtime"):
        assert components[name]["version"] == metadata.version(name)
        assert components[name]["licenses"], name
    assert {"python", "c++"} <= set(components)
    assert components["torch"]["purl"] == "pkg:pypi/torch@" + metadata.version("torch").replace("+", "%2B")
    torch = next(
        dependency
        for dependency in bill["dependencies"]
        if dependency["ref"] == components["torch"]["bom-ref"]
    )
    assert components["sympy"]["bom-ref"] in torch["dependsOn"]
    assert "pytest" not in components  # an extra's


def test_cuda_is_named_where_the_engines_are_for_a_gpu(tmp_path):
    sbom.write_sbom(tmp_path, "tiny", "13.0")
    bill = json.loads((tmp_path / sbom.SBOM_FILE).read_bytes())
    check_bill(bill)
    assert {"cuda": "13.0"}.items() <= {
        component["name"]: component["version"] for component in bill["components"]
    }.items()


def test_a_merged_lora_is_named_with_weight_and_digest(tmp_path):
    sbom.write_sbom(tmp_path, "tiny", None, adapters=(MergedLora("style.safetensors", 0.8, "ab" * 32),))
    bill = json.loads((tmp_path / sbom.SBOM_FILE).read_bytes())
    check_bill(bill)
    (lora,) = (component for component in bill["components"] if component["type"] == "machine-learning-model")
    assert lora["name"] == "style.safetensors"
    assert lora["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert lora["properties"] == [{"name": "seko:lora-weight", "value": "0.8"}]


def test_a_package_that_states_no_licence_says_so(bill, monkeypatch, tmp_path):
    monkeypatch.setattr(sbom, "_licences", lambda _: [])
    sbom.write_sbom(tmp_path, "tiny", None)
    new_bill = json.loads((tmp_path / sbom.SBOM_FILE).read_bytes())
    check_bill(new_bill)
    assert new_bill["serialNumber"] != bill["serialNumber"]
    libraries = [component for component in new_bill["components"] if component["type"] == "library"]
    assert all(component["properties"][0]["value"] == "not stated by the package" for component in libraries)


@pytest.mark.slow
def test_two_processes_write_equal_bytes_and_nothing_of_the_machine(tmp_path):
    """With other hash seeds, folders and times."""
    script = "import sys; from pathlib import Path; from seko_export.artifact.sbom import write_sbom; write_sbom(Path(sys.argv[1]), 'tiny', None)"  # noqa: E501
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environ = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script, folder], check=True, env=environ)
        written.append((folder / sbom.SBOM_FILE).read_bytes())
    assert hashlib.sha256(written[0]).digest() == hashlib.sha256(written[1]).digest()
    text = written[0].decode()
    for private in (socket.gethostname(), str(tmp_path), sys.prefix, str(Path.home()) + "/", "timestamp"):
        assert private not in text


def test_every_artifact_holds_it_and_hashes_it(fp4):
    manifest, _ = read_manifest(fp4.folder)
    content = (fp4.folder / sbom.SBOM_FILE).read_bytes()
    assert manifest.files[sbom.SBOM_FILE].sha256 == hashlib.sha256(content).hexdigest()
    check_bill(json.loads(content))
    assert json.loads(content)["metadata"]["component"]["name"] == manifest.model["name"]
