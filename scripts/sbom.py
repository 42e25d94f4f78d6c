"""What a release brings along: an SBOM beside each wheel, and the table of licences in docs/licences.md.

    python -m scripts.sbom wheels FOLDER     NAME.cdx.json beside each wheel of FOLDER, in CycloneDX 1.6
    python -m scripts.sbom licences          rewrites docs/licences.md

Versions and licences are those of the packages installed where this runs: the tested set of scripts/constraints.txt.
"""

from __future__ import annotations

import email
import hashlib
import os
import sys
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
DISTRIBUTIONS = ("seko-runtime", "seko-kernels", "seko-export", "seko-serve")
TESTS_ALONE = {"dev", "clients"}  # extras of which nothing is on a user's machine
# What a package's classifiers and free texts mean, as SPDX identifiers.
SPDX = {
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Other/Proprietary License": "LicenseRef-Proprietary",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}


@dataclass(frozen=True)
class Dependency:
    """A package that a distribution requires.

    Attributes
    ----------
    name : str
        Its name, normalised.
    extra : str
        The extra that asks for it, or empty.
    """

    name: str
    extra: str


def licence(of: Message | metadata.PackageMetadata) -> str:
    """Return a package's licence as an SPDX expression, or its own words where they are not known."""
    expression = of["License-Expression"]
    if expression:
        return str(expression)
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in of.get_all("Classifier") or ()
        if line.startswith("License :: ")
    ]
    said = [text for text in classifiers if text != "OSI Approved"] or [
        str(of["License"] or "").partition("\n")[0]
    ]
    return " AND ".join(sorted({SPDX.get(text, text) for text in said}))


def direct(distribution: str, extras: set[str] | None = None) -> Iterator[Dependency]:
    """Yield what an installed distribution requires here: without extras, and by each of ``extras``.

    None stands for all but those for tests.
    """
    if extras is None:
        extras = set(metadata.metadata(distribution).get_all("Provides-Extra") or ()) - TESTS_ALONE
    for line in metadata.requires(distribution) or ():
        requirement = Requirement(line)
        for extra in ("", *sorted(extras)):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield Dependency(canonicalize_name(requirement.name), extra)
                break  # also by the extras behind it


def closure(distribution: str) -> dict[str, set[str]]:
    """Return all that a distribution needs without extras, each with what it requires itself."""
    needed: dict[str, set[str]] = {}
    waiting: list[str] = [canonicalize_name(distribution)]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        requirements = [Requirement(line) for line in metadata.requires(name) or ()]
        chosen: dict[str, set[str]] = {}
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                chosen[canonicalize_name(requirement.name)] = set(requirement.extras)
        for required, extras in chosen.items():  # of a package with extras also what those ask for
            if extras:
                chosen = chosen | {found.name: set() for found in direct(required, extras)}
        needed[name] = set(chosen)
        waiting.extend(chosen)
    return needed


def component(of: Message | metadata.PackageMetadata) -> Component:
    """Return a package as CycloneDX has it."""
    name, version = canonicalize_name(of["Name"]), of["Version"]
    licences = LicenseFactory()
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}=={version}",
        purl=PackageURL("pypi", None, name, version.partition("+")[0]),
        licenses=[licences.make_from_string(licence(of))] if licence(of) else [],
    )


def wheel_metadata(wheel: Path) -> Message:
    """Return what a wheel says of itself."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(opened.read(name))


def sbom(wheel: Path, time: datetime) -> str:
    """Return the SBOM of a wheel, equal for equal bytes, packages and time."""
    said = wheel_metadata(wheel)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    root = component(said)
    root.hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
    needed = closure(said["Name"])
    known = {
        name: root if name == canonicalize_name(said["Name"]) else component(metadata.metadata(name))
        for name in sorted(needed)
    }
    bom = Bom(serial_number=uuid.UUID(digest[:32]))
    bom.metadata.timestamp = time
    bom.metadata.component = root
    for name, found in known.items():
        if found is not root:
            bom.components.add(found)
        bom.register_dependency(found, [known[required] for required in sorted(needed[name])])
    return str(JsonV1Dot6(bom).output_as_string(indent=1)) + "\n"


def licence_table() -> str:
    """Return the rows of docs/licences.md for the packages that are installed here."""
    asked: dict[str, dict[str, set[str]]] = {}
    for distribution in DISTRIBUTIONS:
        for found in direct(distribution):
            if found.name not in DISTRIBUTIONS:
                asked.setdefault(found.name, {}).setdefault(distribution, set()).add(found.extra)
    lines = []
    for name in sorted(asked):
        try:
            what = licence(metadata.metadata(name))
        except metadata.PackageNotFoundError:
            continue
        by = ", ".join(_by(distribution, extras) for distribution, extras in asked[name].items())
        lines.append(f"| {name} | {what} | {by} |\n")
    return "".join(lines)


def _by(distribution: str, extras: set[str]) -> str:
    named = sorted(extras - {""})
    return distribution if "" in extras else f"{distribution}[{','.join(named)}]"


def main(arguments: list[str]) -> None:
    """Write what is asked for."""
    match arguments:
        case ["wheels", folder]:
            time = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
            for wheel in sorted(Path(folder).glob("*.whl")):
                wheel.with_suffix(".cdx.json").write_text(sbom(wheel, time), encoding="utf-8")
        case ["licences"]:
            head, mark, _ = PAGE.read_text(encoding="utf-8").rpartition("|---|---|---|\n")
            PAGE.write_text(head + mark + licence_table(), encoding="utf-8")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
