"""Signatures: what a configured trust file lets in, and its own error for each way to be kept out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("cryptography", reason="the library cryptography is not installed: nothing can be signed")

from seko_export.artifact.packing import pack_artifact
from seko_export.artifact.signing import make_key, sign_artifact
from seko_export.cli import main as seko_export
from seko_export.errors import MachineError
from seko_runtime import errors
from seko_runtime.backends.aoti import AotiBackend
from seko_runtime.cli.commands import main
from seko_runtime.format.trust import read_signatures, read_trust, signed_bytes
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import check_artifact, open_artifact, read_manifest

from .eager_backend import EagerBackend


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the private keys ``ours`` and ``theirs``."""
    place = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        make_key(place / name)
    return place


@pytest.fixture
def folder(built_whole: Path, tmp_path: Path) -> Path:
    """A copy, to be signed and damaged."""
    return shutil.copytree(built_whole, tmp_path / "whole")


@pytest.fixture(autouse=True)
def no_engine_is_loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to load native code; opening goes through plain callables otherwise."""
    loads: list[str] = []

    class Counting(EagerBackend):
        def load_engines(self, *arguments):
            loads.append("load")
            return super().load_engines(*arguments)

    monkeypatch.delenv("SEKO_TRUST", raising=False)
    monkeypatch.setattr(AotiBackend, "load_engines", lambda *_: loads.append("native"))
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: Counting())
    return loads


def test_what_a_trusted_key_signed_is_opened(folder, keys, monkeypatch, no_engine_is_loaded):
    signature = sign_artifact(folder, keys / "ours")
    assert signature.digest == read_manifest(folder)[1]
    with open_artifact(folder, trust=keys / "ours.pub"):
        pass
    monkeypatch.setenv("SEKO_TRUST", str(keys / "ours.pub"))
    with open_artifact(folder) as artifact:
        assert all(error.within for error in artifact.verify())
    assert no_engine_is_loaded == ["load", "load"]


def test_without_a_trust_file_nothing_is_asked(folder):
    with open_artifact(folder):
        pass
    (folder / "manifest.sig").write_bytes(b"not even JSON")
    with open_artifact(folder):
        pass


def refused(folder: Path, trust: Path, error: type[errors.SekoRuntimeError], words: str) -> None:
    """By the argument, by the command line, and by the environment; with the class's own exit code."""
    with pytest.raises(errors.SekoRuntimeError, match=words) as caught:
        open_artifact(folder, trust=trust)
    assert type(caught.value) is error
    for command in ("verify", "info"):
        assert main([command, str(folder), "--trust", str(trust)]) == error.exit_code
    os.environ["SEKO_TRUST"] = str(trust)
    try:
        for call in (open_artifact, check_artifact, read_manifest):
            with pytest.raises(error, match=words):
                call(folder)
        assert main(["verify", str(folder)]) == error.exit_code
    finally:
        del os.environ["SEKO_TRUST"]


def test_an_unsigned_artifact(folder, keys, no_engine_is_loaded):
    refused(folder, keys / "ours.pub", errors.ArtifactError, "is not signed")
    assert no_engine_is_loaded == []


def test_an_unknown_key(folder, keys, no_engine_is_loaded):
    sign_artifact(folder, keys / "theirs")
    refused(folder, keys / "ours.pub", errors.ArtifactError, "no key of .*ours.pub signed")
    assert no_engine_is_loaded == []


def test_a_signature_of_another_manifest(folder, keys, no_engine_is_loaded):
    sign_artifact(folder, keys / "ours")
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")
    refused(folder, keys / "ours.pub", errors.ArtifactError, "is not of this manifest")
    assert no_engine_is_loaded == []


@pytest.mark.parametrize("place", range(0, 128, 9))
def test_one_digit_of_a_signature(folder, keys, place):
    sign_artifact(folder, keys / "ours")
    table = json.loads((folder / "manifest.sig").read_bytes())
    digits = table["signatures"][0]["signature"]
    table["signatures"][0]["signature"] = (
        digits[:place] + "0123456789abcdef"[int(digits[place], 16) ^ 1] + digits[place + 1 :]
    )
    (folder / "manifest.sig").write_text(json.dumps(table))
    with pytest.raises(errors.ArtifactError, match="is not of this manifest"):
        open_artifact(folder, trust=keys / "ours.pub")


def test_a_good_signature_beside_a_wrong_one_of_a_trusted_key_does_not_help(folder, keys, tmp_path):
    sign_artifact(folder, keys / "ours")
    sign_artifact(folder, keys / "theirs")
    both = tmp_path / "both"
    both.write_text((keys / "ours.pub").read_text() + "# another\n\n" + (keys / "theirs.pub").read_text())
    with open_artifact(folder, trust=both):
        pass
    table = json.loads((folder / "manifest.sig").read_bytes())
    table["signatures"][1]["signature"] = table["signatures"][0]["signature"]
    (folder / "manifest.sig").write_text(json.dumps(table))
    with pytest.raises(errors.ArtifactError, match="is not of this manifest"):
        open_artifact(folder, trust=both)


def test_signing_again_keeps_the_others(folder, keys, monkeypatch):
    first = sign_artifact(folder, keys / "ours")
    second = sign_artifact(folder, keys / "theirs")
    assert sorted(second.keys) == sorted([first.key, second.key])
    assert second.dropped == ()
    again = (folder / "manifest.sig").read_bytes()
    monkeypatch.setattr("seko_export.artifact.signing._now", lambda: second.time)
    sign_artifact(folder, keys / "theirs")
    assert (folder / "manifest.sig").read_bytes() == again  # ed25519 draws no numbers
    for name in ("ours", "theirs"):
        with open_artifact(folder, trust=keys / f"{name}.pub"):
            pass
    assert sorted(path.name for path in folder.parent.iterdir()) == ["whole"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no UTF-8 JSON"),
        (b"{}", "no field 'signature_version'"),
        (b'{"signature_version": 2, "signatures": []}', "version 2, this runtime reads 1"),
        (b'{"signature_version": 1, "signatures": {}}', "expected an array"),
        (b'{"signature_version": 1, "signature_version": 1, "signatures": []}', "a key twice"),
        (b'{"signature_version": 1, "signatures": [{"algorithm": "none"}]}', "expected ed25519"),
        (b'{"signature_version": 1, "signatures": [{"algorithm": "ed25519", "key": "AB"}]}', "expected 64"),
        (b" " * 65537, "at most 65536"),
        (b"\xff", "no UTF-8 JSON"),
        (b'{"signature_version": 1, "signatures": []}', "no key of"),
    ],
)  # fmt: skip
def test_a_signature_file_that_is_none(folder, keys, content, words):
    (folder / "manifest.sig").write_bytes(content)
    refused(folder, keys / "ours.pub", errors.ArtifactError, words)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("manifest.json"), os.mkfifo, Path.mkdir])
def test_a_signature_that_is_no_regular_file(folder, keys, make: Callable[[Path], None]):
    make(folder / "manifest.sig")
    for trust in (None, keys / "ours.pub"):
        with pytest.raises(errors.ArtifactError):
            open_artifact(folder, trust=trust)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "names no key"),
        (b"# nobody yet\n\n", "names no key"),
        (b"\xff\xfe", "no UTF-8"),
        (b"ed25519 abc ours\n", "line 1 of the trust file"),
        (b"\nrsa " + b"a" * 64, "line 2 of the trust file"),
        (b"ed25519 " + b"A" * 64, "line 1 of the trust file"),
        (b"not-before 2026-02-30T00:00:00Z", "line 1 of the trust file"),
        (b"not-before 2026-02-03", "expected .* 'not-before YYYY-MM-DDTHH:MM:SSZ'"),
        (b"not-before 2026-02-03T00:00:00Z please", "line 1 of the trust file"),
        (b"not-before", "line 1 of the trust file"),
        (b"revoked abc", "line 1 of the trust file"),
        (b"revoked", "line 1 of the trust file"),
        (b"revoked " + b"a" * 64, "names no key"),
        (b"ed25519", "line 1 of the trust file"),
        (b"#" * (1 << 20) + b"#", "has more than 1048576 bytes"),
        (None, "No such file"),
    ],
)
def test_a_trust_file_that_is_none(folder, keys, tmp_path, content, words):
    """Also where the artifact is signed well: a box whose trust file is broken opens nothing."""
    sign_artifact(folder, keys / "ours")
    trust = tmp_path / "trust"
    if content is not None:
        trust.write_bytes(content)
    refused(folder, trust, errors.EnvironmentLacksError, words)


def test_an_empty_variable_is_a_trust_file_that_is_none(folder, monkeypatch):
    monkeypatch.setenv("SEKO_TRUST", "")
    with pytest.raises(errors.EnvironmentLacksError, match=r"the trust file .* cannot be read"):
        open_artifact(folder)


def test_without_the_library_nothing_is_opened(folder, keys, monkeypatch):
    """Not even what is signed well; and nothing can be signed."""
    sign_artifact(folder, keys / "ours")
    for name in [module for module in sys.modules if module.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    refused(folder, keys / "ours.pub", errors.LibraryMissingError, "pip install cryptography")
    with pytest.raises(MachineError, match="pip install cryptography"):
        sign_artifact(folder, keys / "ours")


def test_a_signed_artifact_is_packed_and_unpacked_with_its_signature(folder, keys, tmp_path, monkeypatch):
    sign_artifact(folder, keys / "ours")
    pack_artifact(folder, tmp_path / "a.tar")
    unpack_artifact(tmp_path / "a.tar", tmp_path / "again", trust=keys / "ours.pub")
    assert (tmp_path / "again/manifest.sig").read_bytes() == (folder / "manifest.sig").read_bytes()
    with open_artifact(tmp_path / "again", trust=keys / "ours.pub"):
        pass
    with pytest.raises(errors.ArtifactError, match=r"no key of .* signed"):
        unpack_artifact(tmp_path / "a.tar", tmp_path / "more", trust=keys / "theirs.pub")
    monkeypatch.setenv("SEKO_TRUST", str(keys / "theirs.pub"))
    assert main(["unpack", str(tmp_path / "a.tar"), "-o", str(tmp_path / "more")]) == 4
    with pytest.raises(errors.ArtifactError, match=r"no key of .* signed"):
        pack_artifact(folder, tmp_path / "b.tar")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "again", "whole"]


def test_the_trust_file_is_asked_before_the_tars_manifest_is_parsed(folder, keys, tmp_path, monkeypatch):
    pack_artifact(folder, tmp_path / "a.tar")

    def refuse(_: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("seko_runtime.format.unpacking.parse_manifest", refuse)
    monkeypatch.setattr("seko_runtime.opening.checked_artifact.ManifestTable", refuse)
    for call in (lambda: unpack_artifact(tmp_path / "a.tar", tmp_path / "x", trust=keys / "ours.pub"),
                 lambda: open_artifact(folder, trust=keys / "ours.pub")):  # fmt: skip
        with pytest.raises(errors.ArtifactError, match="is not signed"):
            call()


def test_signing_is_left_out_of_the_trust_files_reach(folder, keys, monkeypatch):
    """The maker may have a trust file configured too."""
    monkeypatch.setenv("SEKO_TRUST", str(keys / "ours.pub"))
    sign_artifact(folder, keys / "ours")
    with open_artifact(folder):
        pass


def test_an_artifact_that_does_not_check_is_not_signed(folder, keys):
    (folder / "surplus").write_text("x")
    with pytest.raises(errors.ArtifactError, match="'surplus' is not in the manifest"):
        sign_artifact(folder, keys / "ours")
    assert not (folder / "manifest.sig").exists()


def change_signatures(folder: Path, change: Callable[[list[dict[str, str]]], object]) -> None:
    table = json.loads((folder / "manifest.sig").read_bytes())
    change(table["signatures"])
    (folder / "manifest.sig").write_text(json.dumps(table))


def without_time(entries: list[dict[str, str]]) -> None:
    """As the first version of `sign` wrote them."""
    for entry in entries:
        del entry["time"], entry["time_signature"]


def test_a_signature_without_a_time_is_taken_as_before(folder, keys):
    sign_artifact(folder, keys / "ours")
    change_signatures(folder, without_time)
    with open_artifact(folder, trust=keys / "ours.pub"):
        pass


@pytest.fixture
def trust_of(keys, tmp_path) -> Callable[..., Path]:
    """A trust file of both keys with more lines."""

    def write(*lines: str) -> Path:
        path = tmp_path / "trust"
        both = [(keys / f"{name}.pub").read_text() for name in ("ours", "theirs")]
        path.write_text("".join(both) + "\n".join(lines))
        return path

    return write


def test_what_was_signed_before_the_trust_files_time_is_refused(folder, keys, trust_of, monkeypatch):
    monkeypatch.setattr("seko_export.artifact.signing._now", lambda: "2026-03-01T12:00:00Z")
    sign_artifact(folder, keys / "ours")
    for time in ("2025-12-31T23:59:59Z", "2026-03-01T12:00:00Z"):
        with open_artifact(folder, trust=trust_of(f"not-before {time}")):
            pass
    late = trust_of("not-before 2026-03-01T12:00:01Z", "not-before 2026-01-01T00:00:00Z")
    refused(folder, late, errors.ArtifactError, "the latest of its keys is of 2026-03-01T12:00:00Z")
    monkeypatch.setattr("seko_export.artifact.signing._now", lambda: "2026-03-02T00:00:00Z")
    sign_artifact(folder, keys / "theirs")  # a new key beside the old one's signature, which stays
    with open_artifact(folder, trust=late):
        pass
    change_signatures(folder, without_time)
    refused(folder, late, errors.ArtifactError, "the latest of its keys is of no time")


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(time="2036-03-01T12:00:00Z"),
        lambda entry: entry.update(time_signature=entry["signature"]),
        lambda entry: entry.update(signature=entry["time_signature"]),
    ],
)
def test_a_time_that_the_key_did_not_sign(folder, keys, change):
    """Whether the trust file asks for times or not."""
    sign_artifact(folder, keys / "ours")
    change_signatures(folder, lambda entries: change(entries[0]))
    refused(folder, keys / "ours.pub", errors.ArtifactError, "is not of this manifest")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: entry.pop("time"), "no field 'time'"),
        (lambda entry: entry.pop("time_signature"), "no field 'time_signature'"),
        (lambda entry: entry.update(time="2026-13-01T12:00:00Z"), "expected YYYY-MM-DDTHH:MM:SSZ"),
        (lambda entry: entry.update(time="now"), "expected YYYY-MM-DDTHH:MM:SSZ"),
        (lambda entry: entry.update(time_signature="00"), "expected 128 lower-case"),
    ],
)
def test_a_time_that_is_none(folder, keys, change, words):
    sign_artifact(folder, keys / "ours")
    change_signatures(folder, lambda entries: change(entries[0]))
    refused(folder, keys / "ours.pub", errors.ArtifactError, words)


def test_a_revoked_digest_is_refused_however_well_it_is_signed(folder, keys, trust_of):
    digest = sign_artifact(folder, keys / "ours").digest
    with open_artifact(folder, trust=trust_of(f"revoked {'0' * 64}")):
        pass
    refused(folder, trust_of(f"revoked {digest} a leak"), errors.ArtifactError, digest)
    (folder / "manifest.sig").unlink()
    refused(folder, trust_of(f"revoked {digest}"), errors.ArtifactError, digest)


def test_signing_drops_what_is_not_of_this_manifest_and_says_so(folder, keys):
    """An artifact that was rebuilt keeps no signature that would have it refused."""
    theirs = sign_artifact(folder, keys / "theirs").key
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")
    signature = sign_artifact(folder, keys / "ours")
    assert (signature.keys, signature.dropped) == ((signature.key,), (theirs,))
    (entry,) = json.loads((folder / "manifest.sig").read_bytes())["signatures"]
    assert entry["key"] == signature.key
    assert sign_artifact(folder, keys / "ours").dropped == ()
    sign_artifact(folder, keys / "theirs")
    path.write_bytes(path.read_bytes() + b"\n")
    done = CliRunner().invoke(seko_export, ["sign", str(folder), "--key", str(keys / "ours")])
    assert done.exit_code == 0
    assert done.stderr == f"dropped the signature of {theirs}: it is not of this manifest\n"


def test_the_signature_is_what_the_page_says(folder, keys):
    """By the library alone, from the files alone; a second implementation would do this."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    sign_artifact(folder, keys / "ours")
    (entry,) = json.loads((folder / "manifest.sig").read_bytes())["signatures"]
    assert sorted(entry) == ["algorithm", "key", "signature", "time", "time_signature"]
    document = (folder / "manifest.json").read_bytes()
    message = b"seko manifest signature 1\n" + hashlib.sha256(document).digest()
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["key"]))
    public.verify(bytes.fromhex(entry["signature"]), message)
    assert signed_bytes(document) == message
    message = (
        b"seko manifest signature 2\n" + hashlib.sha256(document).digest() + entry["time"].encode("ascii")
    )
    public.verify(bytes.fromhex(entry["time_signature"]), message)
    (read,) = read_signatures((folder / "manifest.sig").read_bytes())
    assert (read.key, read.time) == (entry["key"], entry["time"])


def test_the_commands(folder, tmp_path):
    key = str(tmp_path / "k")
    assert CliRunner().invoke(seko_export, ["keygen", "-o", key, "--json"]).exit_code == 0
    done = CliRunner().invoke(seko_export, ["sign", str(folder), "--key", key, "--json"])
    assert done.exit_code == 0
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(read_trust(tmp_path / "k.pub").keys) == [report["key"]]
    assert main(["info", str(folder), "--trust", str(tmp_path / "k.pub")]) == 0
