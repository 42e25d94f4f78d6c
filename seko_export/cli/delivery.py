"""The commands that prepare an artifact for other machines: pack, unpack, keygen, sign."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from seko_export.cli.shared import artifact_argument, json_option, print_json, say
from seko_runtime.cli.output import note


@click.command(short_help="Write an artifact as one tar.")
@artifact_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The tar to write.")
@click.option("--force", is_flag=True, help="Replace a file that is already there.")
@json_option
def pack(artifact: Path, output: Path, force: bool, as_json: bool) -> None:
    """Write ARTIFACT as one tar, after checking every hash. The same artifact gives the same bytes."""
    from seko_export.artifact.packing import pack_artifact

    packed = pack_artifact(artifact, output, replace=force)
    if as_json:
        print_json(asdict(packed) | {"file": str(packed.file)})
    else:
        say(f"{packed.file}: {packed.files} files, {packed.bytes} bytes, digest {packed.digest}")


@click.command(short_help="Unpack such a tar into a folder.")
@click.argument("archive", metavar="FILE.tar", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The artifact's folder.")
@click.option("--force", is_flag=True, help="Replace an artifact that is already there.")
@json_option
def unpack(archive: Path, output: Path, force: bool, as_json: bool) -> None:
    """Unpack FILE.tar to an artifact's folder; a tar that `pack` would not have written is refused."""
    from seko_runtime.format.unpacking import unpack_artifact

    unpacked = unpack_artifact(archive, output, replace=force)
    if as_json:
        print_json(asdict(unpacked) | {"folder": str(unpacked.folder)})
    else:
        say(f"{unpacked.folder}: {unpacked.files} files, {unpacked.bytes} bytes, digest {unpacked.digest}")


@click.command(short_help="Make a key to sign artifacts with.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The private key; the public one gets .pub.",
)
@click.option("--ask-passphrase", is_flag=True, help="Ask for a passphrase to encrypt the private key with.")
@click.option(
    "--passphrase-file",
    type=click.Path(path_type=Path),
    help="A file with the passphrase in one line, which only you may read.",
)
@json_option
def keygen(output: Path, ask_passphrase: bool, passphrase_file: Path | None, as_json: bool) -> None:
    """Make an ed25519 key to sign artifacts with, and the line for the trust files of inference machines."""
    from seko_export.artifact.signing import make_key, read_passphrase
    from seko_export.errors import UsageError

    passphrase = None
    if ask_passphrase and passphrase_file is not None:
        raise UsageError("--ask-passphrase and --passphrase-file both give a passphrase; leave one out")
    if passphrase_file is not None:
        passphrase = read_passphrase(passphrase_file)
    elif ask_passphrase:
        passphrase = _ask("Passphrase of the new key", twice=True)
    pair = make_key(output, passphrase)
    if as_json:
        print_json({"private": str(pair.private), "public": str(pair.public), "key": pair.key})
    else:
        say(f"{pair.private}: keep it; {pair.public}: a line for the trust file, key {pair.key}")


@click.command(short_help="Sign an artifact.")
@artifact_argument
@click.option(
    "--key", type=click.Path(path_type=Path), required=True, help="The private key that keygen made."
)
@json_option
def sign(artifact: Path, key: Path, as_json: bool) -> None:
    """Sign the digest of ARTIFACT, after checking every hash. The signature is written beside the manifest.

    If the key has a passphrase, the command asks for it, or reads it from the file that SEKO_SIGN_PASSPHRASE_FILE
    names.
    """
    from seko_export.artifact.signing import sign_artifact

    signed = sign_artifact(artifact, key, (lambda: _ask(f"Passphrase of {key}")) if on_terminal() else None)
    for dropped in signed.dropped:
        note(f"dropped the signature of {dropped}: it is not of this manifest")
    if as_json:
        print_json(asdict(signed) | {"file": str(signed.file)})
    else:
        say(f"{signed.file}: digest {signed.digest} signed by {signed.key} at {signed.time}")


def on_terminal() -> bool:
    """Return whether stdin is a terminal, so that the command can ask the user."""
    return sys.stdin.isatty()


def _ask(words: str, *, twice: bool = False) -> bytes:
    typed: str = click.prompt(words, hide_input=True, confirmation_prompt=twice, err=True)
    return typed.encode()
