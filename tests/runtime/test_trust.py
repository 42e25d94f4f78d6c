"""Signatures: what a configured trust file lets in, and its own error for each way to be kept out."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the library cryptography is not installed: nothing can be signed")

from seko_export.errors import MachineError
from seko_export.errors import UsageError as ExportUsageError
from seko_export.packing import pack_artifact
from seko_export.signing import make_key, sign_artifact
from seko_runtime import errors
from seko_runtime.__main__ import main
from seko_runtime.artifact import check_artifact, open_artifact, read_manifest
from seko_runtime.backends.aoti import AotiBackend
from seko_runtime.tar_format import END, member_header, padding
from seko_runtime.trust import read_signatures, read_trust, signed_bytes
from seko_runtime.unpacking import unpack_artifact

from . import toy_whole
from .eager_backend import EagerBackend, write_whole


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the private keys ``ours`` and ``theirs``."""
    place = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        make_key(place / name)
    return place


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(
        tmp_path_factory.mktemp("made") / "whole", toy_whole.whole_manifest(golden=toy_whole.GOLDEN)
    )


@pytest.fixture
def folder(unsigned: Path, tmp_path: Path) -> Path:
    """A copy, to be signed and damaged."""
    return shutil.copytree(unsigned, tmp_path / "whole")


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
    monkeypatch.setattr("seko_runtime.artifact.open_backend", lambda *_: Counting())
    return loads


def test_what_a_trusted_key_signed_is_opened(folder, keys, monkeypatch, no_engine_is_loaded):
    made = sign_artifact(folder, keys / "ours")
    assert made.digest == read_manifest(folder)[1]
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
    refused(folder, keys / "ours.pub", errors.SignatureMissingError, "is not signed")
    assert no_engine_is_loaded == []


def test_an_unknown_key(folder, keys, no_engine_is_loaded):
    sign_artifact(folder, keys / "theirs")
    refused(folder, keys / "ours.pub", errors.UnknownKeyError, "no key of .*ours.pub signed")
    assert no_engine_is_loaded == []


def test_a_signature_of_another_manifest(folder, keys, no_engine_is_loaded):
    sign_artifact(folder, keys / "ours")
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")
    refused(folder, keys / "ours.pub", errors.SignatureWrongError, "is not of this manifest")
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
    with pytest.raises(errors.SignatureWrongError):
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
    with pytest.raises(errors.SignatureWrongError):
        open_artifact(folder, trust=both)


def test_signing_again_keeps_the_others(folder, keys):
    first = sign_artifact(folder, keys / "ours")
    second = sign_artifact(folder, keys / "theirs")
    assert sorted(second.keys) == sorted([first.key, second.key])
    again = (folder / "manifest.sig").read_bytes()
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
    ],
)  # fmt: skip
def test_a_signature_file_that_is_none(folder, keys, content, words):
    (folder / "manifest.sig").write_bytes(content)
    refused(folder, keys / "ours.pub", errors.SignatureFormatError, words)


def test_a_signature_file_without_signatures_is_by_no_known_key(folder, keys):
    (folder / "manifest.sig").write_text('{"signature_version": 1, "signatures": []}')
    refused(folder, keys / "ours.pub", errors.UnknownKeyError, "no key of")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: path.symlink_to("manifest.json"), errors.SymlinkError),
        (os.mkfifo, errors.IrregularFileError),
        (Path.mkdir, errors.IrregularFileError),
    ],
)
def test_a_signature_that_is_no_regular_file(folder, keys, make: Callable[[Path], None], error):
    make(folder / "manifest.sig")
    for trust in (None, keys / "ours.pub"):
        with pytest.raises(error):
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
    refused(folder, trust, errors.TrustFileError, words)


def test_an_empty_variable_is_a_trust_file_that_is_none(folder, monkeypatch):
    monkeypatch.setenv("SEKO_TRUST", "")
    with pytest.raises(errors.TrustFileError):
        open_artifact(folder)


def test_without_the_library_nothing_is_opened(folder, keys, monkeypatch):
    """Not even what is signed well; and nothing can be signed."""
    sign_artifact(folder, keys / "ours")
    for name in [one for one in sys.modules if one.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    refused(
        folder, keys / "ours.pub", errors.SignatureLibraryMissingError, r"pip install 'seko-runtime\[trust\]'"
    )
    with pytest.raises(MachineError, match=r"pip install 'seko-export\[sign\]'"):
        sign_artifact(folder, keys / "ours")


def test_a_signed_artifact_is_packed_and_unpacked_with_its_signature(folder, keys, tmp_path, monkeypatch):
    sign_artifact(folder, keys / "ours")
    pack_artifact(folder, tmp_path / "a.tar")
    unpack_artifact(tmp_path / "a.tar", tmp_path / "again", trust=keys / "ours.pub")
    assert (tmp_path / "again/manifest.sig").read_bytes() == (folder / "manifest.sig").read_bytes()
    with open_artifact(tmp_path / "again", trust=keys / "ours.pub"):
        pass
    with pytest.raises(errors.UnknownKeyError):
        unpack_artifact(tmp_path / "a.tar", tmp_path / "more", trust=keys / "theirs.pub")
    monkeypatch.setenv("SEKO_TRUST", str(keys / "theirs.pub"))
    assert main(["unpack", str(tmp_path / "a.tar"), "-o", str(tmp_path / "more")]) == 4
    with pytest.raises(errors.UnknownKeyError):
        pack_artifact(folder, tmp_path / "b.tar")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "again", "whole"]


def test_the_trust_file_is_asked_before_the_tars_manifest_is_parsed(folder, keys, tmp_path, monkeypatch):
    pack_artifact(folder, tmp_path / "a.tar")

    def refuse(_: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("seko_runtime.unpacking.parse_manifest", refuse)
    monkeypatch.setattr("seko_runtime.checked_artifact.parse_manifest", refuse)
    for call in (lambda: unpack_artifact(tmp_path / "a.tar", tmp_path / "x", trust=keys / "ours.pub"),
                 lambda: open_artifact(folder, trust=keys / "ours.pub")):  # fmt: skip
        with pytest.raises(errors.SignatureMissingError):
            call()


def test_signing_is_left_out_of_the_trust_files_reach(folder, keys, monkeypatch):
    """The maker may have a trust file configured too."""
    monkeypatch.setenv("SEKO_TRUST", str(keys / "ours.pub"))
    sign_artifact(folder, keys / "ours")
    with open_artifact(folder):
        pass


def test_an_artifact_that_does_not_check_is_not_signed(folder, keys):
    (folder / "surplus").write_text("x")
    with pytest.raises(errors.SurplusFileError):
        sign_artifact(folder, keys / "ours")
    assert not (folder / "manifest.sig").exists()


@pytest.mark.parametrize(
    "name",
    ["numpy.py", "sitecustomize.pyc", "torch.so", "_x.cpython-311-x86_64-linux-gnu.so", "a.pth", "json/__init__.py",
     "json/__init__.abi3.so"],
)  # fmt: skip
def test_a_folder_with_a_module_of_pythons_is_no_artifact(folder, keys, tmp_path, no_engine_is_loaded, name):
    """Whether the manifest lists it or not, and in a tar."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"raise SystemExit('imported')")
    top = "/" not in name
    for call in (open_artifact, read_manifest) if top else (open_artifact,):
        with pytest.raises(errors.ModuleFileError if top else errors.SurplusFileError):
            call(folder)
    table = json.loads((folder / "manifest.json").read_bytes())
    content = (folder / name).read_bytes()
    table["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / "manifest.json").write_text(json.dumps(table))
    for call in (
        open_artifact,
        read_manifest,
        check_artifact,
        lambda it: sign_artifact(it, keys / "ours"),
        lambda it: pack_artifact(it, tmp_path / "a.tar"),
        lambda it: unpack_artifact(tar_of(it, tmp_path / "b.tar"), tmp_path / "again"),
    ):
        with pytest.raises(errors.ModuleFileError, match=re.escape(repr(name))) as caught:
            call(folder)
        assert caught.value.exit_code == 4
    assert no_engine_is_loaded == []
    assert not (tmp_path / "again").exists()


def test_a_module_of_pythons_further_down_is_a_file_like_any_other(folder):
    content = b"raise SystemExit('imported')"
    table = json.loads((folder / "manifest.json").read_bytes())
    for name in ("engines/numpy.py", "engines/numpy/__init__.py", "note.pyx", "so"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        table["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / "manifest.json").write_text(json.dumps(table))
    with open_artifact(folder):
        pass


def tar_of(folder: Path, goal: Path) -> Path:
    """Pack by hand, as `pack` would, what it refuses."""
    document = (folder / "manifest.json").read_bytes()
    with goal.open("wb") as file:
        for name in ("manifest.json", *sorted(json.loads(document)["files"])):
            content = (folder / name).read_bytes()
            file.write(member_header(name, len(content)) + content + padding(len(content)))
        file.write(END)
    return goal


def test_keys(tmp_path):
    made = make_key(tmp_path / "new" / "key")
    assert stat.S_IMODE(made.private.stat().st_mode) == 0o600
    assert read_trust(made.public) == {made.key: "key"}
    with pytest.raises(ExportUsageError, match="keys are never replaced"):
        make_key(tmp_path / "new" / "key")
    assert make_key(tmp_path / "other").key != made.key


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN PRIVATE KEY-----\n", "RSA"])
def test_a_key_that_is_none(folder, tmp_path, content):
    if content == "RSA":
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        content = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ExportUsageError, match="--key"):
        sign_artifact(folder, tmp_path / "key")


def test_the_signature_is_what_the_page_says(folder, keys):
    """By the library alone, from the files alone; a second implementation would do this."""
    import hashlib

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    sign_artifact(folder, keys / "ours")
    (entry,) = json.loads((folder / "manifest.sig").read_bytes())["signatures"]
    assert sorted(entry) == ["algorithm", "key", "signature"]
    document = (folder / "manifest.json").read_bytes()
    message = b"seko manifest signature 1\n" + hashlib.sha256(document).digest()
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["key"])).verify(
        bytes.fromhex(entry["signature"]), message
    )
    assert signed_bytes(document) == message
    assert read_signatures((folder / "manifest.sig").read_bytes())[0][0] == entry["key"]


def test_the_commands(folder, tmp_path):
    command = [sys.executable, "-m", "seko_export"]
    subprocess.run([*command, "keygen", "-o", tmp_path / "k", "--json"], check=True, capture_output=True)
    done = subprocess.run(
        [*command, "sign", folder, "--key", tmp_path / "k", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(read_trust(tmp_path / "k.pub")) == [report["key"]]
    assert main(["info", str(folder), "--trust", str(tmp_path / "k.pub")]) == 0
