"""The commands that bring an artifact to its box: pack, unpack, keygen, sign. No work is done here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from seko_export.cli.shared import artifact_argument, json_option, print_json


@click.command()
@artifact_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The tar to write.")
@click.option("--force", is_flag=True, help="Replace a file that is already there.")
@json_option
def pack(artifact: Path, output: Path, force: bool, as_json: bool) -> None:
    """Write ARTIFACT as one tar, after checking every hash; the same artifact gives the same bytes."""
    from seko_export.artifact.packing import pack_artifact

    made = pack_artifact(artifact, output, replace=force)
    if as_json:
        print_json(asdict(made) | {"file": str(made.file)})
    else:
        click.echo(f"{made.file}: {made.files} files, {made.bytes} bytes, digest {made.digest}")


@click.command()
@click.argument("archive", metavar="FILE.tar", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The artifact's folder.")
@json_option
def unpack(archive: Path, output: Path, as_json: bool) -> None:
    """Make an artifact's folder of FILE.tar; what `pack` would not have written is refused."""
    from seko_runtime.format.unpacking import unpack_artifact

    made = unpack_artifact(archive, output)
    if as_json:
        print_json(asdict(made) | {"folder": str(made.folder)})
    else:
        click.echo(f"{made.folder}: {made.files} files, {made.bytes} bytes, digest {made.digest}")


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The private key; beside it .pub."
)
@json_option
def keygen(output: Path, as_json: bool) -> None:
    """Make an ed25519 key to sign artifacts with, and the line for the trust files of boxes."""
    from seko_export.artifact.signing import make_key

    made = make_key(output)
    if as_json:
        print_json({"private": str(made.private), "public": str(made.public), "key": made.key})
    else:
        click.echo(f"{made.private}: keep it; {made.public}: a line for the trust file, key {made.key}")


@click.command()
@artifact_argument
@click.option("--key", type=click.Path(path_type=Path), required=True, help="What keygen made.")
@json_option
def sign(artifact: Path, key: Path, as_json: bool) -> None:
    """Sign the digest of ARTIFACT, after checking every hash; the signature lies beside the manifest."""
    from seko_export.artifact.signing import sign_artifact

    made = sign_artifact(artifact, key)
    if as_json:
        print_json(asdict(made) | {"file": str(made.file)})
    else:
        click.echo(f"{made.file}: digest {made.digest} signed by {made.key}")


DELIVERY = (pack, unpack, keygen, sign)
