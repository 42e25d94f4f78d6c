"""The exact tar of an artifact: its members, their order, and each header, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping

from seko_runtime.format.manifest import MANIFEST_FILE, SIGNATURE_FILE, FileEntry

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
MAX_USTAR_SIZE = 8**11 - 1  # largest size in eleven octal digits
FILE_TYPE, PAX_TYPE = b"0", b"x"
_NAME_BYTES = 100


def member_header(path: str, size: int) -> bytes:
    """Return the tar header of one file: a POSIX ustar block without owner or time, mode 0644.

    For a name that is not ASCII or longer than 100 bytes, or a size of 8 GiB or more, a pax header comes before the
    block.

    Parameters
    ----------
    path : str
        Relative path of the file, with parts joined by ``/``.
    size : int
        Size of the file's content in bytes.
    """
    pax = b""
    if not path.isascii() or len(path) > _NAME_BYTES:
        pax += _pax_record(b"path", path.encode("utf-8"))
    if size > MAX_USTAR_SIZE:
        pax += _pax_record(b"size", b"%d" % size)
    block = _block(
        path.encode("ascii", "replace")[:_NAME_BYTES], size if size <= MAX_USTAR_SIZE else 0, FILE_TYPE
    )
    if not pax:
        return block
    return _block(b"././@PaxHeader", len(pax), PAX_TYPE) + pax + padding(len(pax)) + block


def padding(size: int) -> bytes:
    """Return the zeros that pad ``size`` bytes to whole blocks."""
    return bytes(-size % BLOCK_BYTES)


def member_bytes(path: str, size: int) -> int:
    """Size of a file in the tar with its header and padding, in bytes."""
    return len(member_header(path, size)) + size + len(padding(size))


def tar_bytes(document: bytes, signature: bytes | None, files: Mapping[str, FileEntry]) -> int:
    """Size of the whole tar of an artifact with this manifest and signature, in bytes."""
    total = member_bytes(MANIFEST_FILE, len(document)) + len(END)
    if signature is not None:
        total += member_bytes(SIGNATURE_FILE, len(signature))
    return total + sum(member_bytes(path, entry.size) for path, entry in files.items())


def _block(name: bytes, size: int, kind: bytes) -> bytes:
    fields = b"".join(
        (
            name.ljust(_NAME_BYTES, b"\0"),
            b"0000644\0",  # mode
            b"0000000\0" * 2,  # owner and group
            b"%011o\0" % size,
            b"00000000000\0",  # time
            b" " * 8,  # the checksum field, which counts as spaces
            kind.ljust(1 + _NAME_BYTES, b"\0"),  # type, and no link
            b"ustar\x0000",
        )
    ).ljust(BLOCK_BYTES, b"\0")
    return fields[:148] + b"%06o\0 " % sum(fields) + fields[156:]


def _pax_record(key: bytes, value: bytes) -> bytes:
    """Return the pax record ``LENGTH KEY=VALUE`` with a line feed at its end. LENGTH is the record's size in bytes, the
    digits of LENGTH included."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if rest + len(str(length)) != length:
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)
