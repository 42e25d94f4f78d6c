"""Packing and unpacking: one artifact, one tar; every other tar is refused by name and leaves nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seko_export.artifact.manifest_json import manifest_json
from seko_export.artifact.packing import pack_artifact
from seko_export.cli import main as seko_export
from seko_export.errors import UsageError as ExportUsageError
from seko_runtime import errors
from seko_runtime.cli.commands import main
from seko_runtime.format.manifest import FORMAT_VERSION
from seko_runtime.format.tar_format import BLOCK_BYTES, END, member_bytes, member_header, padding
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.video.manifest import parse_video_manifest

from . import toy

Members = list[tuple[bytes, bytes]]  # a header as it lies in the tar, and the content


@pytest.fixture(scope="module")
def folder(built_whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that checks, with stand-ins for engines and names that need a pax header; not to be changed."""
    artifact = shutil.copytree(built_whole, tmp_path_factory.mktemp("made") / "whole")
    for name in ("more/" + "x" * 130, "more/ä", "more/empty"):
        (artifact / name).parent.mkdir(exist_ok=True)
        (artifact / name).write_bytes(b"" if name.endswith("empty") else b"content of " + name.encode())
    manifest = replace(
        parse_video_manifest((artifact / "manifest.json").read_bytes()), files=toy.file_entries(artifact)
    )
    (artifact / "manifest.json").write_bytes(manifest_json(manifest))
    return artifact


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    goal = tmp_path_factory.mktemp("packed") / "whole.tar"
    pack_artifact(folder, goal)
    return goal.read_bytes()


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_packed_comes_back(folder, packed, tmp_path):
    (tmp_path / "a.tar").write_bytes(packed)
    unpacked = unpack_artifact(tmp_path / "a.tar", tmp_path / "new" / "whole")
    assert content_of(tmp_path / "new/whole") == content_of(folder)
    assert unpacked.files == len(content_of(folder))
    assert unpacked.bytes == sum(map(len, content_of(folder).values()))
    assert names(tmp_path) == ["a.tar", "new"]
    assert names(tmp_path / "new") == ["whole"]


def test_equal_artifacts_give_equal_bytes(folder, packed, tmp_path):
    """Whatever the clock, the owner, the umask and the order in which files were made say."""
    copy = tmp_path / "copy"
    for name, content in sorted(content_of(folder).items(), reverse=True):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
        (copy / name).chmod(0o600)
        os.utime(copy / name, (1, 1))
    packing = pack_artifact(copy, tmp_path / "copy.tar")
    assert (tmp_path / "copy.tar").read_bytes() == packed
    assert packing.bytes == len(packed)
    unpack_artifact(tmp_path / "copy.tar", tmp_path / "again")
    pack_artifact(tmp_path / "again", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == packed


def test_an_artifact_is_not_packed_into_itself(folder, tmp_path):
    """The tar would be a file that its manifest does not list: it would open no more."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    for goal in (copy / "a.tar", copy / "engines" / ".." / "a.tar"):
        with pytest.raises(ExportUsageError, match="lies inside the artifact"):
            pack_artifact(copy, goal)
    assert content_of(copy) == content_of(folder)


def test_an_artifact_is_not_packed_onto_a_loop_of_links(folder, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(errors.UsageError, match="loop exists and is no regular file"):
        pack_artifact(folder, tmp_path / "loop")


def test_any_tar_reads_it(folder, packed, tmp_path):
    """Python's tar reader as an oracle for the headers, GNU tar where there is one."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = tar.getmembers()
        content = {member.name: tar.extractfile(member).read() for member in members}
    assert content == content_of(folder)
    listed = sorted(set(content) - {"manifest.json"})
    assert [member.name for member in members] == ["manifest.json", *listed]
    assert {(member.mode, member.uid, member.gid, member.mtime, member.uname) for member in members} == {
        (0o644, 0, 0, 0, "")
    }
    (tmp_path / "a.tar").write_bytes(packed)
    try:
        done = subprocess.run(["tar", "-tf", tmp_path / "a.tar"], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("no tar command here; Python's reader agreed")
    assert len(done.stdout.splitlines()) == len(content)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 8**11 - 1, 8**11, 1 << 40])
@pytest.mark.parametrize("path", ["a", "x" * 100, "x" * 101, "d/" + "ä" * 400, "weights/0.safetensors"])
def test_headers_say_name_and_size(path, size):
    header = member_header(path, size)
    assert len(header) % BLOCK_BYTES == 0
    with tarfile.open(fileobj=io.BytesIO(header + END)) as tar:
        member = tar.next()  # reads the header alone
    assert (member.name, member.size) == (path, size)
    assert member_bytes(path, size) == len(header) + size + -size % BLOCK_BYTES


def test_an_artifact_that_does_not_check_is_not_packed(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/surplus").write_text("x")
    with pytest.raises(errors.ArtifactError, match="'surplus' is not in the manifest"):
        pack_artifact(tmp_path / "copy", tmp_path / "a.tar")
    assert names(tmp_path) == ["copy"]


def test_what_is_there_is_not_replaced(folder, packed, tmp_path):
    (tmp_path / "a.tar").write_bytes(packed)
    with pytest.raises(errors.UsageError, match="exists already"):
        pack_artifact(tmp_path / "none", tmp_path / "a.tar")  # before anything is read
    pack_artifact(folder, tmp_path / "a.tar", replace=True)
    pack_artifact(folder, tmp_path / "new/folder/a.tar")
    assert (tmp_path / "new/folder/a.tar").read_bytes() == packed
    (tmp_path / "there").mkdir()
    for force in (False, True):
        with pytest.raises(errors.UsageError, match="exists and is no artifact"):
            unpack_artifact(tmp_path / "a.tar", tmp_path / "there", replace=force)
    with pytest.raises(errors.ArtifactError, match=r"none\.tar was not found"):
        unpack_artifact(tmp_path / "none.tar", tmp_path / "goal")
    with pytest.raises(errors.ArtifactError, match="cannot be read"):
        unpack_artifact(tmp_path / "there", tmp_path / "goal")


def members_of(packed: bytes) -> Members:
    """Headers and contents in order; the end is left out."""
    members, at = [], 0
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for getmember in tar.getmembers():
            members.append(
                (
                    packed[at : getmember.offset_data],
                    packed[getmember.offset_data : getmember.offset_data + getmember.size],
                )
            )
            at = getmember.offset_data + getmember.size + len(padding(getmember.size))
    return members


def joined(members: Members) -> bytes:
    return b"".join(header + content + padding(len(content)) for header, content in members) + END


def odd_header(name: bytes = b"odd", size: int = 0, **changes: object) -> bytes:
    """A well-formed header by Python's writer."""
    info = tarfile.TarInfo()
    info.name, info.size = name.decode(), size
    for key, value in {"mode": 0o644, **changes}.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.USTAR_FORMAT)


def index_of(members: Members, path: bytes) -> int:
    return next(number for number, (header, _) in enumerate(members) if header.startswith(path + b"\0"))


def change_weights(members: Members, header: bytes | None = None, content: bytes | None = None) -> Members:
    place = index_of(members, b"weights/0.safetensors")
    was = members[place]
    now = (was[0] if header is None else header, was[1] if content is None else content)
    return [*members[:place], now, *members[place + 1 :]]


def with_manifest(members: Members, edit: Callable[[dict], None]) -> Members:
    """The manifest rewritten, with a header that fits it."""
    table = json.loads(members[0][1])
    edit(table)
    document = json.dumps(table).encode()
    return [(member_header("manifest.json", len(document)), document), *members[1:]]


def weights_size(members: Members) -> int:
    return len(members[index_of(members, b"weights/0.safetensors")][1])


def weights(kind: bytes = b"0", **changes: object) -> Callable[[Members], Members]:
    def edit(members: Members) -> Members:
        size = weights_size(members)
        return change_weights(members, odd_header(b"weights/0.safetensors", size, type=kind, **changes))

    return edit


def odd(name: bytes, kind: bytes = b"0", at: int = 2) -> Callable[[Members], Members]:
    return lambda members: [*members[:at], (odd_header(name, type=kind), b""), *members[at:]]


HOSTILE: dict[str, tuple[Callable[[Members], Members], type[errors.SekoRuntimeError]]] = {
    "climbs": (odd(b"../out"), errors.ManifestError),
    "absolute": (odd(b"/tmp/out"), errors.ManifestError),
    "climbs later": (odd(b"engines/../../out"), errors.ManifestError),
    "dot": (odd(b"./engines"), errors.ManifestError),
    "backslash": (odd(b"a\\b"), errors.ManifestError),
    "no name": (odd(b""), errors.ManifestError),
    "surplus": (odd(b"surplus"), errors.ArtifactError),
    "surplus at the end": (odd(b"zzz", at=1000), errors.ArtifactError),
    "symlink": (odd(b"link", b"2"), errors.ArtifactError),
    "hard link": (odd(b"link", b"1"), errors.ArtifactError),
    "listed, but a symlink": (weights(b"2", linkname="/etc/passwd"), errors.ArtifactError),
    "listed, but a hard link": (weights(b"1", linkname="manifest.json"), errors.ArtifactError),
    "character device": (odd(b"null", b"3"), errors.ArtifactError),
    "block device": (odd(b"disk", b"4"), errors.ArtifactError),
    "folder": (odd(b"engines", b"5"), errors.ArtifactError),
    "pipe": (odd(b"pipe", b"6"), errors.ArtifactError),
    "listed, but a pipe": (weights(b"6"), errors.ArtifactError),
    "GNU long name": (odd(b"././@LongLink", b"L"), errors.ManifestError),
    "GNU sparse": (weights(b"S"), errors.ArtifactError),
    "pax header": (weights(b"x"), errors.ArtifactError),
    "global pax header": (weights(b"g"), errors.ArtifactError),
    "executable": (weights(mode=0o755), errors.ArtifactError),
    "setuid": (weights(mode=0o4644), errors.ArtifactError),
    "an owner": (weights(uid=1000), errors.ArtifactError),
    "a time": (weights(mtime=1), errors.ArtifactError),
    "manifest twice": (lambda m: [m[0], *m], errors.ArtifactError),
    "a file twice": (lambda m: [*m[:2], m[1], *m[2:]], errors.ArtifactError),
    "the last file twice": (lambda m: [*m, m[-1]], errors.ArtifactError),
    "manifest not first": (lambda m: [m[1], m[0], *m[2:]], errors.ArtifactError),
    "other order": (lambda m: [m[0], m[2], m[1], *m[3:]], errors.ArtifactError),
    "no manifest": (lambda m: m[1:], errors.ArtifactError),
    "nothing": (lambda _: [], errors.ArtifactError),
    "a file is missing": (lambda m: [*m[:1], *m[2:]], errors.ArtifactError),
    "the last file is missing": (lambda m: m[:-1], errors.ArtifactError),
    "one bit": (lambda m: change_weights(m, content=bytes(weights_size(m))), errors.ArtifactError),
    "too short": (
        lambda m: change_weights(m, member_header("weights/0.safetensors", 1), b"x"),
        errors.ArtifactError,
    ),
    "too long": (
        lambda m: change_weights(m, member_header("weights/0.safetensors", 9999), bytes(9999)),
        errors.ArtifactError,
    ),
    "a manifest that is too large": (
        lambda m: [(member_header("manifest.json", 16777217), bytes(16777217)), *m[1:]],
        errors.ArtifactError,
    ),
    "a manifest that is none": (
        lambda m: [(member_header("manifest.json", 2), b"[]"), *m[1:]],
        errors.ManifestError,
    ),
    "a manifest of a newer format": (
        lambda m: with_manifest(m, lambda table: table.update(format_version=FORMAT_VERSION + 1)),
        errors.ManifestError,
    ),
    "a path of the manifest that climbs": (
        lambda m: with_manifest(
            m, lambda table: table["files"].update({"../x": next(iter(table["files"].values()))})
        ),
        errors.ManifestError,
    ),
    "a file below a file": (
        lambda m: with_manifest(
            m, lambda table: table["files"].update({"manifest.json/x": next(iter(table["files"].values()))})
        ),
        errors.ManifestError,
    ),
    "the signature in the table": (
        lambda m: with_manifest(
            m, lambda table: table["files"].update({"manifest.sig": next(iter(table["files"].values()))})
        ),
        errors.ManifestError,
    ),
}


def unpack_through_a_pipe(tar: bytes, tmp_path: Path, goal: Path) -> object:
    """A pipe has no length, so what is wrong is found where it stands."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError):  # refused before its end
            pipe.write_bytes(tar)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        return unpack_artifact(pipe, goal)
    finally:
        feeder.join()
        pipe.unlink()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tar(packed, tmp_path, name):
    """From a pipe by its own error; from a file by that or by its length, which is looked at first."""
    edit, error = HOSTILE[name]
    tar = joined(edit(members_of(packed)))
    with pytest.raises(errors.SekoRuntimeError) as caught:
        unpack_through_a_pipe(tar, tmp_path, tmp_path / "goal")
    assert type(caught.value) is error, caught.value
    assert caught.value.exit_code == 4
    assert names(tmp_path) == []
    (tmp_path / "a.tar").write_bytes(tar)
    with pytest.raises((error, errors.ArtifactError)):
        unpack_artifact(tmp_path / "a.tar", tmp_path / "goal")
    assert names(tmp_path) == ["a.tar"]


@pytest.mark.parametrize("cut", [0, 100, 512, 700, 10_000, -1, -512, -1024])
def test_a_truncated_tar(packed, tmp_path, cut):
    tar = packed[:cut]
    with pytest.raises(errors.ArtifactError, match="copy it again"):
        unpack_through_a_pipe(tar, tmp_path, tmp_path / "goal")
    (tmp_path / "a.tar").write_bytes(tar)
    with pytest.raises(errors.ArtifactError, match="copy it again"):
        unpack_artifact(tmp_path / "a.tar", tmp_path / "goal")
    assert names(tmp_path) == ["a.tar"]


TRAILING = "goes on behind its end|its manifest makes"


@pytest.mark.parametrize("more", [b"x", bytes(1), bytes(512), bytes(8192)])
def test_bytes_behind_the_end(packed, tmp_path, more):
    with pytest.raises(errors.ArtifactError, match=TRAILING):
        unpack_through_a_pipe(packed + more, tmp_path, tmp_path / "goal")
    (tmp_path / "a.tar").write_bytes(packed + more)
    with pytest.raises(errors.ArtifactError, match=TRAILING):
        unpack_artifact(tmp_path / "a.tar", tmp_path / "goal")
    assert names(tmp_path) == ["a.tar"]


def test_bytes_in_the_padding(packed, tmp_path):
    members = members_of(packed)
    end = len(members[0][0]) + len(members[0][1])
    assert packed[end] == 0
    (tmp_path / "a.tar").write_bytes(packed[:end] + b"x" + packed[end + 1 :])
    with pytest.raises(errors.ArtifactError, match=r"hide behind the end of 'manifest\.json'"):
        unpack_artifact(tmp_path / "a.tar", tmp_path / "goal")


def test_a_table_larger_than_the_disk_is_refused_before_anything_is_written(packed, tmp_path):
    def edit(table: dict) -> None:
        table["files"]["weights/0.safetensors"]["size"] = shutil.disk_usage(tmp_path).free + (1 << 40)

    tar = joined(with_manifest(members_of(packed), edit))
    with pytest.raises(errors.DiskError, match=r"no space left for \d+ bytes .* \d+ are free"):
        unpack_through_a_pipe(tar, tmp_path, tmp_path / "goal")
    assert names(tmp_path) == []


def test_a_tar_by_tar_itself_is_refused_with_the_advice_to_pack(folder, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(folder / "manifest.json", "manifest.json")
        tar.add(folder, "")
    with pytest.raises(errors.ArtifactError, match="pack the artifact with that"):
        unpack_artifact(tmp_path / "a.tar", tmp_path / "goal")


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "drop block", "repeat block", "swap blocks", "octal"]),
        st.integers(0, 1 << 30),
        st.integers(0, 1 << 30),
    ),
    min_size=1,
    max_size=4,
)


def mutate(tar: bytes, kind: str, at: int, detail: int) -> bytes:
    """Change a tar, mostly in whole blocks and in headers, where a reader can be led astray."""
    blocks = [tar[i : i + BLOCK_BYTES] for i in range(0, len(tar), BLOCK_BYTES)] or [b""]
    a, b = at % len(blocks), detail % len(blocks)
    if kind == "flip" and tar:
        place = at % len(tar)
        return tar[:place] + bytes([tar[place] ^ (1 << detail % 8)]) + tar[place + 1 :]
    if kind == "cut":
        return tar[: at % (len(tar) + 1)]
    if kind == "insert":
        return tar[: a * BLOCK_BYTES] + bytes([detail % 256]) * (1 + detail % 1024) + tar[a * BLOCK_BYTES :]
    if kind == "drop block":
        del blocks[a]
    elif kind == "repeat block":
        blocks.insert(b, blocks[a])
    elif kind == "swap blocks":
        blocks[a], blocks[b] = blocks[b], blocks[a]
    elif kind == "octal":  # another name, size or type, with a checksum that is right
        heads = [i for i, block in enumerate(blocks) if block[257:262] == b"ustar" and len(block) == 512]
        if heads:
            i = heads[at % len(heads)]
            raw = bytearray(blocks[i])
            raw[[0, 3, 124, 130, 134, 156, 157, 345][detail % 8]] = b"01234567./x\0"[detail // 8 % 12]
            raw[148:156] = b" " * 8
            raw[148:156] = b"%06o\0 " % sum(raw)
            blocks[i] = bytes(raw)
    return b"".join(blocks)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS)
def test_a_mutated_tar_is_refused_or_is_the_one_tar_of_another_manifest(packed, tmp_path, mutations):
    """A bit in the manifest's free text makes another artifact, whose digest says so; nothing else comes through."""
    tar = packed
    for kind, at, detail in mutations:
        tar = mutate(tar, kind, at, detail)
    (tmp_path / "a.tar").write_bytes(tar)
    goal = tmp_path / "goal"
    try:
        unpacked = unpack_artifact(tmp_path / "a.tar", goal)
    except errors.ArtifactError:
        assert names(tmp_path) == ["a.tar"]
        assert tar != packed
        return
    content = content_of(goal)
    shutil.rmtree(goal)
    assert unpacked.digest == hashlib.sha256(content["manifest.json"]).hexdigest()
    order = ["manifest.json", *sorted(set(content) - {"manifest.json"})]
    assert joined([(member_header(name, len(content[name])), content[name]) for name in order]) == tar


def test_the_commands(folder, packed, tmp_path, capsys):
    """The runtime's own and the exporter's pair."""
    (tmp_path / "a.tar").write_bytes(packed)
    assert main(["unpack", str(tmp_path / "a.tar"), "-o", str(tmp_path / "one"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["folder"] == str(tmp_path / "one")
    assert content_of(tmp_path / "one") == content_of(folder)
    assert main(["unpack", str(tmp_path / "a.tar"), "-o", str(tmp_path / "one")]) == 2
    assert "--force" in capsys.readouterr().err
    (tmp_path / "one" / "manifest.json").write_text("{}")
    assert main(["unpack", str(tmp_path / "a.tar"), "-o", str(tmp_path / "one"), "--force"]) == 0
    assert content_of(tmp_path / "one") == content_of(folder)
    (tmp_path / "a.tar").write_bytes(packed[:-1])
    assert main(["unpack", str(tmp_path / "a.tar"), "-o", str(tmp_path / "two")]) == 4

    def exported(*words: str) -> str:
        done = CliRunner().invoke(seko_export, words)
        assert done.exit_code == 0, done.output
        return done.stdout

    one, two, b = (str(tmp_path / name) for name in ("one", "two", "b.tar"))
    packing = exported("pack", one, "-o", b, "--json")
    assert json.loads(packing.splitlines()[-1])["digest"] == report["digest"]
    assert (tmp_path / "b.tar").read_bytes() == packed
    exported("unpack", b, "-o", two)
    (tmp_path / "two" / "manifest.json").write_text("{}")
    exported("unpack", b, "-o", two, "--force")
    assert content_of(tmp_path / "two") == content_of(folder)
