"""Keys that sign: who may read them, their passphrases, and what is no key."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the library cryptography is not installed: nothing can be signed")

from scripts.failing_os import KILL, run_failing
from seko_export.artifact.signing import make_key, read_passphrase, sign_artifact
from seko_export.errors import UsageError as ExportUsageError
from seko_runtime.format.trust import Trust, read_trust
from seko_runtime.opening.artifact import read_manifest

from . import toy_whole
from .eager_backend import write_whole


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact to sign."""
    return write_whole(tmp_path / "whole", toy_whole.whole_manifest())


def test_keys(tmp_path):
    pair = make_key(tmp_path / "new" / "key")
    assert stat.S_IMODE(pair.private.stat().st_mode) == 0o600
    assert read_trust(pair.public) == Trust({pair.key: "key"}, None, frozenset())
    with pytest.raises(ExportUsageError, match="keys are never replaced"):
        make_key(tmp_path / "new" / "key")
    with pytest.raises(ExportUsageError, match="keys are never replaced"):
        make_key(Path())
    assert make_key(tmp_path / "other").key != pair.key


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
        (tmp_path / "key").chmod(0o600)
    with pytest.raises(ExportUsageError, match=r"--key .* (holds no ed25519 private key|cannot be read)"):
        sign_artifact(folder, tmp_path / "key")


def test_a_public_key_signs_nothing_and_the_private_one_is_named(folder, tmp_path):
    """Others may read it; it need not be hidden from them."""
    pair = make_key(tmp_path / "maker")
    pair.public.chmod(0o644)
    with pytest.raises(ExportUsageError, match=f"--key {pair.public} holds no .*; .* file {pair.private}$"):
        sign_artifact(folder, pair.public)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_key_that_others_may_read_signs_nothing(folder, tmp_path, mode):
    key = make_key(tmp_path / "key").private
    key.chmod(mode)
    with pytest.raises(ExportUsageError, match=f"mode {mode:04o}, expected 0600.; chmod 600 {key}"):
        sign_artifact(folder, key)
    assert not (folder / "manifest.sig").exists()
    key.chmod(0o400)
    sign_artifact(folder, key)


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file with a passphrase."""
    path = tmp_path / "passphrase"
    path.write_bytes("grüße aus dem Tresor\n".encode())
    path.chmod(0o600)
    return path


def test_a_key_with_a_passphrase(folder, tmp_path, secret, monkeypatch):
    words = read_passphrase(secret)
    pair = make_key(tmp_path / "key", words)
    assert b"ENCRYPTED PRIVATE KEY" in pair.private.read_bytes()
    with pytest.raises(ExportUsageError, match="has a passphrase; let SEKO_SIGN_PASSPHRASE_FILE name a file"):
        sign_artifact(folder, pair.private)
    for wrong in (b"", b"other"):
        with pytest.raises(ExportUsageError, match="the passphrase does not open --key"):
            sign_artifact(folder, pair.private, lambda typed=wrong: typed)
    assert not (folder / "manifest.sig").exists()
    assert sign_artifact(folder, pair.private, lambda: words).key == pair.key
    monkeypatch.setenv("SEKO_SIGN_PASSPHRASE_FILE", str(secret))
    sign_artifact(folder, pair.private)
    assert read_manifest(folder, trust=pair.public)
    sign_artifact(folder, make_key(tmp_path / "plain").private)  # one without is not asked for any


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"secret", 0o644, "may be read by others"),
        (b"", 0o600, "is empty"),
        (b"\n", 0o600, "is empty"),
        (b"two\nlines\n", 0o600, "several lines"),
        (b"x" * 2000, 0o600, "has 1024 bytes or more"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_passphrase_that_is_none(tmp_path, content, mode, words):
    path = tmp_path / "passphrase"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ExportUsageError, match=words):
        read_passphrase(path)


def test_the_commands_take_a_passphrase_from_files_or_a_terminal(folder, tmp_path, secret, monkeypatch):
    from click.testing import CliRunner

    from seko_export.cli import main as export

    run = CliRunner().invoke
    result = run(export, ["keygen", "-o", str(tmp_path / "filed"), "--passphrase-file", str(secret)])
    assert result.exit_code == 0, result.output
    signing = ["sign", str(folder), "--key", str(tmp_path / "filed")]
    assert run(export, signing).exit_code == 2  # no terminal, no variable
    assert run(export, signing, env={"SEKO_SIGN_PASSPHRASE_FILE": str(secret)}).exit_code == 0
    both = [*("keygen", "-o", str(tmp_path / "no")), "--ask-passphrase", "--passphrase-file", str(secret)]
    assert run(export, both).exit_code == 2
    typed = run(
        export, ["keygen", "-o", str(tmp_path / "typed"), "--ask-passphrase"], input="sesame\nsesame\n"
    )
    assert (typed.exit_code, "sesame" in typed.output) == (0, False)
    monkeypatch.setattr("seko_export.cli.delivery.on_terminal", lambda: True)
    signing = ["sign", str(folder), "--key", str(tmp_path / "typed")]
    assert run(export, signing, input="open\n").exit_code == 2
    assert run(export, signing, input="sesame\n").exit_code == 0
    assert len(json.loads((folder / "manifest.sig").read_bytes())["signatures"]) == 2


@pytest.mark.parametrize("kind", [KILL, "ENOSPC"])
def test_a_process_that_fails_while_it_writes_a_key_leaves_no_half_key(tmp_path, kind):
    """Half a key would stay for good, as keys are never replaced, and so would one without its public key."""
    make_key(tmp_path / "warm")
    for at in range(1, 100):
        place = tmp_path / str(at)
        place.mkdir()
        ending = run_failing(lambda goal=place / "maker": make_key(goal), at, kind)
        for path in place.glob("maker"):
            assert b"END PRIVATE KEY" in path.read_bytes(), at
            assert (place / "maker.pub").exists(), at
        for path in place.glob("maker.pub"):
            assert path.read_text().startswith("ed25519 "), at
        if ending.how == "done" and not ending.struck:
            break
    assert at > 10
    assert sorted(path.name for path in place.iterdir()) == ["maker", "maker.pub"]
